"""The operator needs all the rights that its manifest gives it, and no others."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lingcluster import operator_process
from lingcluster.audit import AuditLog, AuditRecord
from lingcluster.client import ApiError, KubeClient, Manifest, wait_for
from lingcluster.control_plane import ControlPlane
from lingcluster.installation import grant_role
from lingcluster.kueue_controller import make_queue
from lingcluster.operator_process import OperatorProcess, StartOperator
from lingcluster.rights import Right, cluster_role, limited, rights, without
from lingcluster.training_runs import TrainingRuns


@pytest.fixture
def role(repository: Path) -> Manifest:
    """The ClusterRole of the operator's manifest."""
    return cluster_role(repository / "manifests" / "operator")


def right_of(record: AuditRecord) -> Right:
    return record.group, record.resource, record.verb


@pytest.mark.usefixtures("kueue")
def test_runs_with_a_pause_a_second_attempt_and_a_queue_use_every_right_and_are_refused_nothing(
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    audit_log: AuditLog,
    role: Manifest,
) -> None:
    start_operator()
    make_queue(runs.client, runs.namespace, "team", pods=2)
    runs.apply(scripted_run("queued", queue="team"))
    runs.wait_phase("queued", "Running")
    runs.edit("queued", suspend=True)
    runs.wait_phase("queued", "Suspended")
    runs.delete("queued")
    runs.apply(scripted_run("good"))
    runs.wait_phase("good", "Running")
    runs.edit("good", suspend=True)
    runs.wait_phase("good", "Suspended")
    runs.edit("good", suspend=False, attempt=2, run={"steps": 20})
    run = runs.wait_phase("good", "Complete")
    assert run["status"]["attempt"] == 2
    wait_for(
        "the last event", lambda: [e for e in runs.events("good") if e["reason"] == "Finished"]
    )
    runs.apply(scripted_run("bad", env={"NAN_STEP": "20"}))
    runs.wait_phase("bad", "Halted")  # its evidence is read then
    mine = audit_log.records(user=operator_process.USER)
    assert [record for record in mine if record.code in (401, 403)] == []
    # Discovery, which every user may read, has no resource.
    assert {right_of(record) for record in mine if record.resource} == rights(role)


def test_an_operator_that_may_not_list_pods_never_gets_ready_and_says_so(
    control_plane: ControlPlane,
    namespace: str,
    role: Manifest,
    start_operator: StartOperator,
    runs: TrainingRuns,
    scripted_run: Callable[..., Manifest],
    tmp_path: Path,
) -> None:
    less = {"rules": without(role, ("", "pods", "list"))}
    identity = limited(control_plane, namespace, less)
    kubeconfig = identity.write_kubeconfig(tmp_path / "limited.kubeconfig")
    operator = start_operator(kubeconfig=kubeconfig, wait=False)
    runs.apply(scripted_run("good"))
    said = wait_for("its readiness", lambda: operator.unready('cannot list resource "pods"'))
    assert said.startswith(f"not listed yet: pods in {namespace} (403 Forbidden: ")
    assert runs.client.items(runs.jobsets) == []
    assert operator.returncode is None


def test_a_namespace_without_rights_is_named_and_no_other_waits_until_it_has_them(
    control_plane: ControlPlane,
    namespace: str,
    make_namespace: Callable[[], str],
    role: Manifest,
    start_operator: StartOperator,
    runs: TrainingRuns,
    scripted_run: Callable[..., Manifest],
    tmp_path: Path,
) -> None:
    client = control_plane.client
    others = TrainingRuns(client, make_namespace())
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    client.create(accounts, {"metadata": {"name": "of-some"}})
    user = f"system:serviceaccount:{namespace}:of-some"
    grant_role(client, user, namespace, role["rules"])
    identity = control_plane.service_account(namespace, "of-some")
    operator = start_operator(
        kubeconfig=identity.write_kubeconfig(tmp_path / "some.kubeconfig"),
        namespaces=[others.namespace, namespace],
        wait=False,
    )
    others.apply(scripted_run("later", steps=20))
    runs.apply(scripted_run("good", steps=20))
    runs.wait_phase("good", "Complete")
    assert runs.condition("good", "Permitted") is None

    said = wait_for("its readiness", lambda: operator.unready(f"workloads in {others.namespace}"))
    assert said.startswith(f"not listed yet: trainingruns in {others.namespace} (403 Forbidden: ")
    assert f"in {namespace} (" not in said
    wait_for("its metrics", lambda: others.namespace in refused_namespaces(operator))
    assert refused_namespaces(operator) == {others.namespace}
    assert f'"namespace": "{others.namespace}"' in operator.log.read_text()
    assert others.status("later") == {}
    assert others.client.items(others.jobsets) == []

    grant_role(client, user, others.namespace, role["rules"])
    wait_for("its readiness", operator.is_ready, timeout=90)  # it asks every 30 s
    others.wait_phase("later", "Complete")
    assert refused_namespaces(operator) == set()
    assert operator.returncode is None


def refused_namespaces(operator: OperatorProcess) -> set[str]:
    """Return the namespaces of which the metrics say that a watch is refused."""
    series = r'^ling_operator_watch_refused\{kind="\w+",watched_namespace="([^"]*)"\} 1\.0$'
    return set(re.findall(series, operator.metrics(), re.MULTILINE))


@pytest.mark.parametrize(
    "path",
    ["/api/v1/secrets", "/api/v1/nodes", "/api/v1/configmaps", "/apis/apps/v1/deployments"],
)
def test_the_operators_token_reads_nothing_but_what_it_needs(
    path: str, control_plane: ControlPlane, operator_kubeconfig: Path
) -> None:
    client = KubeClient(
        control_plane.service_account(operator_process.NAMESPACE, operator_process.SERVICE_ACCOUNT)
    )
    with pytest.raises(ApiError) as refusal:
        client.get(path)
    client.close()
    assert refusal.value.status == 403


def test_the_operators_token_edits_no_run_and_no_pod(
    control_plane: ControlPlane,
    operator_kubeconfig: Path,
    runs: TrainingRuns,
    scripted_run: Callable[..., Manifest],
    namespace: str,
) -> None:
    runs.apply(scripted_run("mine", suspend=True))
    client = KubeClient(
        control_plane.service_account(operator_process.NAMESPACE, operator_process.SERVICE_ACCOUNT)
    )
    theirs = TrainingRuns(client, namespace)
    for attempt in (
        lambda: theirs.edit("mine", suspend=False),
        lambda: theirs.delete("mine"),
        lambda: client.delete(f"{theirs.pods_path}/any"),
    ):
        with pytest.raises(ApiError) as refusal:
            attempt()
        assert refusal.value.status == 403
    client.close()
