"""Thousands of hosts that do not exist: KWOK's nodes and pods on a real control plane.

The API server, the scheduler, the Job controller and JobSet's are the real ones. Only the kubelets
are KWOK's: a pod that is bound runs at once, until it is deleted, and then ends as a trainer that
got SIGTERM, with 143. Pods have loopback addresses, where `metrics_pages` answers for all of them.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests" / "cluster"))

from lingcluster.build import Programs  # noqa: E402
from lingcluster.client import Manifest, wait_for  # noqa: E402
from lingcluster.control_plane import ControlPlane  # noqa: E402
from lingcluster.loopback import LoopbackBlock  # noqa: E402
from lingcluster.nodes import NodePool, node_manifest, node_status  # noqa: E402
from lingcluster.processes import Process, Session  # noqa: E402

PODS_PER_NODE = 250
METRICS_PORT = 19464  # not the trainers' own: this server has it on every address
POD_BLOCK = "{prefix}.32.0/19"

# A load that ramps up in a minute asks for more than what the components allow themselves.
FLAGS = {
    "kube-apiserver": ("--max-requests-inflight=1600", "--max-mutating-requests-inflight=800"),
    "kube-controller-manager": (
        "--kube-api-qps=1000",
        "--kube-api-burst=2000",
        "--concurrent-job-syncs=20",
        "--concurrent-gc-syncs=20",
    ),
    "kube-scheduler": ("--kube-api-qps=1000", "--kube-api-burst=2000"),
}
"""Those of JobSet's controller are its defaults, 500 and 500; KWOK has no limit."""

_RUNNING = """
phase: Running
startTime: {{ Now | Quote }}
hostIP: {{ NodeIPWith .spec.nodeName | Quote }}
{{ with .metadata }}
podIP: {{ PodIPWith $.spec.nodeName false .uid .name .namespace | Quote }}
{{ end }}
conditions:
- {type: Initialized, status: "True", lastTransitionTime: {{ Now | Quote }}}
- {type: Ready, status: "True", lastTransitionTime: {{ Now | Quote }}}
- {type: ContainersReady, status: "True", lastTransitionTime: {{ Now | Quote }}}
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  imageID: ""
  ready: true
  started: true
  restartCount: 0
  state: {running: {startedAt: {{ Now | Quote }}}}
{{ end }}
"""
_ENDED = """
phase: Failed
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  imageID: ""
  ready: false
  restartCount: 0
  state:
    terminated: {exitCode: 143, reason: Error, finishedAt: {{ Now | Quote }}}
{{ end }}
"""


def stages() -> list[Manifest]:
    """Return the life of a pod as KWOK's stages."""
    deletion, phase = ".metadata.deletionTimestamp", ".status.phase"
    return [
        _stage(
            "run",
            [_where(deletion, "DoesNotExist"), _where(phase, "In", "Pending")],
            {"statusTemplate": _RUNNING},
        ),
        _stage(
            "end",
            [_where(deletion, "Exists"), _where(phase, "In", "Running", "Pending")],
            {"statusTemplate": _ENDED},
        ),
        _stage(
            "go",
            [_where(deletion, "Exists"), _where(phase, "In", "Failed")],
            {"delete": True},
            milliseconds=500,
        ),
        # Nothing to do for a node; but without a stage for them KWOK looks at no node's pods.
        _stage("node", [_where(".metadata.name", "DoesNotExist")], {}, kind="Node"),
    ]


def _stage(
    name: str,
    conditions: Sequence[Manifest],
    then: Manifest,
    *,
    kind: str = "Pod",
    milliseconds: int = 0,
) -> Manifest:
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": name},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": kind},
            "selector": {"matchExpressions": list(conditions)},
            "delay": {"durationMilliseconds": milliseconds},
            "next": then,
        },
    }


def _where(key: str, operator: str, *values: str) -> Manifest:
    return {"key": key, "operator": operator} | ({"values": list(values)} if values else {})


class BusyPlane(ControlPlane):
    """The control plane of the tests, with limits for such a load.

    Attributes:
      block: its addresses; the pods' are in it too.
    """

    def __init__(
        self, programs: Programs, directory: Path, block: LoopbackBlock, session: Session
    ) -> None:
        super().__init__(programs, directory, block, session)
        self.block = block

    def run(self, name: str, *arguments: str) -> Process:
        """Start a program, with its flags of FLAGS."""
        return super().run(name, *arguments, *FLAGS.get(name, ()))


def start_hosts(plane: BusyPlane, *, pods: int) -> None:
    """Make nodes with room for so many pods, and start KWOK for them."""
    config = plane.directory / "kwok.yaml"
    config.write_text("\n---\n".join(json.dumps(stage) for stage in stages()))
    kubeconfig = plane.identity("process-kubelet").write_kubeconfig(
        plane.directory / "kwok.kubeconfig"
    )
    plane.run(
        "kwok",
        f"--kubeconfig={kubeconfig}",
        f"--config={config}",
        "--manage-all-nodes=true",
        f"--cidr={POD_BLOCK.format(prefix=plane.block.prefix)}",
        f"--node-ip={plane.address}",
    )
    # Twice the room: a pod that ends still takes it.
    pool = NodePool("kwok", 2 * pods // PODS_PER_NODE + 1)
    for name in pool.node_names():
        status = node_status(pool, name, address=plane.address)
        for resources in (status["capacity"], status["allocatable"]):
            resources |= {"pods": str(PODS_PER_NODE), "cpu": "10000"}
        path = f"/api/v1/nodes/{name}"
        plane.client.create("/api/v1/nodes", node_manifest(pool, name))
        plane.client.patch(f"{path}/status", {"status": status})
        plane.client.patch(path, {"spec": {"taints": []}})


def start_pages(plane: BusyPlane) -> None:
    """Start the server of all metrics pages."""
    script = Path(__file__).with_name("metrics_pages.py")
    pages = Process(
        "metrics pages",
        [sys.executable, str(script), str(METRICS_PORT)],
        log=plane.directory / "pages.log",
        session=plane.session,
    )
    wait_for("the metrics pages", lambda: ask(plane.address, "/metrics"), timeout=120)
    assert pages.returncode is None, f"port {METRICS_PORT} is taken: {pages.tail()}"


def ask(address: str, path: str) -> bytes:
    """Ask the pages' server in the name of an address."""
    with urllib.request.urlopen(f"http://{address}:{METRICS_PORT}{path}", timeout=10) as answer:
        return answer.read()
