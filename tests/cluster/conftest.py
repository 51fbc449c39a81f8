"""The real control plane as fixtures. Everything under this folder is marked `cluster`."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lingcluster import kueue_controller, operator_process
from lingcluster.apart import SideBySide
from lingcluster.api_proxy import ApiProxy
from lingcluster.audit import AuditLog
from lingcluster.build import Programs
from lingcluster.client import wait_for
from lingcluster.container_setup import Timing
from lingcluster.control_plane import ControlPlane
from lingcluster.kubelet import ProcessKubelet
from lingcluster.loopback import LoopbackBlock
from lingcluster.operator_process import OperatorAddresses, OperatorProcess, StartOperator
from lingcluster.pod_spec import Image
from lingcluster.processes import Session
from lingcluster.training_runs import TrainingRuns
from lingcluster.workloads import SHELL_IMAGE

HERE = Path(__file__).parent
METRICS_PORT = 9464


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests; first, because others look at the mark."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def cluster_session() -> Iterator[Session]:
    """Owner of every process; afterwards none may be left to kill."""
    session = Session()
    try:
        yield session
    finally:
        clean = session.close()
    assert clean, "processes were left when all had been stopped; they are killed now"


@pytest.fixture(scope="session")
def loopback() -> Iterator[LoopbackBlock]:
    """The session's own addresses."""
    with LoopbackBlock() as block:
        yield block


@pytest.fixture(scope="session")
def control_plane(
    programs: Programs,
    cluster_session: Session,
    loopback: LoopbackBlock,
    tmp_path_factory: pytest.TempPathFactory,
    repository: Path,
) -> Iterator[ControlPlane]:
    """A running control plane with the JobSet controller and this project's CRDs."""
    plane = ControlPlane(
        programs, tmp_path_factory.mktemp("control-plane"), loopback, cluster_session
    )
    try:
        plane.start(crds=sorted((repository / "manifests" / "crd").glob("*.yaml")))
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="session")
def kueue(control_plane: ControlPlane) -> None:
    """Kueue, from the first test that needs it to the end of the session."""
    kueue_controller.start(control_plane)


@pytest.fixture(scope="session")
def images() -> dict[str, Image]:
    """Container images: a bare shell, and the trainer as installed in this environment."""
    trainer = Image(
        entrypoint=(sys.executable, "-m", "ling_trainer"),
        environment={"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"},
    )
    return {SHELL_IMAGE: Image(), "ling-trainer": trainer}


@pytest.fixture(scope="session")
def _session_kubelet(
    control_plane: ControlPlane,
    loopback: LoopbackBlock,
    cluster_session: Session,
    images: dict[str, Image],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ProcessKubelet]:
    kubelet = ProcessKubelet(
        control_plane.identity("process-kubelet"),
        tmp_path_factory.mktemp("pods"),
        loopback,
        cluster_session,
        images=images,
        proxied_ports=[METRICS_PORT],
    )
    kubelet.start()
    try:
        yield kubelet
    finally:
        kubelet.stop()


@pytest.fixture
def kubelet(_session_kubelet: ProcessKubelet) -> Iterator[ProcessKubelet]:
    """The process kubelet, its timing as usual at the start of each test."""
    vars(_session_kubelet.timing).update(vars(Timing()))
    yield _session_kubelet
    _session_kubelet.set_logs("open")
    vars(_session_kubelet.timing).update(vars(Timing()))


@pytest.fixture
def make_namespace(
    control_plane: ControlPlane, kubelet: ProcessKubelet
) -> Iterator[Callable[[], str]]:
    """Make new namespaces; afterwards they are deleted and their processes are gone."""
    client, made = control_plane.client, list[str]()

    def make() -> str:
        name = f"test-{uuid.uuid4().hex[:8]}"
        client.create("/api/v1/namespaces", {"metadata": {"name": name}})
        made.append(name)
        # Without it the API server refuses every pod.
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        wait_for(f"the service account of {name}", lambda: client.find(account))
        return name

    yield make
    for name in made:
        client.delete(f"/api/v1/namespaces/{name}")
        # A namespace that ends accepts nothing new; its pods need no grace any more.
        client.delete(f"/api/v1/namespaces/{name}/pods", grace=0)
    for name in made:
        wait_for(
            f"the processes of {name} to end",
            lambda name=name: not kubelet.live_processes(name),
        )


