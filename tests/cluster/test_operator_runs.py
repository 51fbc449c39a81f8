"""The operator's edge on a real API server, with a trainer that is not ours: orders, refusals."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lingcluster import operator_process
from lingcluster.audit import AuditLog
from lingcluster.client import (
    ApiError,
    KubeClient,
    Manifest,
    find_condition,
    has_condition,
    load_manifests,
    wait_for,
)
from lingcluster.control_plane import ControlPlane
from lingcluster.kubelet import ProcessKubelet
from lingcluster.operator_process import StartOperator
from lingcluster.workloads import JOBSETS, SHELL_IMAGE

GROUP = "/apis/ling.primatrix.io/v1alpha1"
JOBSET_GROUP = "jobset.x-k8s.io"

type Env = dict[str, str] | None


@pytest.fixture
def client(control_plane: ControlPlane) -> KubeClient:
    return control_plane.client


@pytest.fixture
def submit(
    client: KubeClient, namespace: str, repository: Path, tmp_path: Path
) -> Callable[..., None]:
    """Apply a TrainingRun of the contract trainer."""
    trainer = repository / "tests" / "operator" / "contract_trainer.py"

    def apply(name: str, *, steps: int = 40, env: Env = None, **spec: Any) -> None:
        template = {
            "terminationGracePeriodSeconds": 5,
            "env": [{"name": k, "value": v} for k, v in (env or {}).items()],
        }
        body: Manifest = {
            "apiVersion": "ling.primatrix.io/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                "image": SHELL_IMAGE,
                "command": [sys.executable, str(trainer)],
                "cpu": {"processes": 2},
                "run": {
                    "preset": "ling2_tiny",
                    "dataset_type": "synthetic",
                    "base_output_directory": str(tmp_path / "out"),
                    "steps": steps,
                },
                "health": {"scrapeIntervalSeconds": 1},
                "template": template | spec.pop("template", {}),
                **spec,
            },
        }
        client.apply(f"{GROUP}/namespaces/{namespace}/trainingruns/{name}", body)

    return apply


@pytest.fixture
def look(client: KubeClient, namespace: str) -> Callable[[str], Manifest]:
    """Read a TrainingRun."""
    return lambda name: client.get(f"{GROUP}/namespaces/{namespace}/trainingruns/{name}")


def wait_phase(look: Callable[[str], Manifest], name: str, phase: str) -> Manifest:
    """Wait until a run is in a phase."""

    def reached() -> Manifest | None:
        run = look(name)
        return run if run.get("status", {}).get("phase") == phase else None

    return wait_for(f"{name} to be {phase}", reached, timeout=240, describe=lambda: look(name))


def live_pods(client: KubeClient, namespace: str) -> list[str]:
    pods = client.items(f"/api/v1/namespaces/{namespace}/pods")
    return [
        pod["metadata"]["name"]
        for pod in pods
        if pod["status"].get("phase") not in {"Succeeded", "Failed"}
    ]


def test_a_run_completes_by_one_create_and_every_event_is_told_once(
    submit: Callable[..., None],
    look: Callable[[str], Manifest],
    start_operator: StartOperator,
    client: KubeClient,
    namespace: str,
    audit_log: AuditLog,
) -> None:
    def told() -> list[str]:
        events = client.items(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events")
        return [e["reason"] for e in events if e["regarding"]["kind"] == "TrainingRun"]

    def trains() -> bool:
        status = look("good").get("status", {})
        return status.get("phase") == "Running" and status.get("training", {}).get("step", 0) > 0

    start_operator()
    submit("good", steps=80, env={"STEP_SECONDS": "0.1"})
    wait_for("a step", trains)
    run = wait_phase(look, "good", "Complete")
    assert has_condition(run, "Complete")
    wait_for("the last event", lambda: "Finished" in told())
    mine = audit_log.records(user=operator_process.USER)
    assert [r for r in mine if r.code == 403] == []
    jobset_writes = [
        (r.verb, r.code)
        for r in mine
        if r.group == JOBSET_GROUP and r.verb in {"create", "patch", "update", "delete"}
    ]
    assert jobset_writes == [("create", 201)]
    assert {r.resource for r in mine if r.verb == "update"} == {"trainingruns/status"}
    assert {"JobSetCreated", "PodsRunning"} <= set(told())
    assert len(told()) == len(set(told()))


def test_a_nan_that_only_the_scrape_shows_halts_and_a_raised_attempt_goes_on(
    submit: Callable[..., None],
    look: Callable[[str], Manifest],
    start_operator: StartOperator,
    client: KubeClient,
    namespace: str,
    kubelet: ProcessKubelet,
) -> None:
    operator = start_operator()
    health = {"scrapeIntervalSeconds": 1, "trainerStops": False}
    submit("sick", steps=10000, env={"NAN_STEP": "20", "STEP_SECONDS": "0.1"}, health=health)
    run = wait_phase(look, "sick", "Halted")
    assert run["status"]["halt"]["reason"] == "NonFiniteLoss"
    wait_for("no live pod", lambda: not live_pods(client, namespace))
    assert kubelet.live_processes(namespace) == []
    jobset = client.get(f"{JOBSETS}/namespaces/{namespace}/jobsets/sick")
    assert jobset["spec"]["suspend"]
    page = operator.metrics()
    labels = f'run="sick",run_namespace="{namespace}"'
    assert f"ling_run_halted{{{labels}}} 1.0" in page
    assert f'ling_run_phase{{phase="Halted",{labels}}} 1.0' in page

    submit("sick", steps=30, attempt=2, health=health)
    run = wait_phase(look, "sick", "Complete")
    assert run["status"]["attempt"] == 2


def test_exit_code_90_halts_with_the_operator_down_and_started_later(
    submit: Callable[..., None],
    look: Callable[[str], Manifest],
    start_operator: StartOperator,
    client: KubeClient,
    namespace: str,
) -> None:
    operator = start_operator()
    submit("self", steps=10000, env={"NAN_STEP": "40", "STEP_SECONDS": "0.1"})
    wait_for("pods", lambda: len(live_pods(client, namespace)) == 2)
    operator.stop()
    wait_for("the pods to end", lambda: not live_pods(client, namespace), timeout=60)
    assert look("self")["status"]["phase"] != "Halted"
    start_operator()
    run = wait_phase(look, "self", "Halted")
    assert run["status"]["halt"]["step"] == 40
    assert run["status"]["restarts"] == 0


def test_a_refused_jobset_is_said_in_a_condition_and_delays_nobody_else(
    submit: Callable[..., None],
    look: Callable[[str], Manifest],
    start_operator: StartOperator,
    audit_log: AuditLog,
) -> None:
    start_operator()
    submit("refused", template={"labels": {"team": "not a label!"}})

    def refusal() -> Manifest | None:
        created = find_condition(look("refused"), "Created")
        return created if created and created["reason"] == "CreateFailed" else None

    condition = wait_for("the refusal in a condition", refusal)
    assert "not a label!" in condition["message"]
    submit("fine", steps=5)
    wait_phase(look, "fine", "Complete")
    tries = [
        r for r in audit_log.records(user=operator_process.USER, code=422) if r.verb == "create"
    ]
    assert 1 <= len(tries) <= 2 + math.log2(60), "it backs off"


def test_suspend_resume_list_and_logs_from_the_command_line(
    submit: Callable[..., None],
    look: Callable[[str], Manifest],
    start_operator: StartOperator,
    control_plane: ControlPlane,
    client: KubeClient,
    namespace: str,
) -> None:
    def ling(*arguments: str) -> str:
        access = ["--kubeconfig", str(control_plane.kubeconfig), "-n", namespace]
        done = subprocess.run(
            [sys.executable, "-m", "ling_operator.cli", *arguments, *access],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    start_operator()
    submit("cli", steps=600, env={"STEP_SECONDS": "0.05"})
    wait_phase(look, "cli", "Running")
    assert "spec.suspend: false -> true" in ling("suspend", "cli")
    wait_phase(look, "cli", "Suspended")
    wait_for("no live pod", lambda: not live_pods(client, namespace))
    assert "nothing was changed" in ling("suspend", "cli")
    assert "spec.suspend: true -> false" in ling("resume", "cli")
    wait_phase(look, "cli", "Running")
    rows = ling("list").splitlines()
    assert rows[0].split()[:3] == ["NAME", "PHASE", "STEP"]
    assert rows[1].split()[:2] == ["cli", "Running"]
    assert json.loads(ling("get", "cli", "-o", "json"))["metadata"]["name"] == "cli"
    run = wait_phase(look, "cli", "Complete")
    assert run["status"]["restarts"] == 0, "a pause is no restart"
    assert "spec.attempt: 1 -> 2" in ling("resume", "cli")


@pytest.mark.usefixtures("operator_kubeconfig")
def test_the_manifests_are_accepted_and_their_pod_meets_the_restricted_standard(
    control_plane: ControlPlane, client: KubeClient, repository: Path
) -> None:
    folder = repository / "manifests" / "operator"
    control_plane.kubectl("apply", "--dry-run=server", "-k", str(folder))
    (deployment,) = load_manifests(folder / "deployment.yaml")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe"},
        "spec": deployment["spec"]["template"]["spec"],
    }
    path = f"/api/v1/namespaces/{operator_process.NAMESPACE}/pods"
    client.create(path, pod, dryRun="All")
    del pod["spec"]["containers"][0]["securityContext"]
    with pytest.raises(ApiError, match="restricted"):
        client.create(path, pod, dryRun="All")
