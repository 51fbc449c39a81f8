"""Batches are read ahead by threads or processes, which end with the loader, errors included."""

import pickle
import threading

import numpy as np
import pytest

from ds_a_loader import BATCH, DATA, STEPS, assert_equal, open_loader
from ling_trainer.data.index_file import DataError
from ling_trainer.data.order import SampleOrder
from ling_trainer.data.samples import Sample
from ling_trainer.data.source import open_source

pytestmark = pytest.mark.usefixtures("no_thread_and_no_process_is_left")


class CountingSource:
    """Counts the samples that are read; fails, or waits, at one of them."""

    def __init__(self, *, fails_at: int | None = None, waits_at: int | None = None) -> None:
        self.reads = 0
        self.fails_at = fails_at
        self.waits_at = waits_at
        self.waiting = threading.Event()
        self.go_on = threading.Event()
        self.has_read = threading.Condition()

    @property
    def content(self) -> tuple[str, ...]:
        return ()

    def read(self, i: int) -> Sample:
        if i == self.fails_at:
            raise DataError(f"sample {i} is bad")
        if i == self.waits_at:
            self.waiting.set()
            assert self.go_on.wait(30)
        with self.has_read:
            self.reads += 1
            self.has_read.notify_all()
        none = np.empty(0, np.int64)
        text = np.full(DATA.max_target_length + 1, i, np.int64)
        return Sample(text, documents=none, offsets=none, lengths=none)


def test_no_more_batches_are_read_ahead_than_asked_for() -> None:
    source = CountingSource(waits_at=3 * BATCH)
    data = DATA.model_copy(update={"prefetch": 3})
    with open_loader(source=source, data=data) as loader:
        with source.has_read:
            assert source.has_read.wait_for(lambda: source.reads == 3 * BATCH, 30)
        assert not source.waiting.wait(0.2)  # the fourth is not begun
        next(loader)
        assert source.waiting.wait(30)  # now it is
        source.go_on.set()


def test_an_error_comes_with_the_batch_that_needed_it() -> None:
    with open_loader(source=CountingSource(fails_at=2 * BATCH)) as loader:
        next(loader)
        next(loader)
        for _ in range(2):
            with pytest.raises(DataError, match="sample 24 is bad"):
                next(loader)


def test_a_loader_ends_after_the_last_step_and_stays_ended() -> None:
    with open_loader(start_step=STEPS - 1) as loader:
        next(loader)
        assert next(loader, None) is None
        assert next(loader, None) is None


def test_closing_stops_reading_and_can_be_repeated() -> None:
    source = CountingSource()
    loader = open_loader(source=source)
    with source.has_read:
        assert source.has_read.wait_for(lambda: source.reads == DATA.prefetch * BATCH, 30)
    loader.close()
    loader.close()
    assert source.reads == DATA.prefetch * BATCH
    assert next(loader, None) is None


# Other processes.


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes_read_the_same_batches(workers: int) -> None:
    with open_loader(start_step=1) as loader:
        expected = list(loader)
    data = DATA.model_copy(update={"grain_worker_count": workers})
    with open_loader(data=data, start_step=1) as loader:
        batches = list(loader)
    assert len(batches) == STEPS - 1
    for ours, theirs in zip(batches, expected, strict=True):
        assert_equal(ours, theirs)


@pytest.mark.slow
def test_an_error_of_a_worker_process_is_the_same_error() -> None:
    data = DATA.model_copy(update={"grain_worker_count": 1})
    source = open_source(DATA, vocab_size=900, order=SampleOrder((BATCH * STEPS,)))
    with (
        open_loader(source=source, data=data) as loader,
        pytest.raises(DataError, match=r"set model\.vocab_size to the tokenizer's"),
    ):
        list(loader)


def test_a_source_is_pickled_as_what_it_was_opened_from() -> None:
    source = open_source(DATA, vocab_size=1000, order=SampleOrder((50, 30)))
    pickled = pickle.dumps(source)
    assert len(pickled) < 5000
    copy = pickle.loads(pickled)
    assert copy.content == source.content
    for i in range(80):
        np.testing.assert_array_equal(copy.read(i).text, source.read(i).text)
