"""Both images on a real node: a run diverges, is halted, resumed and completes. Takes root."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from lingcluster import operator_process, real_node, sample_runs
from lingcluster.audit import AuditLog
from lingcluster.build import Programs
from lingcluster.client import Manifest, load_manifests, wait_for
from lingcluster.control_plane import ControlPlane
from lingcluster.image_build import BuiltImage, ImageStore
from lingcluster.journal import kept_checkpoints
from lingcluster.loopback import LoopbackBlock
from lingcluster.pod_network import PodNetwork
from lingcluster.processes import Process, Session
from lingcluster.real_node import RealNode
from lingcluster.story import Story
from lingcluster.training_runs import TrainingRuns
from lingcluster.watch import Change, Recording, terminations

NAME = "ling2-run"
NAMESPACE = "default"
FAULT_STEP = 60
STEPS = 100
USER_ID = 65532


@pytest.fixture(scope="module")
def plane(
    programs: Programs,
    loopback: LoopbackBlock,
    cluster_session: Session,
    tmp_path_factory: pytest.TempPathFactory,
    repository: Path,
) -> Iterator[ControlPlane]:
    """A control plane of its own, whose only node will be the real one."""
    directory = tmp_path_factory.mktemp("plane")
    with ExitStack() as stack:
        stack.enter_context(real_node.only_node())
        plane = ControlPlane(
            programs,
            directory,
            loopback,
            cluster_session,
            additions=real_node.additions(directory),
        )
        stack.callback(plane.stop)
        real_node.let_in(plane)
        plane.start(crds=sorted((repository / "manifests" / "crd").glob("*.yaml")))
        stack.enter_context(PodNetwork(plane.server))
        yield plane


@pytest.fixture(scope="module")
def node(
    image_store: ImageStore,
    operator_image: BuiltImage,
    trainer_image: BuiltImage,
    plane: ControlPlane,
    programs: Programs,
    cluster_session: Session,
    tmp_path_factory: pytest.TempPathFactory,
    repository: Path,
) -> Iterator[RealNode]:
    """The node, with both images under the names that the manifests give them."""
    manifests = repository / "manifests"
    (deployment,) = load_manifests(manifests / "operator" / "deployment.yaml")
    (run,) = load_manifests(manifests / "ling2-run.yaml")
    images = {
        real_node.SANDBOX_IMAGE: image_store.sandbox(),
        _full_name(_container(deployment["spec"]["template"])["image"]): operator_image,
        _full_name(run["spec"]["image"]): trainer_image,
    }
    folder = tmp_path_factory.mktemp("images")
    archives: dict[str, Path] = {}
    for number, (name, image) in enumerate(images.items()):
        archives[name] = folder / f"{number}.tar"
        image_store.export(image, archives[name], name=name)
    node = RealNode(programs, tmp_path_factory.mktemp("node"), plane, cluster_session)
    try:
        node.start(archives)
        yield node
    finally:
        node.stop()


@pytest.mark.slow
def test_both_images_on_a_real_node_from_apply_to_halt_to_complete(
    plane: ControlPlane,
    node: RealNode,
    repository: Path,
    text_dataset: Path,
    tmp_path: Path,
    story: Story,
    cluster_session: Session,
) -> None:
    kubectl, output = plane.kubectl, tmp_path / "output"
    audit = plane.audit_log.mark()
    runs = TrainingRuns(plane.client, NAMESPACE)
    story.tell(kubectl("get", "nodes", "-o", "wide"))
    story.tell(kubectl("apply", "-k", str(repository / "manifests" / "operator")))
    operators = f"/api/v1/namespaces/{operator_process.NAMESPACE}/pods"
    wait_for(
        "both operators to be ready",
        lambda: _available(plane) == 2,
        timeout=180,
        describe=lambda: kubectl("describe", "pods", "-n", "ling-system") + node.logs(),
    )
    _assert_restricted(plane.client.items(operators))
    story.tell(kubectl("get", "pods", "-n", operator_process.NAMESPACE, "-o", "wide"))

    run = _run(repository, text_dataset, output)
    story.tell(kubectl("apply", "-f", "-", input=yaml.safe_dump(run)))
    identity = plane.client.identity
    with Recording(identity, runs.pods_path) as pods, Recording(identity, operators) as leaders:
        runs.wait_phase(NAME, "Running")
        story.tell(kubectl("get", "trun", NAME))
        # Followed, since a halt takes the pod away.
        follow = [kubectl.binary, "--kubeconfig", kubectl.kubeconfig, "logs", "--follow"]
        first = Process(
            "kubectl logs",
            [*follow, runs.pod(NAME, 0)],
            log=tmp_path / "attempt-1.log",
            session=cluster_session,
        )
        halted = runs.wait_phase(NAME, "Halted")
        runs.wait_no_live_pod(NAME)
        story.tell(kubectl("get", "trun", NAME))
        story.tell(f"status.halt: {halted['status']['halt']}")
        assert first.wait(timeout=60) == 0
        log = first.log.read_text()
        story.tell("kubectl logs:\n" + "\n".join(log.splitlines()[-4:]))
        _assert_halted(halted, log, pods.changes)

        resume_at = max(kept_checkpoints(output / NAME))
        assert resume_at < FAULT_STEP
        run["spec"]["attempt"] = 2
        run["spec"]["run"]["fault"]["enabled"] = False
        story.tell(kubectl("apply", "-f", "-", input=yaml.safe_dump(run)))
        complete = runs.wait_phase(NAME, "Complete")
        log = kubectl("logs", runs.pod(NAME, 0))
        assert f"restored the checkpoint of step {resume_at}" in log
        assert f" step={resume_at + 1} " in log
        assert complete["status"]["training"]["step"] == STEPS
        story.tell(kubectl("get", "trun", NAME))

        _assert_operators_end_in_order(plane, leaders)
    assert [end["exitCode"] for end in terminations(pods.changes).values()] == [90, 0]
    _assert_nothing_was_refused(audit)


def _run(repository: Path, dataset: Path, output: Path) -> Manifest:
    """Return manifests/ling2-run.yaml made small; data and output are folders of the node."""
    data = output.with_name("data")
    shutil.copytree(dataset.parent, data)
    data.chmod(0o755)  # as the user of the image sees it
    output.mkdir()
    output.chmod(0o777)
    run = sample_runs.small_real_run(
        repository / "manifests" / "ling2-run.yaml",
        NAME,
        dataset=Path("/data") / dataset.name,
        output=Path("/output"),
        compilation_cache=Path("/output/jax"),
        steps=STEPS,
    )
    run["spec"]["cpu"]["processes"] = 1  # more would find one another by DNS
    run["spec"]["run"]["fault"] = {"enabled": True, "faultStep": FAULT_STEP}
    run["spec"]["health"] = {"scrapeIntervalSeconds": 1}
    run["spec"]["template"] |= {
        "resources": {"requests": {"cpu": "1"}},
        "volumes": [
            {"name": "data", "hostPath": {"path": str(data)}},
            {"name": "output", "hostPath": {"path": str(output)}},
        ],
        "volumeMounts": [
            {"name": "data", "mountPath": "/data", "readOnly": True},
            {"name": "output", "mountPath": "/output"},
        ],
    }
    return run


def _assert_restricted(pods: list[Manifest]) -> None:
    """The operators run as the image's user on a read-only root filesystem, without a restart."""
    for pod in pods:
        security = _container(pod)["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert pod["spec"]["securityContext"]["runAsUser"] == USER_ID
        (status,) = pod["status"]["containerStatuses"]
        assert status["restartCount"] == 0
        assert status["imageID"], "from the node's own store"
        assert pod["spec"]["nodeName"] == real_node.NAME


def _assert_halted(run: Manifest, log: str, pods: list[Change]) -> None:
    """Status, the kubelet's record of the container, and its log agree."""
    halt = run["status"]["halt"]
    assert (halt["reason"], halt["step"], halt["value"]) == ("NonFiniteLoss", FAULT_STEP, "nan")
    assert halt["host"] == real_node.NAME
    (ended,) = terminations(pods).values()
    assert ended["exitCode"] == 90
    assert json.loads(ended["message"])["reason"] == "NonFiniteLoss"
    assert f" step={FAULT_STEP - 1} " in log
    assert "exit=90" in log


def _assert_operators_end_in_order(plane: ControlPlane, watched: Recording) -> None:
    """As process 1 the operator hears SIGTERM: both end with 0, before a SIGKILL."""
    namespace = operator_process.NAMESPACE
    log = plane.kubectl("logs", "-n", namespace, f"deployment/{operator_process.SERVICE_ACCOUNT}")
    assert all(json.loads(line) for line in log.splitlines())
    plane.kubectl("scale", "-n", namespace, "--replicas=0", "deployment/ling-operator")
    pods = f"/api/v1/namespaces/{namespace}/pods"
    wait_for("the operators to be gone", lambda: not plane.client.items(pods), timeout=60)
    wait_for(
        "their ends to be seen",
        lambda: len([c for c in watched.changes if c.type == "DELETED"]) == 2,
    )
    assert {end["exitCode"] for end in terminations(watched.changes).values()} == {0}


def _assert_nothing_was_refused(audit: AuditLog) -> None:
    mine = audit.records(user=operator_process.USER)
    assert mine, "in the cluster the operator is its service account"
    assert [record for record in mine if record.code in (401, 403)] == []


def _available(plane: ControlPlane) -> int:
    path = f"/apis/apps/v1/namespaces/{operator_process.NAMESPACE}/deployments/ling-operator"
    return plane.client.get(path).get("status", {}).get("availableReplicas", 0)


def _container(pod: Manifest) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    return container


def _full_name(image: str) -> str:
    """Return what a kubelet asks its runtime for."""
    return image if "/" in image else f"docker.io/library/{image}"
