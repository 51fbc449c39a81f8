"""Where samples come from: Megatron files in a pinned order, or synthetic text."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ling_trainer.data.gpt import SplitName
from ling_trainer.data.index_file import DataError
from ling_trainer.data.opener import Dataset, DatasetOpener
from ling_trainer.data.order import SampleOrder
from ling_trainer.data.samples import Sample
from ling_trainer.data.synthetic import SyntheticDataset
from ling_trainer.data_config import DataConfig


class Samples(Protocol):
    """Samples by number; the same number gives the same text in every process, at any time."""

    def read(self, i: int) -> Sample:
        """Read sample i."""
        ...


class SampleSource(Samples, Protocol):
    """The samples of a run."""

    @property
    def content(self) -> tuple[str, ...]:
        """What the samples are made of, as a checkpoint keeps it: one line a dataset."""
        ...


@dataclass(frozen=True, eq=False)
class PinnedDataset:
    """A split in the order of a SampleOrder: one dataset a segment, all over the same data.

    Pickled, it is what it was opened from: who unpickles it opens the files for itself.

    Attributes:
      order: of the samples.
      segments: one a segment of the order.
      content: see SampleSource.
      opened_from: arguments of open_source.
    """

    order: SampleOrder
    segments: tuple[Dataset, ...]
    content: tuple[str, ...]
    opened_from: Mapping[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(open_source, **self.opened_from), ()

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
            held_out=split_name != "train",
        )
    opened_from = {
        "data": data,
        "vocab_size": vocab_size,
        "order": order,
        "split_name": split_name,
    }
    opener = DatasetOpener(data, vocab_size=vocab_size, split_name=split_name)
    if data.dataset_type == "mmap_npy":
        # The arrays are pinned already: they say what sample i is, whatever is asked for.
        order = SampleOrder((order.num_samples,))
    segments = tuple(
        opener.open(size, seed=data.data_shuffle_seed + number)
        for number, size in enumerate(order.sizes)
    )
    for size, segment in zip(order.sizes, segments, strict=True):
        if len(segment) < size:
            ready = data.dataset_type == "mmap_npy"
            remedy = "make longer indices" if ready else "give the datasets weights"
            fewer = "lower steps" if split_name == "train" else "set evaluation.eval_steps=-1"
            raise DataError(
                f"the {split_name} part of {data.split_path(split_name) or data.dataset_path} has "
                f"{len(segment)} samples without repeating and the run needs {size}; {remedy}, "
                f"or {fewer}"
            )
    return PinnedDataset(order, segments, opener.content(), opened_from)


def open_dataset(
    data: DataConfig, *, vocab_size: int, num_samples: int | None, split_name: SplitName
) -> Dataset:
    """Open all samples of an order, those past num_samples too.

    Args:
      data: as in open_source.
      vocab_size: token ids must be below it.
      num_samples: samples that the order is made for; None: one epoch, every sample of every
        dataset once.
      split_name: which part of the data to read.

    Raises:
      DataError: as open_source; or the data are synthetic; or an epoch is asked of data that are
        blended by weight and have none.
    """
    if data.dataset_type == "synthetic":
        raise DataError("dataset_type=synthetic has no dataset; name one")
    opener = DatasetOpener(data, vocab_size=vocab_size, split_name=split_name)
    return opener.open(num_samples, seed=data.data_shuffle_seed)
