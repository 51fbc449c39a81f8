"""health.haltMode Fail: the JobSet of a halted run is deleted, the run stays halted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lingcluster.client import Manifest, wait_for
from lingcluster.control_plane import ControlPlane
from lingcluster.kueue_controller import make_queue
from lingcluster.operator_process import StartOperator
from lingcluster.training_runs import TrainingRuns

QUEUE = "team-queue"


@pytest.mark.slow
@pytest.mark.usefixtures("kueue")
@pytest.mark.parametrize("trainer_stops", [False, True], ids=["scrape", "exit 90"])
def test_a_halt_that_fails_frees_quota_and_name_and_a_raised_attempt_starts_anew(
    control_plane: ControlPlane,
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    trainer_stops: bool,
    tmp_path: Path,
) -> None:
    nan = tmp_path / "nan"
    make_queue(control_plane.client, runs.namespace, QUEUE, pods=2)
    start_operator()
    first = scripted_run("first", queue=QUEUE, env={"NAN_FILE": str(nan)})
    first["spec"]["health"] |= {"haltMode": "Fail", "trainerStops": trainer_stops}
    runs.apply(first)
    uid = runs.wait_phase("first", "Running")["status"]["jobSetUID"]
    runs.apply(scripted_run("second", queue=QUEUE))
    nan.touch()
    halted = runs.wait_phase("first", "Halted")
    assert halted["status"]["halt"]["reason"] == "NonFiniteLoss"
    wait_for("the JobSet to be gone", lambda: runs.client.find(f"{runs.jobsets}/first") is None)
    runs.wait_phase("second", "Running")
    assert runs.live_pods("first") == []
    assert runs.status("first")["phase"] == "Halted"
    assert runs.status("first")["attempts"][-1]["reason"] == "NonFiniteLoss"

    runs.delete("second")
    nan.unlink()
    runs.edit("first", attempt=2)
    again = runs.wait_phase("first", "Running")
    assert again["status"]["jobSetUID"] != uid
    assert [a.get("reason") for a in again["status"]["attempts"]] == ["NonFiniteLoss", None]
