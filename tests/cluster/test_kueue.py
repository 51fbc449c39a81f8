"""Runs in a Kueue queue: admitted, halted so that it holds, paused, evicted."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lingcluster.client import Manifest, find_condition, load_manifests, wait_for
from lingcluster.control_plane import ControlPlane
from lingcluster.fault_table import FaultTable
from lingcluster.kubelet import ProcessKubelet
from lingcluster.kueue_controller import QUEUES, make_queue
from lingcluster.operator_process import StartOperator
from lingcluster.training_runs import RUN_LABEL, TrainingRuns
from lingcluster.watch import Recording, alive_together, terminations

pytestmark = pytest.mark.usefixtures("kueue")

QUEUE = "team-queue"
RUNS_AT_ONCE = 1
PROCESSES = 2


@pytest.fixture
def queue(control_plane: ControlPlane, namespace: str) -> str:
    """A queue with room for one run of two processes."""
    make_queue(control_plane.client, namespace, QUEUE, pods=RUNS_AT_ONCE * PROCESSES)
    return QUEUE


def workload_of(runs: TrainingRuns, name: str) -> Manifest:
    """Return the Workload of a run's JobSet."""
    uid = runs.jobset(name)["metadata"]["uid"]
    (workload,) = [
        each
        for each in runs.client.items(f"{QUEUES}/namespaces/{runs.namespace}/workloads")
        if uid in {owner["uid"] for owner in each["metadata"].get("ownerReferences", [])}
    ]
    return workload


def test_a_halted_run_frees_its_quota_and_stays_halted_while_the_next_one_runs(
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    queue: str,
    tmp_path: Path,
) -> None:
    nan = tmp_path / "nan"
    start_operator()
    first = scripted_run("first", queue=queue, env={"NAN_FILE": str(nan)})
    first["spec"]["health"]["trainerStops"] = False
    runs.apply(first)
    runs.wait_phase("first", "Running")
    runs.apply(scripted_run("second", queue=queue))
    runs.wait_condition("second", "Admitted", "False", "WaitingForQuota")
    runs.wait(
        "second",
        "Kueue's own words",
        lambda run: (
            "insufficient unused quota" in (find_condition(run, "Admitted") or {})["message"]
        ),
    )
    assert runs.status("second")["phase"] == "Queued"
    assert runs.live_pods("second") == []

    nan.touch()
    halted = runs.wait_phase("first", "Halted")
    assert halted["status"]["halt"]["reason"] == "NonFiniteLoss"
    runs.wait_phase("second", "Running")
    runs.wait_no_live_pod("first")
    assert workload_of(runs, "first")["spec"]["active"] is False
    runs.wait_condition("first", "Admitted", "False", "Deactivated")
    assert runs.jobset("first")["spec"]["suspend"] is True
    assert runs.status("first")["phase"] == "Halted"
    reasons = {event["reason"] for event in runs.events("first")}
    assert "NonFiniteLoss" in reasons
    assert "HaltOverridden" not in reasons


def test_a_halt_that_is_undone_in_the_queue_is_done_again_and_said(
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    queue: str,
) -> None:
    start_operator()
    run = scripted_run("undone", queue=queue, env={"NAN_STEP": "100"})
    run["spec"]["health"]["trainerStops"] = False
    runs.apply(run)
    runs.wait_phase("undone", "Halted")
    runs.wait_no_live_pod("undone")
    workload = workload_of(runs, "undone")["metadata"]["name"]
    path = f"{QUEUES}/namespaces/{runs.namespace}/workloads/{workload}"
    runs.client.patch(path, {"spec": {"active": True}})
    wait_for(
        "the event HaltOverridden",
        lambda: [e for e in runs.events("undone") if e["reason"] == "HaltOverridden"],
    )
    wait_for(
        "the Workload to be deactivated again",
        lambda: not runs.client.get(path)["spec"]["active"],
    )
    runs.wait_no_live_pod("undone")
    assert runs.status("undone")["phase"] == "Halted"


def test_a_pause_gives_the_quota_back_and_a_resume_waits_for_it_without_spending_a_restart(
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    queue: str,
) -> None:
    start_operator()
    runs.apply(scripted_run("paused", queue=queue, restarts=0))
    runs.wait_phase("paused", "Running")
    runs.edit("paused", suspend=True)
    runs.wait_condition("paused", "Suspended", "True", "SuspendRequested")
    runs.apply(scripted_run("guest", queue=queue))
    runs.wait_phase("guest", "Running")
    runs.edit("paused", suspend=False)
    runs.wait_condition("paused", "Admitted", "False", "WaitingForQuota")
    assert runs.status("paused")["phase"] == "Queued"
    runs.delete("guest")
    resumed = runs.wait_phase("paused", "Running")
    assert resumed["status"]["restarts"] == 0
    assert resumed["status"]["attempt"] == 1