@pytest.fixture
def namespace(make_namespace: Callable[[], str]) -> str:
    """A new namespace; afterwards it is deleted and its processes are gone."""
    return make_namespace()


@pytest.fixture
def urgent(control_plane: ControlPlane) -> Iterator[str]:
    """A PriorityClass above that of every run."""
    path = "/apis/scheduling.k8s.io/v1/priorityclasses"
    control_plane.client.apply(
        f"{path}/urgent",
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "urgent"},
            "value": 1000,
        },
    )
    yield "urgent"
    control_plane.client.delete(f"{path}/urgent")


@pytest.fixture
def audit_log(control_plane: ControlPlane) -> AuditLog:
    """The requests that the API server answers from the test's start on."""
    return control_plane.audit_log.mark()


@pytest.fixture(scope="session")
def operator_kubeconfig(control_plane: ControlPlane, repository: Path) -> Path:
    """The kubeconfig of the operator's service account; its manifests are applied."""
    operator_process.install_access(control_plane.kubectl, repository / "manifests" / "operator")
    return control_plane.service_account_kubeconfig(
        operator_process.NAMESPACE, operator_process.SERVICE_ACCOUNT, expiration_seconds=86400
    )


@pytest.fixture
def start_operator(
    operator_kubeconfig: Path,
    namespace: str,
    loopback: LoopbackBlock,
    cluster_session: Session,
    tmp_path: Path,
) -> Iterator[StartOperator]:
    """Start operator processes; those still running at the end are stopped."""
    started: list[OperatorProcess] = []

    def start(
        *,
        kubeconfig: Path | None = None,
        namespaces: Sequence[str] = (),
        arguments: Sequence[str] = (),
        wait: bool = True,
    ) -> OperatorProcess:
        metrics, probes = loopback.free_ports(2)
        operator = OperatorProcess(
            kubeconfig=kubeconfig or operator_kubeconfig,
            namespaces=namespaces or [namespace],
            addresses=OperatorAddresses(
                f"{loopback.control_plane}:{metrics}", f"{loopback.control_plane}:{probes}"
            ),
            log=tmp_path / f"operator-{len(started)}.log",
            session=cluster_session,
            arguments=arguments,
        )
        started.append(operator)
        if wait:
            operator.wait_until_ready()
        return operator

    yield start
    for operator in started:
        operator.stop()


@pytest.fixture
def operator_proxy(
    control_plane: ControlPlane, operator_kubeconfig: Path, loopback: LoopbackBlock
) -> Iterator[ApiProxy]:
    """A proxy between an operator and the API server, with the identity for its kubeconfig."""
    del operator_kubeconfig  # for the operator's service account
    identity = control_plane.service_account(
        operator_process.NAMESPACE, operator_process.SERVICE_ACCOUNT
    )
    (port,) = loopback.free_ports(1)
    address, tls = control_plane.address, control_plane.serving
    with ApiProxy(identity, address=address, port=port, tls=tls) as proxy:
        yield proxy


@pytest.fixture
def side_by_side(
    control_plane: ControlPlane,
    operator_kubeconfig: Path,
    kubelet: ProcessKubelet,
    loopback: LoopbackBlock,
    cluster_session: Session,
    tmp_path: Path,
) -> Iterator[SideBySide]:
    """Operators with namespaces and proxies of their own, for tests of several at once."""
    del operator_kubeconfig  # for the operator's service account
    places = SideBySide(control_plane, kubelet, loopback, cluster_session, tmp_path)
    yield places
    places.clear()


@pytest.fixture
def runs(control_plane: ControlPlane, namespace: str) -> TrainingRuns:
    """The TrainingRuns of the test's namespace."""
    return TrainingRuns(control_plane.client, namespace)
