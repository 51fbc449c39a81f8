"""Batches of a run, step by step: this process's rows only, read ahead.

The order is a closed form of the step number: nothing else needs to be saved to resume, and any
number of processes reads the same global batches.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Self

import grain
import numpy as np
import numpy.typing as npt
from absl import flags

from ling_trainer.data.packing import PackedBatch, pack_samples, padding_row
from ling_trainer.data.source import Samples
from ling_trainer.data_config import DataConfig
from ling_trainer.ramp_up import BatchSizes


def sample_numbers(
    step: int,
    rows: Sequence[int],
    *,
    global_batch_size: int,
    num_microbatches: int,
    first_sample: int = 0,
) -> npt.NDArray[np.int64]:
    """Find the samples of one step's rows.

    Step t has samples t * B to (t + 1) * B - 1. Megatron gives micro-batch k, rank d, place j
    sample t * B + (k * D + d) * mbs + j; it is put at row (d * mbs + j) * K + k, because row i
    belongs to micro-batch i mod K. So row i holds sample t * B + (i mod K) * B / K + i // K,
    whatever D is.

    Args:
      step: t, from 0.
      rows: rows of the global batch.
      global_batch_size: B.
      num_microbatches: K, a divisor of B.
      first_sample: added; where batches of another size came before, t counts from there.

    Returns:
      int64 [len(rows)].

    Source: Megatron-LM megatron/training/datasets/data_samplers.py@d98e8a64.
    """
    row = np.asarray(rows, np.int64)
    place, microbatch = np.divmod(row, num_microbatches)
    first = first_sample + step * global_batch_size
    return first + microbatch * (global_batch_size // num_microbatches) + place


@dataclass(frozen=True)
class _RowReader:
    """Reads rows of all steps, numbered one after the other; goes to worker processes."""

    source: Samples
    data: DataConfig
    rows: Sequence[int]
    global_batch_size: int
    num_microbatches: int
    num_samples: int | None
    first_sample: int

    def __call__(self, number: int) -> PackedBatch:
        """Read row `number % len(rows)` of step `number // len(rows)`: a batch of one row."""
        step, place = divmod(number, len(self.rows))
        sample = sample_numbers(
            step,
            self.rows[place : place + 1],
            global_batch_size=self.global_batch_size,
            num_microbatches=self.num_microbatches,
            first_sample=self.first_sample,
        )
        if self.num_samples is not None and sample[0] >= self.num_samples:
            return padding_row(self.data.max_target_length)
        return pack_samples([self.source.read(int(sample[0]))], self.data)


def _join(rows: Sequence[PackedBatch]) -> PackedBatch:
    return PackedBatch(*(np.concatenate(field) for field in zip(*rows, strict=True)))


def read_batches(
    source: Samples,
    data: DataConfig,
    *,
    sizes: BatchSizes,
    rows_of: Callable[[int], Sequence[int]],
    start_step: int,
    num_steps: int,
) -> Generator[PackedBatch]:
    """Iterate over the batches of a run, with a Loader for each of its batch sizes.

    Close it, or it goes on reading ahead.

    Args:
      source: samples by number.
      data: see Loader.
      sizes: samples and micro-batches of each step.
      rows_of: this process's rows of a global batch of so many.
      start_step: first step, 0 or the step a checkpoint resumes at.
      num_steps: steps of the whole run.
    """
    for stage, first, end in sizes.spans(start_step, num_steps):
        with Loader(
            source,
            data,
            rows=rows_of(stage.batch_size),
            global_batch_size=stage.batch_size,
            num_microbatches=stage.num_microbatches,
            start_step=first - stage.first_step,
            num_steps=end - stage.first_step,
            first_sample=stage.first_sample,
        ) as loader:
            yield from loader


class Loader:
    """Iterate over the batches of steps start_step to num_steps - 1, read ahead by Grain.

    Rows are read in the order of their use, by data.grain_num_threads threads of this process or
    of each of data.grain_worker_count others. An error comes with the `next` that needed its
    batch, and with each one after it. The position of the iterator is the step. Close it, or use
    it as a context manager.
    """

    def __init__(
        self,
        source: Samples,
        data: DataConfig,
        *,
        rows: Sequence[int],
        global_batch_size: int,
        num_microbatches: int,
        start_step: int,
        num_steps: int,
        num_samples: int | None = None,
        first_sample: int = 0,
    ) -> None:
        """Start reading.

        Args:
          source: samples by number; it goes to the worker processes by pickling.
          data: end-of-document and padding rules, and how to read ahead.
          rows: this process's rows of the global batch, in order.
          global_batch_size: B, over all processes.
          num_microbatches: K, a divisor of B.
          start_step: first step, 0 or the step a checkpoint resumes at.
          num_steps: steps of the whole run.
          num_samples: samples there are; rows past the last are padding. None: as many as the
            steps need.
          first_sample: samples before step 0.
        """
        self._reader = _RowReader(
            source, data, rows, global_batch_size, num_microbatches, num_samples, first_sample
        )
        self._end: BaseException | None = None
        ahead = data.prefetch * len(rows)
        dataset = (
            grain.MapDataset.range(start_step * len(rows), num_steps * len(rows))
            .map(self._reader)
            .to_iter_dataset(grain.ReadOptions(data.grain_num_threads, ahead))
        )
        if data.grain_worker_count:
            # Grain looks at absl's flags there, which nobody parses in a program that has none.
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()
            each = -(-ahead // data.grain_worker_count)
            options = grain.MultiprocessingOptions(data.grain_worker_count, each)
            dataset = dataset.mp_prefetch(options)
        batches = dataset.batch(len(rows), drop_remainder=True, batch_fn=_join)
        self._iterator: grain.DatasetIterator[PackedBatch] = iter(batches)
        self._iterator.start_prefetch()

    def batch_at(self, step: int) -> PackedBatch:
        """Read this process's rows of one step, now and in this thread.

        Returns:
          The batch, each field [len(rows), S].
        """
        count = len(self._reader.rows)
        return _join([self._reader(number) for number in range(step * count, (step + 1) * count)])

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PackedBatch:
        if self._end is not None:
            raise self._end
        try:
            return next(self._iterator)
        except BaseException as error:
            self._end = error
            raise

    def close(self) -> None:
        """Stop reading ahead; a `next` after it ends the iteration. May be repeated."""
        if self._end is None:
            self._end = StopIteration()
        self._iterator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