def test_an_evicted_run_goes_on_when_its_quota_is_back_and_no_restart_is_counted(
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    control_plane: ControlPlane,
    queue: str,
) -> None:
    start_operator()
    runs.apply(scripted_run("evicted", queue=queue, restarts=0))
    runs.wait_phase("evicted", "Running")
    cluster_queue = f"{QUEUES}/clusterqueues/{runs.namespace}-{queue}"
    control_plane.client.patch(cluster_queue, {"spec": {"stopPolicy": "HoldAndDrain"}})
    runs.wait_condition("evicted", "Admitted", "False", "Evicted")
    runs.wait_phase("evicted", "Queued")
    runs.wait_no_live_pod("evicted")
    control_plane.client.patch(cluster_queue, {"spec": {"stopPolicy": "None"}})
    run = runs.wait_phase("evicted", "Running")
    assert run["status"]["restarts"] == 0
    runs.wait_condition("evicted", "Admitted", "True", "Admitted")


def test_a_preempted_run_is_queued_and_goes_on_when_the_more_urgent_one_is_done(
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    kubelet: ProcessKubelet,
    queue: str,
    urgent: str,
    faults: FaultTable,
) -> None:
    start_operator()
    runs.apply(scripted_run("patient", queue=queue, restarts=0))
    runs.wait_step("patient", 1)
    kubelet.wait_for_words(runs.namespace, runs.live_pods("patient"))
    hurried = scripted_run("hurried", queue=queue, steps=100)
    hurried["spec"]["template"]["priorityClassName"] = urgent
    with Recording(runs.client.identity, runs.pods_path) as pods:
        runs.apply(hurried)
        began = time.monotonic()
        evicted = runs.wait_condition("patient", "Admitted", "False", "Evicted")
        assert "preempted" in evicted["message"].lower()
        runs.wait_phase("patient", "Queued")
        queued = time.monotonic() - began
        runs.wait_phase("hurried", "Complete")
        run = runs.wait_phase("patient", "Running")
        pods.catch_up()
        preempted = [end for end in terminations(pods.changes).values() if end][:PROCESSES]
    assert [end["exitCode"] for end in preempted] == [143] * PROCESSES
    alive = alive_together(pods.changes, RUN_LABEL)
    assert {"patient", "hurried"} not in alive, "the quota is for one"
    assert run["status"]["restarts"] == 0
    assert run["status"]["attempt"] == 1
    faults.record(
        "Kueue preempts a run for a more urgent one",
        f"{queued:.1f} s to Queued",
        "pods end with 143, the run goes on when the quota is back, no restart counted",
    )


def test_a_run_that_is_deleted_while_it_waits_leaves_nothing_in_the_queue(
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    queue: str,
) -> None:
    start_operator()
    runs.apply(scripted_run("running", queue=queue))
    runs.wait_phase("running", "Running")
    runs.apply(scripted_run("waits", queue=queue))
    runs.wait_condition("waits", "Admitted", "False", "WaitingForQuota")
    runs.delete("waits")
    workloads = f"{QUEUES}/namespaces/{runs.namespace}/workloads"
    wait_for(
        "the Workload of the deleted run to go",
        lambda: len(runs.client.items(workloads)) == 1,
    )


def test_the_queue_of_the_install_guide_admits_a_run_on_its_slice(
    runs: TrainingRuns,
    start_operator: StartOperator,
    control_plane: ControlPlane,
    repository: Path,
    tmp_path: Path,
) -> None:
    """The objects as they stand in docs/install.md, and the sample they are for."""
    guide = (repository / "docs" / "install.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    (objects,) = (block for block in blocks if "kind: ClusterQueue" in block)
    file = tmp_path / "queue.yaml"
    file.write_text(objects.replace("NAMESPACE", runs.namespace))
    control_plane.kubectl("apply", "-f", str(file))
    start_operator()
    (run,) = load_manifests(repository / "manifests" / "ling2-run-tpu-v5p.yaml")
    run["spec"]["queue"] = "training"
    runs.apply(run)
    runs.wait_condition("ling2", "Admitted", "True", "Admitted")
