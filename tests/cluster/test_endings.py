"""How runs end otherwise: exit codes, restarts, JobSets deleted or taken by somebody else."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from lingcluster.client import Manifest, wait_for
from lingcluster.fault_table import FaultTable
from lingcluster.kubelet import ProcessKubelet
from lingcluster.operator_process import StartOperator
from lingcluster.sample_runs import shell_run
from lingcluster.training_runs import TrainingRuns
from lingcluster.watch import Recording
from lingcluster.workloads import jobset


def test_a_jobset_deleted_by_somebody_means_cancelled_and_is_not_made_again(
    runs: TrainingRuns, start_operator: StartOperator, scripted_run: Callable[..., Manifest]
) -> None:
    start_operator()
    with Recording(runs.client.identity, runs.jobsets) as jobsets:
        runs.apply(scripted_run("cancelled"))
        runs.wait_phase("cancelled", "Running")
        runs.client.delete(f"{runs.jobsets}/cancelled")
        runs.wait_phase("cancelled", "Cancelled")
        runs.wait_no_live_pod("cancelled")
        edited = runs.edit("cancelled", suspend=True)
        generation = edited["metadata"]["generation"]
        runs.wait(
            "cancelled", "another pass", lambda r: r["status"]["observedGeneration"] >= generation
        )
    assert len([change for change in jobsets.changes if change.type == "ADDED"]) == 1
    assert runs.status("cancelled")["phase"] == "Cancelled"
    runs.edit("cancelled", suspend=False, attempt=2)
    runs.wait_phase("cancelled", "Running")


def test_a_jobset_of_somebody_else_is_a_name_conflict_and_is_left_alone(
    runs: TrainingRuns, start_operator: StartOperator, scripted_run: Callable[..., Manifest]
) -> None:
    theirs = runs.client.create(runs.jobsets, jobset("taken", "sleep 1000", hosts=1))
    start_operator()
    runs.apply(scripted_run("taken"))
    condition = runs.wait_condition("taken", "Created", "False", "NameConflict")
    assert "taken" in condition["message"]
    runs.edit("taken", attempt=2)
    runs.wait("taken", "attempt 2", lambda run: run["status"]["attempt"] == 2)
    now = runs.jobset("taken")
    assert now["metadata"]["uid"] == theirs["metadata"]["uid"]
    assert now["metadata"]["generation"] == theirs["metadata"]["generation"]
    assert now["spec"] == theirs["spec"]
    runs.client.delete(f"{runs.jobsets}/taken")
    runs.wait_phase("taken", "Running")


def test_exit_code_42_is_restarted_without_spending_a_restart(
    runs: TrainingRuns, start_operator: StartOperator, scripted_run: Callable[..., Manifest]
) -> None:
    start_operator()
    env = {"EXIT": "5:42", "STEP_SECONDS": "0.2"}
    runs.apply(scripted_run("lost", steps=25, restarts=0, env=env))
    run = runs.wait_phase("lost", "Complete")
    assert run["status"]["restarts"] == 1
    assert runs.jobset("lost")["status"].get("restartsCountTowardsMax", 0) == 0


@pytest.mark.parametrize(
    ("restarts", "phase", "reason"),
    [(0, "Failed", "RestartsExhausted"), (1, "Complete", "Finished")],
)
def test_a_crash_spends_a_restart(
    restarts: int,
    phase: str,
    reason: str,
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
) -> None:
    start_operator()
    env = {"EXIT": "5:1", "STEP_SECONDS": "0.2"}
    runs.apply(scripted_run("crash", steps=25, restarts=restarts, env=env))
    runs.wait_phase("crash", phase)
    runs.wait_condition("crash", phase, "True", reason)


@pytest.mark.parametrize("code", [1, 42], ids=["crash", "lost_peer"])
def test_restarts_without_progress_end_the_run_before_they_burn_the_budget(
    code: int,
    runs: TrainingRuns,
    start_operator: StartOperator,
    kubelet: ProcessKubelet,
    namespace: str,
    faults: FaultTable,
) -> None:
    budget = 10
    start_operator()
    began = time.monotonic()
    runs.apply(shell_run("stuck", f"exit {code}", restarts=budget))
    run = runs.wait_phase("stuck", "Failed")
    seconds = time.monotonic() - began
    runs.wait_condition("stuck", "Failed", "True", "NoProgress")
    assert run["status"]["restarts"] >= 3
    wait_for("the stop", lambda: runs.jobset("stuck")["spec"]["suspend"])
    runs.wait_no_live_pod("stuck")
    count = len(kubelet.started(namespace))
    assert 3 <= count < budget, "the stop comes about when the third restart does"
    jobset = runs.jobset("stuck")
    assert jobset["status"].get("restartsCountTowardsMax", 0) < budget
    assert not jobset["status"].get("terminalState"), "it is stopped, with most of its budget"
    faults.record(
        "a trainer that dies before its first step, again and again",
        f"{seconds:.1f} s to Failed/NoProgress, exit code {code}",
        f"{run['status']['restarts']} restarts of a budget of {budget}, then it is stopped",
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [(2, "ConfigurationError"), (3, "DataError"), (4, "CheckpointError"), (5, "MetricsPortTaken")],
)
def test_a_final_exit_code_fails_the_run_without_a_restart_and_with_its_words(
    code: int,
    reason: str,
    runs: TrainingRuns,
    start_operator: StartOperator,
    kubelet: ProcessKubelet,
    namespace: str,
) -> None:
    start_operator()
    script = f"""echo '{{"message": "no such thing"}}' > /dev/termination-log; exit {code}"""
    runs.apply(shell_run("final", script))
    runs.wait_phase("final", "Failed")
    condition = runs.wait_condition("final", "Failed", "True", reason)
    assert "no such thing" in condition["message"]
    assert len(kubelet.started(namespace)) == 1
