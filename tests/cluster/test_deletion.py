"""Deleting a run takes everything with it, and its name can be used again."""

from __future__ import annotations

from collections.abc import Callable

from lingcluster.client import Manifest, wait_for
from lingcluster.kubelet import ProcessKubelet
from lingcluster.operator_process import StartOperator
from lingcluster.training_runs import TrainingRuns
from lingcluster.watch import Recording, alive_together, terminations


def test_after_delete_jobs_pods_service_and_processes_are_gone(
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    kubelet: ProcessKubelet,
    namespace: str,
) -> None:
    operator = start_operator()
    runs.apply(scripted_run("gone"))
    runs.wait_phase("gone", "Running")
    names = runs.live_pods("gone")
    kubelet.wait_for_words(namespace, names)
    processes = [started.process for started in kubelet.started(namespace)]
    assert len(processes) == 2
    owned = [
        f"/apis/batch/v1/namespaces/{namespace}/jobs",
        f"/api/v1/namespaces/{namespace}/services",
    ]
    assert all(runs.client.items(path) for path in owned)
    operator.stop()  # nothing of ours is needed for it: no finalizer
    with Recording(runs.client.identity, runs.pods_path) as pods:
        runs.delete("gone")
        for path in (runs.collection, runs.jobsets, *owned, runs.pods_path):
            wait_for(
                f"{path} to be empty", lambda path=path: not runs.client.items(path), timeout=60
            )
    assert [each for each in processes if each.is_alive()] == []
    wait_for("no process", lambda: not kubelet.live_processes(namespace))
    # JobSet's controller may have made the Job once more before it knew of its JobSet's end.
    ends = terminations(pods.changes)
    assert [ends[name]["exitCode"] for name in names] == [143, 143]


def test_a_run_made_anew_under_the_same_name_waits_for_the_old_ones_pods(
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    kubelet: ProcessKubelet,
    namespace: str,
) -> None:
    kubelet.timing.final_delay = 1.5
    start_operator()
    manifest = scripted_run("again", env={"IGNORE_SIGTERM": "1"})
    with Recording(runs.client.identity, runs.pods_path) as pods:
        runs.apply(manifest)
        old = runs.wait_phase("again", "Running")
        processes = [started.process for started in kubelet.started(namespace)]
        runs.delete("again")
        wait_for("the object to go", lambda: runs.client.find(f"{runs.collection}/again") is None)
        runs.apply(manifest)
        runs.wait_condition("again", "Created", "False", "WaitingForPrevious")
        new = runs.wait_phase("again", "Running")
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    assert [each for each in processes if each.is_alive()] == []
    alive = alive_together(pods.changes, "jobset.sigs.k8s.io/jobset-uid")
    assert {len(each) for each in alive} == {0, 1}, "two JobSets' pods were alive at one moment"
    assert len(frozenset().union(*alive)) == 2, "both JobSets had live pods"
