"""What a run would read: documents and hashes of each sample, to hold against another trainer."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ling_trainer.config import RunConfig
from ling_trainer.data.gpt import SplitName
from ling_trainer.data.opener import Dataset
from ling_trainer.data.packing import pack_samples
from ling_trainer.data.samples import Sample
from ling_trainer.data.source import open_dataset
from ling_trainer.data_config import DataConfig
from ling_trainer.ramp_up import constant_batch
from ling_trainer.schema import ConfigError

FIELDS = {
    "tokens": "inputs",
    "labels": "targets",
    "loss_mask": "loss_mask",
    "position_ids": "positions",
}
"""Megatron's names of what a sample holds, and ours."""
NO_DOCUMENT = -1
"""Fills the rows of `documents` and `offsets` that are shorter than the longest."""


def open_samples(config: RunConfig, *, num_samples: str | None, split_name: SplitName) -> Dataset:
    """Open what a run of this configuration reads.

    Args:
      config: of the run.
      num_samples: a number that the order is made for, or "epoch" for one epoch; None: what the
        run needs.
      split_name: part of the data.

    Raises:
      ConfigError: num_samples is no such thing, or is needed and not given.
      DataError: the data cannot be used.
    """
    data = config.data
    size: int | None = None
    if num_samples is None:
        if data.global_batch_size is None:
            raise ConfigError(
                "how many samples the run reads depends on its devices (per_device_batch_size); "
                "set data.global_batch_size, or say --num-samples"
            )
        sizes = config.ramp_up or constant_batch(data.global_batch_size, num_microbatches=1)
        size = sizes.samples_before(config.steps)
    elif num_samples.isdecimal() and int(num_samples) > 0:
        size = int(num_samples)
    elif num_samples != "epoch":
        raise ConfigError(f"--num-samples {num_samples!r} must be a positive number or `epoch`")
    vocab_size = config.model.vocab_size
    return open_dataset(data, vocab_size=vocab_size, num_samples=size, split_name=split_name)


def show_samples(
    dataset: Dataset, numbers: Sequence[int], data: DataConfig
) -> Iterator[dict[str, Any]]:
    """Describe samples, one by one.

    Args:
      dataset: what holds them.
      numbers: which ones.
      data: how they are packed.

    Yields:
      JSON values: `sample`, its number; `dataset`, its number in the blend; `documents` and
      `offsets`, the sequences of the .idx it was cut from and where each cut begins; `sha256`, the
      hashes of tokens, labels, loss_mask and position_ids as int64, little-endian.
    """
    for number in numbers:
        sample = dataset.read(number)
        arrays = sample_arrays([sample], data)
        yield {
            "sample": number,
            "dataset": sample.dataset,
            "documents": sample.documents.tolist(),
            "offsets": sample.offsets.tolist(),
            "sha256": {
                name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()
            },
        }


def save_samples(path: Path, dataset: Dataset, numbers: Sequence[int], data: DataConfig) -> None:
    """Write samples to an .npz.

    It holds tokens, labels, loss_mask and position_ids, int64 [samples, S]; documents and offsets,
    int64 [samples, most documents of a sample], filled up with -1; sample and dataset [samples].
    """
    samples = [dataset.read(number) for number in numbers]
    arrays: dict[str, Any] = {
        "sample": np.array(numbers, np.int64),
        "dataset": np.array([sample.dataset for sample in samples], np.int64),
        "documents": _ragged([sample.documents for sample in samples]),
        "offsets": _ragged([sample.offsets for sample in samples]),
    }
    arrays |= sample_arrays(samples, data)
    np.savez(path, **arrays)


def sample_arrays(samples: Sequence[Sample], data: DataConfig) -> dict[str, npt.NDArray[np.int64]]:
    """Pack samples and return what is hashed: int64 [samples, S], little-endian."""
    batch = pack_samples(samples, data)
    return {name: getattr(batch, field).astype("<i8") for name, field in FIELDS.items()}


def parse_range(text: str, *, count: int) -> range:
    """Read `A:B`, `A:`, `:B` or a single number, as Python slices.

    Args:
      text: from the command line.
      count: samples there are.

    Raises:
      ConfigError: it is none of these, or names samples that there are not.
    """
    first, colon, last = text.partition(":")
    try:
        start = int(first) if first else 0
        stop = (int(last) if last else count) if colon else start + 1
    except ValueError:
        raise ConfigError(f"--samples {text!r} is no range; write A:B, such as 0:10") from None
    if not 0 <= start < stop <= count:
        raise ConfigError(f"--samples {text!r} is not within the {count} samples; write A:B in it")
    return range(start, stop)


def _ragged(rows: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    filled = np.full((len(rows), max(map(len, rows))), NO_DOCUMENT, np.int64)
    for target, row in zip(filled, rows, strict=True):
        target[: len(row)] = row
    return filled
