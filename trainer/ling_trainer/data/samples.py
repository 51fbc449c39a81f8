"""Samples: the tokens that an index names, with the documents they come from."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ling_trainer.data.blend import BlendIndex
from ling_trainer.data.gpt import GPTIndex
from ling_trainer.data.index_file import DataError
from ling_trainer.data.indexed import IndexedDataset, Part, Tokens

NO_PAD = -1
"""Padding where no token id means padding."""


class Sample(NamedTuple):
    """One sample.

    Attributes:
      text: int64 [L + x], L the sequence length and x 1 with the extra token.
      documents: int64 [n], sequences of the .idx that the text was cut from, in order; empty ones
        too. Empty where there is no .idx.
      offsets: int64 [n], where each cut begins in its document.
      lengths: int64 [n], tokens of each cut; their sum is less than L + x where the text is
        padded.
      dataset: its number in the blend.
      first_text: int64 [L + x], the first sample of its dataset, where that matters (see
        packing.pack).
    """

    text: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    dataset: int = 0
    first_text: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, eq=False)
class GPTDataset:
    """Samples of an indexed dataset in Megatron's order.

    Attributes:
      indexed: the tokens.
      index: their order.
      sequence_length: L.
      vocab_size: every token id must be in [0, vocab_size).
      pad_id: fills a last sample that is too short.
      extra_token: x.
      with_first_text: give each sample the text of the first.
    """

    indexed: IndexedDataset
    index: GPTIndex
    sequence_length: int
    vocab_size: int
    pad_id: int = NO_PAD
    extra_token: bool = True
    with_first_text: bool = False

    def __post_init__(self) -> None:
        """Refuse tokens that are no integers."""
        if self.indexed.dtype.kind not in "iu":
            raise DataError(
                f"{self.indexed.prefix}.idx, byte 17: the tokens are "
                f"{self.indexed.dtype.name}; language-model data must be integers"
            )

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.index)

    def read(self, i: int, *, number: int | None = None) -> Sample:
        """Read sample i, 0 <= i < len(self).

        Args:
          i: place in this dataset.
          number: what an error calls the sample; None: i.

        Raises:
          DataError: a token id is outside of the vocabulary.
        """
        row = int(self.index.shuffle_index[i])
        parts = self._parts(row)
        cuts = self.indexed.read_parts(parts)
        text = np.full(self.sequence_length + int(self.extra_token), self.pad_id, np.int64)
        filled = 0
        for part, cut in zip(parts, cuts, strict=True):
            self._check(cut, part, sample=i if number is None else number)
            text[filled : filled + len(cut)] = cut
            filled += len(cut)
        return Sample(
            text,
            documents=np.array([part.sequence for part in parts], np.int64),
            offsets=np.array([part.offset for part in parts], np.int64),
            lengths=np.array([len(cut) for cut in cuts], np.int64),
            first_text=self._first_text if self.with_first_text else None,
        )

    @functools.cached_property
    def _first_text(self) -> npt.NDArray[np.int64]:
        parts = self._parts(int(self.index.shuffle_index[0]))
        text = np.full(self.sequence_length + int(self.extra_token), self.pad_id, np.int64)
        tokens = np.concatenate(self.indexed.read_parts(parts))
        text[: len(tokens)] = tokens
        return text

    def _parts(self, row: int) -> list[Part]:
        (begin, begin_offset), (end, end_offset) = self.index.sample_index[row : row + 2].tolist()
        parts: list[Part] = []
        for position in range(begin, end + 1):
            offset = begin_offset if position == begin else 0
            length = end_offset + int(self.extra_token) - offset if position == end else None
            parts.append(Part(int(self.index.document_index[position]), offset, length))
        return parts

    def _check(self, cut: Tokens, part: Part, *, sample: int) -> None:
        if not len(cut) or (cut.min() >= 0 and cut.max() < self.vocab_size):
            return
        k = int(((cut < 0) | (cut >= self.vocab_size)).argmax())
        byte = int(self.indexed.index.pointers[part.sequence])
        byte += (part.offset + k) * self.indexed.dtype.itemsize
        raise DataError(
            f"{self.indexed.prefix}.bin, byte {byte}: token id {cut[k]} (sample {sample}, "
            f"document {part.sequence}, offset {part.offset + k}) is not in "
            f"[0, {self.vocab_size}); set model.vocab_size to the tokenizer's, or rebuild the "
            "dataset"
        )


@dataclass(frozen=True, eq=False)
class BlendedDataset:
    """Samples of several datasets in turn.

    Attributes:
      datasets: in the order of the blend.
      index: whose turn it is.
    """

    datasets: Sequence[GPTDataset]
    index: BlendIndex

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.index)

    def read(self, i: int, *, number: int | None = None) -> Sample:
        """Read sample i, 0 <= i < len(self); see GPTDataset.read."""
        dataset = int(self.index.dataset_index[i])
        place = int(self.index.dataset_sample_index[i])
        sample = self.datasets[dataset].read(place, number=i if number is None else number)
        return sample._replace(dataset=dataset)
