"""Stopping and going on changes nothing: not a bit of the state, not a token of the data."""

import json
import re
import signal
from typing import Any

import numpy as np
import pytest

from ling_trainer.data.loader import Loader
from ling_trainer.data.order import SampleOrder
from ling_trainer.data.source import open_source
from ling_trainer.data_config import DataConfig

pytestmark = pytest.mark.slow


def losses(journal: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(line["step"], line["learning/loss"]) for line in journal]


def next_batch(processes: Any, step: int, dataset: str) -> bytes:
    """Return the bytes of the batch that a restart from this checkpoint would read first."""
    record = json.loads(
        (processes.run_directory / "checkpoints" / str(step) / "run" / "metadata").read_text()
    )
    data = DataConfig(
        dataset_path=dataset, max_target_length=32, global_batch_size=4, eod_id=256, pad_id=256
    )
    # One sample more than the run has, so that its last checkpoint has a next batch too.
    order = SampleOrder.from_json(record["sample_order"]).extended(4 * (step + 1))
    source = open_source(data, vocab_size=512, order=order)
    with Loader(
        source, data, rows=range(4), global_batch_size=4, num_microbatches=1,
        start_step=step, num_steps=step,
    ) as loader:  # fmt: skip
        return b"".join(np.asarray(x).tobytes() for x in loader.batch_at(step))


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_and_a_restart_change_no_leaf_no_loss_and_no_batch(
    launch, read_back, dataset, uninterrupted, many_steps, processes
):
    first = launch("cut", {"steps": many_steps}, processes=processes)
    first.until(r" step=5 ")
    for process in first.popen:
        process.send_signal(signal.SIGTERM)
    assert set(first.wait()) == {143}, first.output()
    (stopped_at,) = {int(first.message(i)["step"]) for i in range(processes)}
    assert 5 <= stopped_at < many_steps
    assert stopped_at in read_back.steps(first.run_directory)

    second = launch("cut", {"steps": many_steps}, processes=processes)
    assert set(second.wait()) == {0}, second.output()
    assert f"restored the checkpoint of step {stopped_at}" in second.output()
    assert f" step={stopped_at} " not in second.output()
    whole = uninterrupted(processes)
    assert_same(read_back, second, whole, many_steps)
    assert next_batch(second, many_steps, dataset) == next_batch(whole, many_steps, dataset)


def assert_same(read_back: Any, ours: Any, theirs: Any, step: int) -> None:
    """Compare every leaf of the checkpoint of a step, and the loss of every step."""
    hashes = [read_back.hashes(run.run_directory, step) for run in (ours, theirs)]
    assert hashes[0] == hashes[1]
    journals = [read_back.journal(run.run_directory) for run in (ours, theirs)]
    assert losses(journals[0]) == losses(journals[1])
    assert len(journals[0]) == step


def test_a_save_that_sigkill_interrupts_is_never_restored(
    launch, read_back, uninterrupted, many_steps
):
    fault = {"fault.enabled": True, "fault_kind": "sigkill", "fault_step": 6}
    first = launch("killed", fault | {"steps": many_steps, "checkpoint_period": 1})
    assert first.wait() == [137], first.output()
    half_done = list((first.run_directory / "checkpoints").glob("5.*tmp*"))
    assert half_done, "the save of step 5 was complete: the kill came too late to prove anything"
    assert max(read_back.steps(first.run_directory)) == 4

    second = launch("killed", {"steps": many_steps})
    assert second.wait() == [0], second.output()
    assert "restored the checkpoint of step 4" in second.output()
    assert_same(read_back, second, uninterrupted(1), many_steps)


def test_two_processes_compute_what_one_does(read_back, uninterrupted):
    two, one = (
        [line["learning/loss"] for line in read_back.journal(uninterrupted(n).run_directory)]
        for n in (2, 1)
    )
    assert two[0] == pytest.approx(one[0], rel=1e-6)
    assert two[9] == pytest.approx(one[9], rel=1e-4)


def test_a_raised_attempt_goes_on_before_the_bad_step_and_its_restarts_do_not_repeat_that(
    launch, read_back
):
    first = launch("spike", environ={"LING_ATTEMPT": "1"})
    assert first.wait() == [0], first.output()
    assert read_back.steps(first.run_directory) == [5, 10]
    told = {"LING_ATTEMPT": "2", "LING_RESTORE_BEFORE_STEP": "8"}

    killed = {"fault.enabled": True, "fault_kind": "sigkill", "fault_step": 19}
    second = launch("spike", killed | {"steps": 20, "checkpoint_period": 6}, environ=told)
    assert second.wait() == [137], second.output()
    assert "restored the checkpoint of step 5" in second.output()
    assert "discarded the checkpoint of step 10" in second.output()
    assert read_back.steps(second.run_directory) == [5, 6, 12]  # that of 18 was interrupted

    third = launch("spike", {"steps": 20}, environ=told)
    assert third.wait() == [0], third.output()
    assert "restored the checkpoint of step 12" in third.output()


def test_a_finished_run_that_is_started_again_exits_0_without_compiling(
    launch, uninterrupted, many_steps
):
    first = uninterrupted(1)
    before = (first.run_directory / "metrics.jsonl").read_bytes()
    place = {"base_output_directory": str(first.run_directory.parent)}
    again = launch("run", place | {"steps": many_steps})
    assert again.wait() == [0], again.output()
    assert again.message()["reason"] == "Finished"
    assert again.message()["step"] == str(many_steps)
    assert "restored" not in again.output()
    assert (first.run_directory / "metrics.jsonl").read_bytes() == before


def test_a_batch_size_that_ramps_up_goes_on_at_the_step_where_it_was_stopped(launch, read_back):
    ramp = {
        "global_batch_size": 4, "gradient_accumulation_steps": 2, "steps": 6,
        "rampup_batch_size": [2, 2, 8], "warmup_steps": 4, "checkpoint_period": 1,
    }  # fmt: skip
    sizes = [2, 2, 2, 2, 4, 4]
    whole = launch("whole", ramp)
    assert whole.wait() == [0], whole.output()
    killed = {"fault.enabled": True, "fault_kind": "sigkill", "fault_step": 4}
    first = launch("killed", ramp | killed)
    assert first.wait() == [137], first.output()
    second = launch("killed", ramp)
    assert second.wait() == [0], second.output()
    assert re.search(r"restored the checkpoint of step [23]\n", second.output())
    assert_same(read_back, second, whole, 6)
    for run in (whole, second):
        assert re.findall(r"global_batch_size=(\d+) after (\d+)", run.output()) == [("4", "2")]

    journal = read_back.journal(whole.run_directory)
    tokens = [line["perf/tokens_per_second"] * line["perf/step_time_seconds"] for line in journal]
    assert tokens == pytest.approx([32 * size for size in sizes])
    # Megatron's schedule counts samples: 4 steps of warm-up are 16 of them.
    rates = [line["learning/learning_rate"] for line in journal]
    assert rates == pytest.approx([3e-3 * sum(sizes[:step]) / 16 for step in range(6)], rel=1e-6)
