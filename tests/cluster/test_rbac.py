"""The operator needs all the rights that its manifest gives it, and no others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from lingcluster import operator_process
from lingcluster.audit import AuditLog, AuditRecord
from lingcluster.client import ApiError, KubeClient, Manifest, load_manifests, wait_for
from lingcluster.control_plane import ControlPlane
from lingcluster.kueue_controller import make_queue
from lingcluster.operator_process import StartOperator
from lingcluster.training_runs import TrainingRuns

RBAC = "/apis/rbac.authorization.k8s.io/v1"

type Right = tuple[str, str, str]


@pytest.fixture
def role(repository: Path) -> Manifest:
    """The ClusterRole of the operator's manifest."""
    documents = load_manifests(repository / "manifests" / "operator" / "rbac.yaml")
    (role,) = (each for each in documents if each["kind"] == "ClusterRole")
    return role


def rights(role: Manifest) -> set[Right]:
    """Return every (group, resource, verb) of a role."""
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


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
    runs.apply(scripted_run("good", steps=60))
    runs.wait_phase("good", "Running")
    runs.edit("good", suspend=True)
    runs.wait_phase("good", "Suspended")
    runs.edit("good", suspend=False, attempt=2)
    run = runs.wait_phase("good", "Complete")
    assert run["status"]["attempt"] == 2
    wait_for(
        "the last event", lambda: [e for e in runs.events("good") if e["reason"] == "Finished"]
    )
    mine = audit_log.records(user=operator_process.USER)
    assert [record for record in mine if record.code in (401, 403)] == []
    # Discovery, which every user may read, has no resource.
    assert {right_of(record) for record in mine if record.resource} == rights(role)


@pytest.fixture
def start_without(
    control_plane: ControlPlane,
    namespace: str,
    role: Manifest,
    start_operator: StartOperator,
) -> Callable[[Right], str]:
    """Start an operator whose role lacks one right; return its user name."""

    def start(right: Right) -> str:
        client, name = control_plane.client, f"less-{namespace}"
        less = copy.deepcopy(role)
        less["metadata"] = {"name": name}
        for rule in less["rules"]:
            if rule["apiGroups"] == [right[0]] and rule["resources"] == [right[1]]:
                rule["verbs"].remove(right[2])
        less["rules"] = [rule for rule in less["rules"] if rule["verbs"]]
        assert rights(less) == rights(role) - {right}
        account = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        client.create(account, {"metadata": {"name": name}})
        client.create(f"{RBAC}/clusterroles", less)
        client.create(
            f"{RBAC}/clusterrolebindings",
            {
                "metadata": {"name": name},
                "roleRef": {
                    "apiGroup": "rbac.authorization.k8s.io",
                    "kind": "ClusterRole",
                    "name": name,
                },
                "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
            },
        )
        kubeconfig = control_plane.service_account_kubeconfig(namespace, name)
        # Without a list right it never gets ready, which is the failure to be seen.
        start_operator(kubeconfig=kubeconfig, wait=right[2] != "list")
        return f"system:serviceaccount:{namespace}:{name}"

    return start


@pytest.mark.parametrize(
    "right",
    [
        ("ling.primatrix.io", "trainingruns/status", "update"),
        ("jobset.x-k8s.io", "jobsets", "create"),
        ("", "pods", "list"),
    ],
    ids=lambda right: f"{right[1].replace('/', '-')}-{right[2]}",
)
def test_without_one_right_the_good_run_fails_visibly_and_the_operator_lives(
    right: Right,
    runs: TrainingRuns,
    start_without: Callable[[Right], str],
    scripted_run: Callable[..., Manifest],
    audit_log: AuditLog,
    tmp_path: Path,
) -> None:
    user = start_without(right)
    runs.apply(scripted_run("good", steps=60))
    refused = wait_for("two refusals", lambda: _two(audit_log.records(user=user, code=403)))
    assert {right_of(record) for record in refused} == {right}
    if right[1] == "jobsets":
        condition = runs.wait_condition("good", "Created", "False", "CreateFailed")
        assert "forbidden" in condition["message"]
    assert runs.client.items(runs.jobsets) == []
    assert runs.status("good").get("phase", "Pending") == "Pending"
    log = (tmp_path / "operator-0.log").read_text()
    assert "forbidden" in log
    assert "Traceback" not in log


def _two(records: list[AuditRecord]) -> list[AuditRecord]:
    return records if len(records) >= 2 else []


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
