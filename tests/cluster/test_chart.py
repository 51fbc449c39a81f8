"""The chart on a real API server: install, upgrade, rollback, uninstall, under its own rights.

The operator is a process with the release's service account: there is no container runtime here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from lingcluster.audit import AuditLog, AuditRecord
from lingcluster.client import ApiError, KubeClient, Manifest, load_manifests, wait_for
from lingcluster.control_plane import ControlPlane
from lingcluster.helm import CHART, Helm
from lingcluster.loopback import LoopbackBlock
from lingcluster.operator_process import OperatorAddresses, OperatorProcess
from lingcluster.processes import Session
from lingcluster.story import Story
from lingcluster.training_runs import GROUP, TrainingRuns
from lingcluster.workloads import SHELL_IMAGE

OLDER_CHART = Path(__file__).parents[1] / "chart" / "older" / "ling-operator"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingruns.ling.primatrix.io"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
RELEASE = "ling"
NAME = "ling-ling-operator"
# The session's own CRD was not made by Helm.
ADOPT = ("--take-ownership", "--force-conflicts")
NEWER_RENDERING = """
from ling_operator import jobset

build = jobset.build_pod_template

def changed(*arguments):
    template = build(*arguments)
    template["metadata"]["annotations"]["example.com/rendering"] = "newer"
    return template

jobset.build_pod_template = changed

from ling_operator.app import main
main()
"""


@dataclass(frozen=True)
class Release:
    """A release in a test's namespace, and what its commands printed."""

    helm: Helm
    namespace: str
    values: Path
    story: Story

    def __call__(self, verb: str, *arguments: str | Path) -> str:
        """Run `helm VERB ling ...` and write both down as a user would see them."""
        shown = [
            str(word.relative_to(CHART.parents[1])) if isinstance(word, Path) else word
            for word in arguments
        ]
        self.story.tell(f"$ helm {verb} {RELEASE} {' '.join(shown)} -n NAMESPACE")
        values = ("--values", self.values) if verb in {"install", "upgrade"} else ()
        printed = self.helm(verb, RELEASE, *arguments, "-n", self.namespace, *values)
        self.story.tell(printed.replace(self.namespace, "NAMESPACE"))
        return printed


@pytest.fixture
def helm(control_plane: ControlPlane, tmp_path: Path) -> Helm:
    """Helm as administrator."""
    return Helm(control_plane.programs["helm"], home=tmp_path, kubeconfig=control_plane.kubeconfig)


@pytest.fixture
def release(helm: Helm, namespace: str, tmp_path: Path, story: Story) -> Iterator[Release]:
    """The release of the test, not installed yet; its pods find this environment's Python."""
    kubeconfig = tmp_path / "release.kubeconfig"
    environment = {"KUBECONFIG": str(kubeconfig), "PATH": str(Path(sys.executable).parent)}
    values = tmp_path / "values.yaml"
    values.write_text(
        yaml.safe_dump(
            {
                "image": {"repository": SHELL_IMAGE},
                "extraEnv": [{"name": k, "value": v} for k, v in environment.items()],
            }
        )
    )
    yield Release(helm, namespace, values, story)
    helm("uninstall", RELEASE, "-n", namespace, "--ignore-not-found")


@pytest.fixture
def kubeconfig(
    control_plane: ControlPlane, release: Release, tmp_path: Path
) -> Callable[[], Path]:
    """Write the kubeconfig of the release's service account."""

    def write() -> Path:
        identity = control_plane.service_account(release.namespace, NAME)
        return identity.write_kubeconfig(tmp_path / "release.kubeconfig")

    return write


