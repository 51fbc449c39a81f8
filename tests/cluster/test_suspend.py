"""The user's pause: every process writes the same checkpoint, and the run goes on from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lingcluster.client import Manifest, find_condition
from lingcluster.journal import kept_checkpoints
from lingcluster.kubelet import ProcessKubelet
from lingcluster.operator_process import StartOperator
from lingcluster.training_runs import TrainingRuns, shown_step
from lingcluster.watch import Recording, terminations


@pytest.mark.slow
def test_a_suspended_run_writes_one_checkpoint_and_a_resumed_one_goes_on_from_it(
    runs: TrainingRuns,
    start_operator: StartOperator,
    real_run: Callable[..., Manifest],
    kubelet: ProcessKubelet,
    namespace: str,
    tmp_path: Path,
) -> None:
    run = real_run("paused", steps=100_000)
    run["spec"]["health"] = {"scrapeIntervalSeconds": 1}
    run["spec"]["restarts"] = 0
    start_operator()
    with Recording(runs.client.identity, runs.pods_path) as pods:
        runs.apply(run)
        runs.wait_step("paused", 1)
        runs.edit("paused", suspend=True)
        runs.wait_phase("paused", "Suspended")
        runs.wait_condition("paused", "Suspended", "True", "SuspendRequested")
        ends = list(terminations(pods.changes).values())
    assert runs.live_pods("paused") == []
    assert kubelet.live_processes(namespace) == []
    assert [end["exitCode"] for end in ends] == [143, 143]
    (stopped_at,) = {int(json.loads(end["message"])["step"]) for end in ends}
    assert max(kept_checkpoints(tmp_path / "real" / "paused")) == stopped_at

    runs.edit("paused", suspend=False)
    resumed = runs.wait(
        "paused",
        f"a step after {stopped_at}",
        lambda run: run["status"]["phase"] == "Running" and shown_step(run) > stopped_at,
    )
    log = kubelet.log(namespace, runs.pod("paused", 0))
    assert f"restored the checkpoint of step {stopped_at}" in log
    assert f" step={stopped_at + 1} " in log
    assert f" step={stopped_at} " not in log
    condition = find_condition(resumed, "Suspended")
    assert condition is not None
    assert condition["reason"] == "Resumed"
    assert resumed["status"]["restarts"] == 0, "a pause is no restart, and none was allowed"
    assert resumed["status"]["attempt"] == 1
