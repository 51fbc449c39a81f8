"""A host that the cluster takes away is a restart that costs nothing, whatever peers die of."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from lingcluster.client import Manifest, find_condition, wait_for
from lingcluster.fault_table import FaultTable
from lingcluster.kubelet import ProcessKubelet
from lingcluster.operator_process import StartOperator
from lingcluster.training_runs import RUN_LABEL, TrainingRuns
from lingcluster.watch import Change, Recording, terminations
from lingcluster.workloads import container, pod

HOSTS = 4
SLICE = {"accelerator": "tpu-v6e-slice", "topology": "4x4"}


@pytest.fixture
def gang_run(scripted_run: Callable[..., Manifest]) -> Callable[..., Manifest]:
    """Makes a run whose processes end with a code when one of them is gone, and no restart."""

    def make(name: str, *, lost_peer: int, hosts: int = 2, **more: str) -> Manifest:
        env = {"LOST_PEER": str(lost_peer), "NUM_PEERS": str(hosts), **more}
        return scripted_run(name, restarts=0, env=env)

    return make


@pytest.mark.parametrize(
    ("victim", "lost_peer", "env", "codes"),
    [
        (1, 42, {}, [143, 42]),
        (0, 139, {}, [143, 139]),
        # The evicted one's end is judged alone: 137 is in no rule, its condition is.
        (1, 42, {"IGNORE_SIGTERM": "1", "LOST_PEER_SECONDS": "3"}, [137, 42]),
    ],
    ids=["peer_42", "peer_139", "killed_at_the_end_of_its_grace"],
)
def test_an_eviction_through_the_api_costs_no_restart(
    victim: int,
    lost_peer: int,
    env: dict[str, str],
    codes: list[int],
    runs: TrainingRuns,
    start_operator: StartOperator,
    gang_run: Callable[..., Manifest],
    kubelet: ProcessKubelet,
    faults: FaultTable,
) -> None:
    start_operator()
    with Recording(runs.client.identity, runs.pods_path) as pods:
        runs.apply(gang_run("evicted", lost_peer=lost_peer, **env))
        _wait_gang(runs, kubelet, "evicted", set(), hosts=2)
        evicted, peer = runs.pod("evicted", victim), runs.pod("evicted", 1 - victim)
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": evicted}}
        runs.client.create(f"{runs.pods_path}/{evicted}/eviction", eviction)
        began = time.monotonic()
        _wait_gang(runs, kubelet, "evicted", {evicted, peer}, hosts=2)
        seconds = time.monotonic() - began
        pods.catch_up()
        ends = terminations(pods.changes)
    assert [ends[name]["exitCode"] for name in (evicted, peer)] == codes
    assert _disruptions(pods.changes) == {evicted: "EvictionByEvictionAPI"}
    runs.wait("evicted", "one restart", lambda run: run["status"]["restarts"] == 1)
    faults.record(
        "a host is evicted through the API, its peer dies of the broken collective",
        f"{seconds:.1f} s to Running again",
        f"exit codes {codes[0]} and {codes[1]}; no restart spent",
    )


@pytest.mark.slow
def test_a_slice_survives_the_scheduler_a_taint_and_the_loss_of_a_node_without_a_restart(
    runs: TrainingRuns,
    start_operator: StartOperator,
    gang_run: Callable[..., Manifest],
    kubelet: ProcessKubelet,
    urgent: str,
    faults: FaultTable,
) -> None:
    """The scheduler and the pod garbage collector do it themselves."""
    start_operator()
    run = gang_run("slice", lost_peer=42, hosts=HOSTS)
    del run["spec"]["cpu"]
    run["spec"]["tpu"] = SLICE
    run["spec"]["template"]["nodeSelector"] = {"cloud.google.com/gke-nodepool": "v6e-b"}
    with Recording(runs.client.identity, runs.pods_path) as pods:
        runs.apply(run)
        old = _wait_gang(runs, kubelet, "slice", set(), hosts=HOSTS)

        chips = {"limits": {"google.com/tpu": 4}}
        guest = container("sleep 1000", resources=chips)
        spec = {"priorityClassName": urgent, "nodeSelector": {"kubernetes.io/hostname": "v6e-b-2"}}
        runs.client.create(runs.pods_path, pod("guest", guest, grace=1, **spec))
        wait_for("the guest", lambda: _is_running(runs, "guest"), timeout=60)
        runs.client.delete(f"{runs.pods_path}/guest")
        old |= _wait_gang(runs, kubelet, "slice", old, hosts=HOSTS)

        pod_of_node = {pod["spec"]["nodeName"]: pod for pod in runs.pods("slice")}
        _evict_for_taint(runs, pod_of_node["v6e-b-1"])
        old |= _wait_gang(runs, kubelet, "slice", old, hosts=HOSTS)

        # The garbage collector looks every 20 s, and gives a node 40 s to come back.
        runs.client.delete("/api/v1/nodes/v6e-b-3")
        began = time.monotonic()
        try:
            wait_for("the deletion", lambda: len(_disruptions(pods.changes)) == 3, timeout=180)
        finally:
            kubelet.register_node("v6e-b-3")
        collected = time.monotonic() - began
        _wait_gang(runs, kubelet, "slice", old, hosts=HOSTS)
        by = list(_disruptions(pods.changes).values())
    assert by == ["PreemptionByScheduler", "DeletionByTaintManager", "DeletionByPodGC"]
    runs.wait("slice", "three restarts", lambda run: run["status"]["restarts"] == 3)
    faults.record(
        "a slice loses a host to a more urgent pod, another to a taint, a third with its node",
        f"{collected:.0f} s until the garbage collector gives up the node's pod",
        "three restarts of the slice, none spent",
    )


def _wait_gang(
    runs: TrainingRuns, kubelet: ProcessKubelet, name: str, old: set[str], *, hosts: int
) -> set[str]:
    """Wait until all pods are new, know one another, and the run is Running; return the pods.

    No restart is spent by then.
    """

    def new(run: Manifest) -> set[str] | None:
        names = {
            pod["metadata"]["name"]
            for pod in runs.pods(name)
            if pod["status"]["phase"] == "Running"
        }
        there = len(names) == hosts and not names & old
        return names if there and run["status"]["phase"] == "Running" else None

    run = runs.wait(name, f"{hosts} new pods", new)
    assert runs.jobset(name)["status"].get("restartsCountTowardsMax", 0) == 0
    found = new(run)
    assert found
    kubelet.wait_for_words(runs.namespace, found, "all peers are seen")
    return found


def _disruptions(changes: list[Change]) -> dict[str, str]:
    """Return by whom each disrupted pod of a run was disrupted, as its last state says."""
    last = {
        change.object["metadata"]["name"]: change.object
        for change in list(changes)
        if RUN_LABEL in change.object["metadata"].get("labels", {})
    }
    found = {name: find_condition(each, "DisruptionTarget") for name, each in last.items()}
    return {name: condition["reason"] for name, condition in found.items() if condition}


def _evict_for_taint(runs: TrainingRuns, pod: Manifest) -> None:
    """Do what the taint manager does; it does not run without the node controller."""
    path = f"{runs.pods_path}/{pod['metadata']['name']}"
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "DeletionByTaintManager",
        "message": "Taint manager: deleting due to NoExecute taint",
    }
    runs.client.patch(f"{path}/status", {"status": {"conditions": [condition]}}, kind="strategic")
    runs.client.delete(path)


def _is_running(runs: TrainingRuns, name: str) -> bool:
    return runs.client.get(f"{runs.pods_path}/{name}")["status"].get("phase") == "Running"
