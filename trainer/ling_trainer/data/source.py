"""Where samples come from: Megatron files in a pinned order, or synthetic text."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ling_trainer.config import DataConfig
from ling_trainer.data.gpt import GPTDataset, SplitName, build_index, split_documents
from ling_trainer.data.indexed import DataError, IndexedDataset, index_path
from ling_trainer.data.order import SampleOrder
from ling_trainer.data.packing import effective_pad_id
from ling_trainer.data.synthetic import SyntheticDataset


class SampleSource(Protocol):
    """Samples by number; the same number gives the same text in every process, at any time."""

    def sample(self, i: int) -> npt.NDArray[np.integer[Any]]:
        """Read the S + 1 tokens of sample i."""
        ...


@dataclass(frozen=True, eq=False)
class PinnedDataset:
    """A split in the order of a SampleOrder: one dataset a segment, all over the same data."""

    order: SampleOrder
    segments: tuple[GPTDataset, ...]

    def sample(self, i: int) -> npt.NDArray[np.int64]:
        """Read the S + 1 tokens of sample i of the run.

        Raises:
          IndexError: i >= order.num_samples.
          DataError: a token id is outside of the vocabulary.
        """
        segment, local = self.order.locate(i)
        return self.segments[segment].sample(local)


def open_source(
    data: DataConfig, *, vocab_size: int, order: SampleOrder, split_name: SplitName = "train"
) -> SampleSource:
    """Open what the configuration names.

    Args:
      data: type and path of the data, split, seed, sequence length.
      vocab_size: token ids must be below it.
      order: how many samples the run reads, as pinned in its checkpoint.
      split_name: which part of data.split to read.

    Raises:
      DataError: files that are missing, damaged or too small for one sample.
    """
    if data.dataset_type == "synthetic" or data.dataset_path is None:
        return SyntheticDataset(
            seed=data.data_shuffle_seed,
            sequence_length=data.max_target_length,
            vocab_size=vocab_size,
            eod_id=data.eod_id,
            pad_id=data.pad_id,
        )
    indexed = IndexedDataset.open(data.dataset_path)
    try:
        segments = _segments(data, indexed, vocab_size, order, split_name)
    except ValueError as error:
        where = f"{index_path(indexed.prefix)}, {split_name} part of split={data.split}"
        raise DataError(f"{where}: {error}") from error
    return PinnedDataset(order, segments)


def _segments(
    data: DataConfig,
    indexed: IndexedDataset,
    vocab_size: int,
    order: SampleOrder,
    split_name: SplitName,
) -> tuple[GPTDataset, ...]:
    documents = split_documents(data.split, len(indexed), split_name)
    if not documents:
        raise ValueError(
            f"none of {len(indexed)} documents; give it a larger share or add documents"
        )
    segments: list[GPTDataset] = []
    first = 0
    for number, size in enumerate(order.sizes):
        index = build_index(
            indexed.sequence_lengths,
            np.arange(documents.start, documents.stop, dtype=np.int32),
            num_samples=size,
            sequence_length=data.max_target_length,
            seed=data.data_shuffle_seed + number,
        )
        segments.append(
            GPTDataset(
                indexed,
                index,
                sequence_length=data.max_target_length,
                vocab_size=vocab_size,
                pad_id=effective_pad_id(eod_id=data.eod_id, pad_id=data.pad_id),
                first_sample=first,
            )
        )
        first += size
    return tuple(segments)
