"""JobSets that others launched, shaped as `xpk workload create` does: watched, not owned."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lingcluster.audit import AuditLog
from lingcluster.client import ApiError, Manifest, find_condition, wait_for
from lingcluster.control_plane import ControlPlane
from lingcluster.kueue_controller import QUEUES, make_queue
from lingcluster.operator_process import NAMESPACE, SERVICE_ACCOUNT, StartOperator
from lingcluster.sample_runs import training_run, variables
from lingcluster.training_runs import TrainingRuns, is_live
from lingcluster.workloads import FAIL_ON_FINAL_CODES, SHELL_IMAGE, from_field

OPERATOR = f"system:serviceaccount:{NAMESPACE}:{SERVICE_ACCOUNT}"
QUEUE = "multislice-queue"
SHOWN = "ling_run_info ling_step ling_learning_lm_loss ling_nonfinite_steps_total"


def xpk_jobset(name: str, *, container: str = "jax-tpu", **environment: str) -> dict[str, Any]:
    """Return a JobSet of two hosts as xpk launches it, less what only TPU nodes have."""
    trainer = Path(__file__).parents[1] / "operator" / "foreign_trainer.py"
    env = [
        *variables({"SERIES": SHOWN} | environment),
        from_field("POD_IP", "status.podIP"),
        from_field("POD_UID", "metadata.uid"),
    ]
    pod = {
        "metadata": {"labels": {"xpk.google.com/workload": name}},
        "spec": {
            "restartPolicy": "Never",
            "hostNetwork": True,
            "dnsPolicy": "ClusterFirstWithHostNet",
            "terminationGracePeriodSeconds": 30,
            "containers": [
                {
                    "name": container,
                    "image": SHELL_IMAGE,
                    "command": [sys.executable, str(trainer)],
                    "env": env,
                    "securityContext": {"privileged": True},
                }
            ],
        },
    }
    job = {
        "parallelism": 2,
        "completions": 2,
        "backoffLimit": 0,
        "podFailurePolicy": FAIL_ON_FINAL_CODES,
        "template": pod,
    }
    policy = [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": {"xpk.google.com/workload": name}},
        "spec": {
            "ttlSecondsAfterFinished": 43200,
            "failurePolicy": {"maxRestarts": 0, "rules": policy},
            "replicatedJobs": [{"name": "slice-job", "replicas": 1, "template": {"spec": job}}],
        },
    }


def watcher(name: str, jobset: str, **spec: Any) -> Manifest:
    """Return a run that watches a JobSet and is quick about it."""
    health = {"scrapeIntervalSeconds": 1}
    return training_run(name, {"watch": {"jobSet": jobset}, "health": health, **spec})


class Launcher:
    """Whoever launches JobSets with kubectl, and looks at their pods."""

    def __init__(self, plane: ControlPlane, runs: TrainingRuns) -> None:
        self._plane = plane
        self._runs = runs

    def launch(self, jobset: Manifest) -> str:
        """Create a JobSet; return its uid."""
        arguments = ("create", "-n", self._runs.namespace, "-f", "-")
        self._plane.kubectl(*arguments, input=json.dumps(jobset))
        return self.jobset(jobset["metadata"]["name"])["metadata"]["uid"]

    def jobset(self, name: str) -> Manifest:
        """Return a JobSet."""
        return self._runs.jobset(name)

    def live_pods(self, name: str) -> list[str]:
        """Return the pods of a JobSet that may still have a process."""
        label = f"jobset.sigs.k8s.io/jobset-name={name}"
        pods = self._runs.client.items(self._runs.pods_path, labelSelector=label)
        return [pod["metadata"]["name"] for pod in pods if is_live(pod)]

    def wait_at_rest(self, name: str) -> None:
        """Wait until no process of a JobSet can be left, and it is suspended."""
        wait_for(
            f"{name} to be at rest",
            lambda: self.jobset(name)["spec"].get("suspend") and not self.live_pods(name),
            timeout=120,
            describe=lambda: self.live_pods(name),
        )


@pytest.fixture
def launcher(control_plane: ControlPlane, runs: TrainingRuns) -> Launcher:
    """Somebody else than the operator."""
    return Launcher(control_plane, runs)


def reasons(run: Manifest) -> list[str | None]:
    return [attempt.get("reason") for attempt in run["status"]["attempts"]]


@pytest.mark.slow
@pytest.mark.usefixtures("kueue")
def test_a_jobset_of_xpk_in_a_queue_is_halted_resumed_paused_and_never_made_or_deleted(
    control_plane: ControlPlane,
    runs: TrainingRuns,
    launcher: Launcher,
    start_operator: StartOperator,
    audit_log: AuditLog,
    tmp_path: Path,
) -> None:
    make_queue(control_plane.client, runs.namespace, QUEUE, pods=2)
    nan = tmp_path / "nan"
    start_operator()
    runs.apply(watcher("watch", "llm"))
    runs.wait_condition("watch", "Created", "False", "JobSetNotFound")
    jobset = xpk_jobset("llm", NAN_FILE=str(nan))
    jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = QUEUE
    uid = launcher.launch(jobset)
    running = runs.wait_phase("watch", "Running")
    assert running["status"]["jobSetUID"] == uid
    assert find_condition(running, "Created")["reason"] == "JobSetFound"  # type: ignore[index]
    runs.wait_step("watch", 1)
    runs.wait_condition("watch", "Admitted", "True", "Admitted")

    for attempt in (1, 2):
        nan.touch()
        halted = runs.wait_phase("watch", "Halted")
        assert halted["status"]["halt"]["reason"] == "NonFiniteLoss"
        launcher.wait_at_rest("llm")
        assert _workload(runs, uid)["spec"]["active"] is False
        assert launcher.jobset("llm")["metadata"]["uid"] == uid
        nan.unlink()
        runs.edit("watch", attempt=attempt + 1)
        resumed = runs.wait_phase("watch", "Running")
        assert resumed["status"]["attempt"] == attempt + 1
        assert resumed["status"]["jobSetUID"] == uid
        assert resumed["status"]["restarts"] == 0
        runs.wait_step("watch", 1)
    assert reasons(resumed) == ["NonFiniteLoss", "NonFiniteLoss", None]

    runs.edit("watch", suspend=True)
    runs.wait_condition("watch", "Suspended", "True", "SuspendRequested")
    launcher.wait_at_rest("llm")
    runs.edit("watch", suspend=False)
    runs.wait_phase("watch", "Running")
    assert launcher.jobset("llm")["metadata"]["uid"] == uid

    control_plane.kubectl("delete", "jobset", "llm", "-n", runs.namespace)
    runs.wait_phase("watch", "Cancelled")
    verbs = {
        record.verb
        for record in audit_log.records(user=OPERATOR)
        if record.resource == "jobsets" and record.namespace == runs.namespace
    }
    assert verbs <= {"list", "watch"}, "in a queue only the Workload is changed"


@pytest.mark.slow
def test_a_jobset_in_no_queue_is_halted_by_suspend_and_outlives_the_object_that_watched_it(
    runs: TrainingRuns,
    launcher: Launcher,
    start_operator: StartOperator,
    audit_log: AuditLog,
    tmp_path: Path,
) -> None:
    nan = tmp_path / "nan"
    start_operator()
    uid = launcher.launch(xpk_jobset("llm", container="main", NAN_FILE=str(nan)))
    runs.apply(watcher("watch", "llm"))
    runs.wait_phase("watch", "Running")
    runs.apply(watcher("also", "llm"))
    conflict = runs.wait_condition("also", "Created", "False", "NameConflict")
    assert "watched by TrainingRun watch already" in conflict["message"]
    runs.delete("also")
    nan.touch()
    runs.wait_phase("watch", "Halted")
    launcher.wait_at_rest("llm")
    nan.unlink()
    runs.edit("watch", attempt=2)
    runs.wait_phase("watch", "Running")
    runs.wait_step("watch", 1)
    runs.delete("watch")
    wait_for("the run to be gone", lambda: not runs.client.items(runs.collection))
    with pytest.raises(ApiError, match="not found"):
        runs.get("watch")
    jobset = launcher.jobset("llm")
    assert jobset["metadata"]["uid"] == uid
    assert not jobset["spec"].get("suspend")
    assert len(launcher.live_pods("llm")) == 2
    verbs = {r.verb for r in audit_log.records(user=OPERATOR) if r.resource == "jobsets"}
    assert verbs <= {"list", "watch", "patch"}


def test_a_watched_run_ends_as_its_jobset_does_and_90_of_any_container_is_divergence(
    runs: TrainingRuns, launcher: Launcher, start_operator: StartOperator
) -> None:
    start_operator()
    ways: dict[str, dict[str, str]] = {
        "done": {"STEPS": "3"},
        "diverged": {"NAN_STEP": "3", "EXIT_CODE": "90"},
        "broken": {"NAN_STEP": "3", "EXIT_CODE": "7"},
    }
    for way, environment in ways.items():
        runs.apply(watcher(way, f"js-{way}"))
        launcher.launch(xpk_jobset(f"js-{way}", container="main", SERIES="", **environment))
    runs.wait_phase("done", "Complete")
    diverged = runs.wait_phase("diverged", "Halted")
    assert diverged["status"]["halt"]["reason"] == "Diverged"
    broken = runs.wait_phase("broken", "Failed")
    failed = find_condition(broken, "Failed") or {}
    assert failed["reason"] == "JobSetFailed"
    assert failed["message"].startswith("FailJobSetFailurePolicyAction: ")
    for way in ("done", "broken"):
        assert not launcher.jobset(f"js-{way}")["spec"].get("suspend")
    assert launcher.jobset("js-diverged"), "suspended or failed by then, but not deleted"


def _workload(runs: TrainingRuns, uid: str) -> Manifest:
    path = f"{QUEUES}/namespaces/{runs.namespace}/workloads"
    (workload,) = (
        each
        for each in runs.client.items(path)
        if uid in {owner["uid"] for owner in each["metadata"].get("ownerReferences", [])}
    )
    return workload