@pytest.fixture
def start(
    control_plane: ControlPlane,
    release: Release,
    kubeconfig: Callable[[], Path],
    loopback: LoopbackBlock,
    cluster_session: Session,
    tmp_path: Path,
) -> Iterator[Callable[..., OperatorProcess]]:
    """Start operators with the flags of the release's Deployment, as its service account."""
    started: list[OperatorProcess] = []

    def start(*program: str | Path) -> OperatorProcess:
        deployment = control_plane.client.get(
            f"/apis/apps/v1/namespaces/{release.namespace}/deployments/{NAME}"
        )
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        flags = [word for word in container["args"] if "bind-address" not in word]
        metrics, probes = loopback.free_ports(2)
        operator = OperatorProcess(
            program=program or ("-m", "ling_operator.app"),
            namespaces=[],
            kubeconfig=kubeconfig(),
            addresses=OperatorAddresses(
                f"{loopback.control_plane}:{metrics}", f"{loopback.control_plane}:{probes}"
            ),
            log=tmp_path / f"operator-{len(started)}.log",
            session=cluster_session,
            arguments=[*flags, f"--leader-election-namespace={release.namespace}"],
        )
        started.append(operator)
        operator.wait_until_ready()
        return operator

    yield start
    for operator in started:
        operator.stop()


@pytest.fixture
def crd_of_the_session(control_plane: ControlPlane, repository: Path) -> Iterator[None]:
    """Afterwards the CRD is this version's again."""
    yield
    (crd,) = load_manifests(repository / "manifests" / "crd" / "trainingruns.yaml")
    control_plane.install_crd(crd)


