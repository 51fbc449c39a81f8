"""A new attempt starts when the last process of the old one is gone, not before."""

from __future__ import annotations

from collections.abc import Callable

from lingcluster.client import Manifest, find_condition
from lingcluster.kubelet import ProcessKubelet
from lingcluster.operator_process import StartOperator
from lingcluster.training_runs import ATTEMPT_LABEL, TrainingRuns
from lingcluster.watch import Change, Recording, alive_together

GRACE_SECONDS = 4


def test_pods_of_two_attempts_never_live_together(
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    kubelet: ProcessKubelet,
    namespace: str,
) -> None:
    kubelet.timing.stop_delay = 0.5
    kubelet.timing.final_delay = 2.0
    start_operator()
    template = {"terminationGracePeriodSeconds": GRACE_SECONDS}
    stubborn = [{"name": "IGNORE_SIGTERM", "value": "1"}]
    identity = runs.client.identity
    with Recording(identity, runs.pods_path) as pods, Recording(identity, runs.collection) as seen:
        runs.apply(scripted_run("two", template={**template, "env": stubborn}))
        runs.wait_phase("two", "Running")
        runs.wait_step("two", 1)
        old = {started.process for started in kubelet.started(namespace)}
        old_uid = runs.jobset("two")["metadata"]["uid"]
        runs.edit("two", attempt=2, template={**template, "env": []})
        run = runs.wait(
            "two",
            "attempt 2 running",
            lambda run: (run["status"]["attempt"], run["status"]["phase"]) == (2, "Running"),
        )
    assert not any(process.is_alive() for process in old)
    assert len(old) == 2
    assert runs.jobset("two")["metadata"]["uid"] != old_uid == _record(run, 1)["jobSetUID"]
    assert _record(run, 1)["reason"] == "Superseded"
    together = alive_together(pods.changes, ATTEMPT_LABEL)
    assert {frozenset({"1"}), frozenset({"2"})} <= together, "both attempts had live pods"
    assert frozenset({"1", "2"}) not in together
    assert "WaitingForPrevious" in _created_reasons(seen.changes)


def _record(run: Manifest, attempt: int) -> Manifest:
    return next(each for each in run["status"]["attempts"] if each["attempt"] == attempt)


def _created_reasons(changes: list[Change]) -> set[str]:
    conditions = (find_condition(change.object, "Created") for change in changes)
    return {condition["reason"] for condition in conditions if condition}
