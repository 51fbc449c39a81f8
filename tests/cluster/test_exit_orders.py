"""Two real trainers that die in every order: what the run makes of their exit codes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lingcluster.client import Manifest, wait_for
from lingcluster.fault_table import FaultTable
from lingcluster.journal import journal
from lingcluster.kubelet import ProcessKubelet
from lingcluster.operator_process import StartOperator
from lingcluster.story import Story
from lingcluster.training_runs import TrainingRuns
from lingcluster.watch import Change, Recording, terminations

NAME = "orders"
STEPS = 400
FAULT_STEP = 250
LINGER_SECONDS = 20
NEVER = 3600  # seconds between scrapes: exit codes and last words have to do
LOST_PEER = {42, 139}  # the trainer's own code for it, and the abort of JAX's client


@pytest.mark.slow
def test_whoever_dies_first_a_lost_peer_restarts_the_run_and_divergence_halts_it(
    runs: TrainingRuns,
    start_operator: StartOperator,
    real_run: Callable[..., Manifest],
    kubelet: ProcessKubelet,
    namespace: str,
    story: Story,
    faults: FaultTable,
    tmp_path: Path,
) -> None:
    run = real_run(NAME, steps=STEPS)
    run["spec"]["restarts"] = 2
    run["spec"]["run"] |= {
        "fault": {"enabled": True, "faultStep": FAULT_STEP},
        "metrics": {"metricsLingerSeconds": LINGER_SECONDS},
    }
    run["spec"]["health"] = {"scrapeIntervalSeconds": NEVER}
    directory = tmp_path / "real" / NAME
    seconds = 0.0
    start_operator()
    with Recording(runs.client.identity, runs.pods_path) as pods:
        runs.apply(run)
        for restarts, process in enumerate((1, 0), start=1):
            _wait_past(directory, max(journal(directory), default=0) + 20)
            killed, peer = runs.pod(NAME, process), runs.pod(NAME, 1 - process)
            kubelet.kill9(namespace, killed)
            began = time.monotonic()
            runs.wait(NAME, "the restart", lambda run, n=restarts: run["status"]["restarts"] == n)
            both = (killed, peer)
            wait_for(
                "both ends",
                lambda both=both: None not in _codes(pods.changes, *both),
                timeout=120,
            )
            ends = terminations(pods.changes)
            story.tell(f"process {process} killed: {_codes(pods.changes, *both)}")
            assert ends[killed]["exitCode"] == 137
            assert ends[peer]["exitCode"] in LOST_PEER
            seconds = time.monotonic() - began
            runs.wait(NAME, "two new pods", lambda _, old=both: _both_are_new(runs, old))

        first, peer = runs.pod(NAME, 0), runs.pod(NAME, 1)
        for pod in (first, peer):
            wait_for(
                f"{pod} to diverge",
                lambda pod=pod: "exit=90" in kubelet.log(namespace, pod),
                timeout=240,
                describe=lambda: kubelet.logs(namespace),
            )
            kubelet.signal(namespace, pod, signal.SIGTERM)  # changes nothing any more
        kubelet.kill9(namespace, first)
        began = time.monotonic()
        status = runs.wait_phase(NAME, "Halted")["status"]
        halted = time.monotonic() - began
        runs.wait_no_live_pod(NAME)
        pods.catch_up()
        ends = terminations(pods.changes)
    story.tell(f"both lingered, process 0 killed: {_codes(pods.changes, first, peer)}")
    assert len(ends) == 6, "after the divergence nothing was started"
    assert ends[first]["exitCode"] == 137
    assert ends[peer]["exitCode"] in {90, 139}, "SIGTERM is not what ended it"
    words = [json.loads(ends[pod]["message"]) for pod in (first, peer)]
    assert [each["step"] for each in words] == [str(FAULT_STEP)] * 2, "the same step"
    assert (status["halt"]["reason"], status["halt"]["step"]) == ("NonFiniteLoss", FAULT_STEP)
    assert status["restarts"] == 2

    runs.edit(NAME, attempt=2, run={"fault": {"enabled": False}})
    complete = runs.wait_phase(NAME, "Complete")
    assert max(journal(directory)) == STEPS
    assert complete["status"]["restarts"] == 0, "counted for each attempt"
    faults.record(
        "kill -9 of one of two trainers at a checkpoint step, process 1, then process 0",
        f"{seconds:.1f} s to the restart",
        "the peer ends with 42 or 139; both start again from the last checkpoint, and finish",
    )
    faults.record(
        "both trainers diverged and linger, SIGTERM to both, then kill -9 of process 0",
        f"{halted:.1f} s to Halted",
        "no pod ends with 90, but their last words do; no restart",
    )


def _wait_past(directory: Path, step: int) -> None:
    """Wait until the journal has a step; the status shows it up to ten seconds later."""
    wait_for(f"step {step}", lambda: step in journal(directory), timeout=240)


def _both_are_new(runs: TrainingRuns, old: tuple[str, str]) -> bool:
    running = {p["metadata"]["name"] for p in runs.pods(NAME) if p["status"]["phase"] == "Running"}
    return len(running - set(old)) == 2


def _codes(changes: list[Change], *pods: str) -> list[object]:
    ends = terminations(list(changes))
    return [ends[pod].get("exitCode") for pod in pods]