def schema(crd: Manifest) -> Manifest:
    """Return what a CRD says of its objects, in a form that can be compared."""
    (version,) = crd["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


def identity(jobset: Manifest) -> tuple[str, int]:
    return jobset["metadata"]["uid"], jobset["metadata"]["generation"]


def leads(operator: OperatorProcess) -> bool:
    page = operator.metrics()
    passes = [
        line for line in page.splitlines() if line.startswith("ling_operator_reconcile_total")
    ]
    return "ling_operator_leading 1.0" in page and any(not p.endswith(" 0.0") for p in passes)


def asked(audit_log: AuditLog, namespace: str) -> list[AuditRecord]:
    """Return what the account of the release in a namespace asked for."""
    return audit_log.records(user=f"system:serviceaccount:{namespace}:{NAME}")


def refusals(audit_log: AuditLog, namespace: str) -> list[AuditRecord]:
    """Return what the release's account asked for in vain; other tests' namespaces apart."""
    return [
        record
        for record in asked(audit_log, namespace)
        if record.code in {401, 403} and record.namespace in {"", namespace}
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("crd_of_the_session")
def test_a_run_lives_through_install_upgrade_rollback_and_uninstall(
    release: Release,
    runs: TrainingRuns,
    start: Callable[..., OperatorProcess],
    scripted_run: Callable[..., Manifest],
    audit_log: AuditLog,
    tmp_path: Path,
    story: Story,
) -> None:
    client, namespace = runs.client, runs.namespace
    pods_path = f"/api/v1/namespaces/{namespace}/pods"
    release("install", OLDER_CHART, *ADOPT)
    older = schema(client.get(CRD))
    first = start()
    runs.apply(scripted_run("lives"))
    runs.wait_phase("lives", "Running")
    before = identity(runs.jobset("lives"))
    pods = {pod["metadata"]["uid"] for pod in runs.pods("lives")}

    def untouched() -> bool:
        now = {pod["metadata"]["uid"] for pod in runs.pods("lives")}
        return identity(runs.jobset("lives")) == before and now == pods

    after_upgrade = audit_log.mark()
    release("upgrade", CHART)
    current = schema(client.get(CRD))
    assert current != older, "the frozen chart must have another CRD: nothing is upgraded"
    program = tmp_path / "newer_rendering.py"
    program.write_text(NEWER_RENDERING)
    second = start(program)
    assert first.stop(grace=30) == 0
    wait_for("the new operator to lead", lambda: leads(second))
    shown = runs.wait_step("lives", 1)
    runs.wait_step("lives", shown + 20)  # it watches the run that the old one started
    assert untouched()
    story.tell("the run of before the upgrade goes on: same JobSet, same generation, same pods")

    runs.apply(scripted_run("diverges", steps=60, env={"NAN_STEP": "5"}))
    runs.wait_phase("diverges", "Halted")
    runs.wait_no_live_pod("diverges")
    runs.edit("diverges", attempt=2, template={"env": []})
    runs.wait_phase("diverges", "Complete")
    annotations = [pod["metadata"]["annotations"] for pod in runs.pods("diverges")]
    assert [each.get("example.com/rendering") for each in annotations] == ["newer", "newer"]
    # A namespace that an earlier test left may be ending still.
    wait_for("others' runs to be gone", lambda: len(client.items(f"{GROUP}/trainingruns")) == 2)
    printed = release("test", "--logs")
    assert "TrainingRuns are served: 2 in all namespaces" in printed
    assert refusals(after_upgrade, namespace) == []

    # The way back that keeps the CRD, and then the one that does not.
    release("upgrade", OLDER_CHART, "--reset-then-reuse-values", "--set", "crds.enabled=false")
    assert schema(client.get(CRD)) == current
    release("rollback", "1")
    assert schema(client.get(CRD)) == older
    assert untouched()

    second.stop(grace=30)
    release("uninstall")
    assert client.get(CRD)["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert client.find(f"{RBAC}/clusterroles/{NAME}") is None
    assert runs.status("lives")["phase"] == "Running"
    assert untouched()
    story.tell("after the uninstall: CRD, TrainingRuns, JobSets and pods are still there")
    assert client.items(pods_path)


def test_a_release_of_two_namespaces_looks_after_both_with_rights_in_them_alone(
    release: Release,
    runs: TrainingRuns,
    make_namespace: Callable[[], str],
    start: Callable[..., OperatorProcess],
    scripted_run: Callable[..., Manifest],
    audit_log: AuditLog,
) -> None:
    client, namespace = runs.client, runs.namespace
    second, elsewhere = (TrainingRuns(client, make_namespace()) for _ in range(2))
    both = f"watchNamespaces={{{namespace},{second.namespace}}}"
    release("install", CHART, "--set", f"{both},crds.enabled=false,rbac.userRoles=false")
    assert client.find(f"{RBAC}/clusterroles/{NAME}") is None
    elsewhere.apply(scripted_run("untouched", steps=40))
    start()
    runs.apply(scripted_run("one", steps=40))
    second.apply(scripted_run("two", steps=40))
    runs.wait_phase("one", "Complete")
    second.wait_phase("two", "Complete")
    printed = release("test", "--logs")
    for each in (runs, second):
        assert f"TrainingRuns are served: 1 in {each.namespace}\n" in printed
    assert elsewhere.status("untouched") == {}
    assert client.items(elsewhere.jobsets) == []
    records = asked(audit_log, namespace)
    assert [record for record in records if record.code in {401, 403}] == []
    # Discovery, which every user may read, has no resource.
    watched = {record.namespace for record in records if record.resource}
    assert watched == {namespace, second.namespace}


def test_the_api_server_admits_the_operators_pod_where_pods_are_restricted(
    release: Release, control_plane: ControlPlane, namespace: str
) -> None:
    client = control_plane.client
    release("install", CHART, "--set", "crds.enabled=false")
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    client.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": label}})
    deployment = client.get(f"/apis/apps/v1/namespaces/{namespace}/deployments/{NAME}")
    pod = deployment["spec"]["template"]
    pod["metadata"] = {"name": "of-the-deployment"}
    pods = f"/api/v1/namespaces/{namespace}/pods"

    def admitted() -> Manifest:
        return client.create(pods, pod, dryRun="All")

    wait_for("the label to be seen", lambda: is_refused(client, pods))
    assert admitted()
    pod["spec"]["containers"][0]["securityContext"].pop("capabilities")
    with pytest.raises(ApiError, match="unrestricted capabilities"):
        admitted()


def is_refused(client: KubeClient, pods: str) -> bool:
    """Tell whether a pod that says nothing of its security is refused."""
    plain = {"metadata": {"name": "plain"}, "spec": {"containers": [{"name": "a", "image": "a"}]}}
    try:
        client.create(pods, plain, dryRun="All")
    except ApiError as error:
        return "PodSecurity" in str(error)
    return False
