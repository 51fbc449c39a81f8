"""Batches of a run, step by step: this process's rows only, read ahead in a thread.

The order is a closed form of the step number: nothing else needs to be saved to resume, and any
number of processes reads the same global batches.
"""

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from ling_trainer.config import DataConfig
from ling_trainer.data.packing import PackedBatch, pack_samples
from ling_trainer.data.source import SampleSource


def process_rows(*, global_batch_size: int, process_index: int, process_count: int) -> range:
    """Give each process its block of consecutive rows of the global batch.

    Raises:
      ValueError: process_count does not divide global_batch_size.
    """
    if global_batch_size % process_count:
        raise ValueError(
            f"data.global_batch_size={global_batch_size} is not a multiple of the {process_count} "
            "processes; choose a multiple"
        )
    rows = global_batch_size // process_count
    return range(process_index * rows, (process_index + 1) * rows)


def sample_numbers(
    step: int, rows: Sequence[int], *, global_batch_size: int, num_microbatches: int
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

    Returns:
      int64 [len(rows)].

    Source: Megatron-LM megatron/training/datasets/data_samplers.py@d98e8a64.
    """
    row = np.asarray(rows, np.int64)
    place, microbatch = np.divmod(row, num_microbatches)
    return step * global_batch_size + microbatch * (global_batch_size // num_microbatches) + place


class Loader:
    """Iterate over the batches of steps start_step to num_steps - 1, read ahead in a thread.

    An error of the thread is raised by the `next` that needed its batch. Close it, or use it as a
    context manager.
    """

    def __init__(
        self,
        source: SampleSource,
        data: DataConfig,
        *,
        rows: Sequence[int],
        global_batch_size: int,
        num_microbatches: int,
        start_step: int,
        num_steps: int,
    ) -> None:
        """Start reading.

        Args:
          source: samples by number.
          data: end-of-document and padding rules, and how many batches to read ahead.
          rows: this process's rows of the global batch, in order.
          global_batch_size: B, over all processes.
          num_microbatches: K, a divisor of B.
          start_step: first step, 0 or the step a checkpoint resumes at.
          num_steps: steps of the whole run.
        """
        self._source = source
        self._data = data
        self._rows = rows
        self._global_batch_size = global_batch_size
        self._num_microbatches = num_microbatches
        self._steps = range(start_step, num_steps)
        # A free place a batch: the thread takes one before it reads, `next` gives it back.
        self._places = threading.Semaphore(data.prefetch)
        self._ready: SimpleQueue[PackedBatch | BaseException] = SimpleQueue()
        self._end: BaseException | None = None
        self._closed = threading.Event()
        # A daemon, so that a read that never returns cannot keep a process alive.
        self._thread = threading.Thread(target=self._read_ahead, name="data-loader", daemon=True)
        self._thread.start()

    def batch_at(self, step: int) -> PackedBatch:
        """Read this process's rows of one step, now and in this thread.

        Returns:
          The batch, each field [len(rows), S].
        """
        numbers = sample_numbers(
            step,
            self._rows,
            global_batch_size=self._global_batch_size,
            num_microbatches=self._num_microbatches,
        )
        return pack_samples([self._source.read(number) for number in numbers.tolist()], self._data)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PackedBatch:
        if self._end is not None:
            raise self._end
        item = self._ready.get()
        if isinstance(item, BaseException):
            self._end = item
            raise item
        self._places.release()
        return item

    def close(self) -> None:
        """Stop reading and wait for the thread; a `next` that waits ends the iteration."""
        self._closed.set()
        self._places.release()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read_ahead(self) -> None:
        end: BaseException = StopIteration()
        try:
            for step in self._steps:
                self._places.acquire()
                if self._closed.is_set():
                    break
                self._ready.put(self.batch_at(step))
        except BaseException as error:
            end = error
        self._ready.put(end)
