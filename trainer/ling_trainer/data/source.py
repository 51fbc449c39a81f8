"""Where samples come from: Megatron files in a pinned order, or synthetic text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ling_trainer.config import DataConfig
from ling_trainer.data.blend import (
    Blend,
    BlendIndex,
    build_blend_index,
    build_exhaustive_blend_index,
    member_sizes,
    normalize,
    parse_blend,
)
from ling_trainer.data.gpt import GPTIndex, SplitName, build_index, split_documents
from ling_trainer.data.index_file import DataError
from ling_trainer.data.indexed import IndexedDataset
from ling_trainer.data.order import SampleOrder
from ling_trainer.data.packing import effective_pad_id
from ling_trainer.data.samples import BlendedDataset, GPTDataset, Sample
from ling_trainer.data.synthetic import SyntheticDataset

type Dataset = GPTDataset | BlendedDataset


class SampleSource(Protocol):
    """Samples by number; the same number gives the same text in every process, at any time."""

    @property
    def content(self) -> tuple[str, ...]:
        """What the samples are made of, as a checkpoint keeps it: one line a dataset."""
        ...

    def read(self, i: int) -> Sample:
        """Read sample i of the run."""
        ...


@dataclass(frozen=True, eq=False)
class PinnedDataset:
    """A split in the order of a SampleOrder: one dataset a segment, all over the same data."""

    order: SampleOrder
    segments: tuple[Dataset, ...]
    content: tuple[str, ...]

    def read(self, i: int) -> Sample:
        """Read sample i of the run.

        Raises:
          IndexError: i >= order.num_samples.
          DataError: a token id is outside of the vocabulary.
        """
        segment, local = self.order.locate(i)
        return self.segments[segment].read(local, number=i)


def open_source(
    data: DataConfig, *, vocab_size: int, order: SampleOrder, split_name: SplitName = "train"
) -> SampleSource:
    """Open what the configuration names.

    Args:
      data: type and path of the data, split, seed, sequence length.
      vocab_size: token ids must be below it.
      order: how many samples the run reads, as pinned in its checkpoint.
      split_name: which part of the data to read.

    Raises:
      DataError: files that are missing, damaged or too small for one sample.
    """
    if data.dataset_type == "synthetic":
        return SyntheticDataset(
            seed=data.data_shuffle_seed,
            sequence_length=data.max_target_length,
            vocab_size=vocab_size,
            eod_id=data.eod_id,
            pad_id=data.pad_id,
            extra_token=data.add_extra_token_to_sequence,
        )
    opener = _Opener(data, vocab_size=vocab_size, split_name=split_name)
    segments = tuple(
        opener.open(size, seed=data.data_shuffle_seed + number, needed=size)
        for number, size in enumerate(order.sizes)
    )
    return PinnedDataset(order, segments, opener.content())


def open_epoch(data: DataConfig, *, vocab_size: int, split_name: SplitName) -> Dataset:
    """Open one epoch of the data: every sample of every dataset once.

    Raises:
      DataError: as open_source; or the data are synthetic, or blended by weight, and so have no
        epoch.
    """
    if data.dataset_type == "synthetic":
        raise DataError("dataset_type=synthetic has no epoch; say how many samples")
    opener = _Opener(data, vocab_size=vocab_size, split_name=split_name)
    return opener.open(None, seed=data.data_shuffle_seed, needed=None)


class _Opener:
    """Opens the datasets of one split, each pair of files once."""

    def __init__(self, data: DataConfig, *, vocab_size: int, split_name: SplitName) -> None:
        self._data = data
        self._vocab_size = vocab_size
        self._split_name: SplitName = split_name
        self._own_path = data.split_path(split_name) is not None
        self._blend = self._parse()
        opened = {prefix: IndexedDataset.open(prefix) for prefix in self._blend.prefixes}
        self._indexed = [opened[prefix] for prefix in self._blend.prefixes]

    def _parse(self) -> Blend:
        data, name = self._data, self._split_name
        path = data.split_path(name)
        if path is None and data.dataset_path is None:
            raise DataError(f"data.{name}_data_path is not set; name the data of the {name} split")
        text = path or data.dataset_path or ""
        try:
            return parse_blend(text, with_index_folders=data.dataset_type == "mmap_npy")
        except ValueError as error:
            raise DataError(
                f"data.{f'{name}_data' if path else 'dataset'}_path: {error}"
            ) from error

    def content(self) -> tuple[str, ...]:
        """Hash each dataset's .idx; with its weight where there is one."""
        hashes = {indexed.prefix: indexed.index.sha256() for indexed in self._indexed}
        weights = self._blend.weights or (None,) * len(self._indexed)
        return tuple(
            f"sha256:{hashes[indexed.prefix]}" + (f" x {weight!r}" if weight is not None else "")
            for indexed, weight in zip(self._indexed, weights, strict=True)
        )

    def open(self, num_samples: int | None, *, seed: int, needed: int | None) -> Dataset:
        """Build or load the indices of num_samples, or of one epoch for None."""
        weights = self._blend.weights
        # With a path of its own for each split, Megatron drops the weight of a single dataset.
        if len(self._indexed) == 1 and (weights is None or self._own_path):
            return self._member(0, num_samples, seed=seed)
        if weights is not None and num_samples is None:
            raise DataError("data blended by weight have no epoch; say how many samples")
        shares = None if weights is None else normalize(weights)
        sizes = self._member_sizes(shares, num_samples)
        members = [self._member(i, size, seed=seed) for i, size in enumerate(sizes)]
        index = self._blend_index(shares, members, num_samples)
        _check_turns(index, members, self._blend)
        if needed is not None and len(index) < needed:
            raise DataError(
                f"the {self._split_name} part of {self._blend.prefixes} has {len(index)} samples "
                f"without repeating and the run needs {needed}; give the datasets weights, or "
                "lower steps"
            )
        return BlendedDataset(members, index)

    def _member_sizes(
        self, shares: Sequence[float] | None, num_samples: int | None
    ) -> list[int] | list[None]:
        if shares is None or num_samples is None:
            return [None] * len(self._indexed)
        return member_sizes(shares, num_samples, surplus=self._data.mid_level_dataset_surplus)

    def _blend_index(
        self, shares: Sequence[float] | None, members: Sequence[Dataset], num_samples: int | None
    ) -> BlendIndex:
        if shares is not None and num_samples is not None:
            return build_blend_index(shares, sum(member_sizes(shares, num_samples)))
        lengths = [len(member) for member in members]
        if num_samples is None:
            return build_exhaustive_blend_index(lengths)
        return build_blend_index(normalize(lengths), min(num_samples, sum(lengths)))

    def _member(self, number: int, num_samples: int | None, *, seed: int) -> GPTDataset:
        data, indexed = self._data, self._indexed[number]
        cacheable = not (
            data.eod_mask_loss or data.reset_position_ids or data.reset_attention_mask
        )
        return GPTDataset(
            indexed,
            self._index(indexed, num_samples, seed=seed),
            sequence_length=data.max_target_length,
            vocab_size=self._vocab_size,
            pad_id=effective_pad_id(
                eod_id=data.eod_id,
                pad_id=data.pad_id,
                allow_ambiguous=data.allow_ambiguous_pad_tokens,
            ),
            extra_token=data.add_extra_token_to_sequence,
            with_first_text=data.reproduce_cached_loss_mask and cacheable,
        )

    def _index(self, indexed: IndexedDataset, num_samples: int | None, *, seed: int) -> GPTIndex:
        data, name = self._data, self._split_name
        split = "1" if self._own_path else data.split
        part: SplitName = "train" if self._own_path else name
        try:
            documents = split_documents(split, len(indexed), part)
            if not documents:
                raise ValueError(
                    f"none of {len(indexed)} documents; give it a larger share or add documents"
                )
            return build_index(
                indexed.index.lengths,
                np.arange(documents.start, documents.stop, dtype=np.int32),
                num_samples=num_samples,
                sequence_length=data.max_target_length,
                seed=seed,
                extra_token=data.add_extra_token_to_sequence,
                drop_last_partial=name != "valid" or data.drop_last_partial_validation_sequence,
            )
        except ValueError as error:
            where = f"{indexed.prefix}.idx, {name} part of split={split}"
            raise DataError(f"{where}: {error}") from error


def _check_turns(index: BlendIndex, members: Sequence[Dataset], blend: Blend) -> None:
    """Check that no dataset is asked for more samples than it has."""
    turns = np.bincount(index.dataset_index, minlength=len(members))
    for number, (asked, member) in enumerate(zip(turns.tolist(), members, strict=True)):
        if asked > len(member):
            raise DataError(
                f"dataset {number} of the blend ({blend.prefixes[number]}) has {len(member)} "
                f"samples and gets {asked} turns; raise data.mid_level_dataset_surplus"
            )
