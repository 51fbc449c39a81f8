"""A real node: kubelet, containerd and runc, as root, on this machine.

All of it runs in pid and mount namespaces of its own, and /run, /var/lib and /var/log are its
own: when the first process of the node goes, however it goes, so do every container and every
mount, and nothing of another container runtime on this machine is touched. The network is the
machine's (see pod_network); kubelets do not share a machine well, so a lock keeps it to one node.

What differs from a node in a cluster: no DNS, no kube-proxy, no cgroups for quality of service.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from lingcluster import pod_network
from lingcluster.build import Programs
from lingcluster.client import has_condition, wait_for
from lingcluster.control_plane import Additions, ControlPlane
from lingcluster.processes import Process, Session

NAME = "real-0"
USER = f"system:node:{NAME}"
SANDBOX_IMAGE = "localhost/ling-sandbox:test"
_CLIENT = "kubelet-client"
_PORT = 10261  # not 10250, which a kubelet on this machine may have
_READY_SECONDS = 120.0
_CONTROLLERS = ("deployment-controller", "replicaset-controller", "node-lifecycle-controller")
_CGROUPS = Path("/sys/fs/cgroup")

# bash, since process 1 of the namespace must reap what the containers' shims leave behind.
_NODE = """
set -eu
for folder in /run /var/lib /var/log; do mount -t tmpfs tmpfs "$folder"; done
cd "$1"
containerd --config containerd.toml >containerd.log 2>&1 &
for _ in $(seq 600); do [ -S containerd.sock ] && break; sleep 0.1; done
kubelet --config=kubelet.yaml --kubeconfig=kubelet.kubeconfig --root-dir="$1/kubelet" \
  --cert-dir="$1/kubelet-pki" --hostname-override="$2" --node-ip="$3" >kubelet.log 2>&1 &
wait -n
"""


def additions(directory: Path) -> Additions:
    """Return what a control plane with this node has more.

    Args:
      directory: the control plane's; `let_in` writes a certificate there.
    """
    client = directory / _CLIENT
    return Additions(
        users={USER: "system:nodes"},
        controllers=_CONTROLLERS,
        addresses=(pod_network.API_SERVER,),
        api_server_flags=(
            "--authorization-mode=Node",  # beside RBAC
            f"--service-cluster-ip-range={pod_network.SERVICE_SUBNET}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={client / 'tls.crt'}",
            f"--kubelet-client-key={client / 'tls.key'}",
        ),
    )


def let_in(plane: ControlPlane) -> None:
    """Write the certificate that the API server shows to the kubelet; before it starts."""
    plane.authority.client(plane.directory / _CLIENT, user="kube-apiserver")


class RealNode:
    """Starts on `start`, ends on `stop` or with the session.

    Args:
      programs: the built programs.
      directory: for everything the node writes; its path must be short (it holds sockets).
      plane: the control plane, made with `additions`.
      session: owner of the processes.
    """

    def __init__(
        self, programs: Programs, directory: Path, plane: ControlPlane, session: Session
    ) -> None:
        self._programs = programs
        self._directory = directory
        self._plane = plane
        self._session = session
        self._node: Process | None = None
        self._cgroups: set[Path] = set()

    def start(self, images: Mapping[str, Path]) -> None:
        """Start the node with images; return when it is Ready.

        Args:
          images: name -> archive that calls it so. SANDBOX_IMAGE is one of them.

        Raises:
          NotReadyError: a program ended.
          TimeoutError: the node is not Ready.
        """
        self._cgroups = _cgroups()
        _favour_pods()
        self._write_configuration()
        folders = {str(self._programs[name].parent) for name in ("kubelet", "containerd")}
        path = os.pathsep.join([*sorted(folders), "/usr/sbin", "/usr/bin", "/sbin", "/bin"])
        self._node = Process(
            "node",
            [
                *("unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"),
                *("bash", "-c", _NODE, "node", self._directory, NAME, pod_network.GATEWAY),
            ],
            log=self._directory / "node.log",
            session=self._session,
            environment={"PATH": path, "HOME": str(self._directory)},
        )
        self._node.wait_ready(
            lambda: (self._directory / "containerd.sock").exists(), timeout=_READY_SECONDS
        )
        for archive in images.values():
            self._containerd("images", "import", str(archive))
        node = f"/api/v1/nodes/{NAME}"
        wait_for(
            "the node to be Ready",
            lambda: has_condition(self._plane.client.get(node), "Ready"),
            timeout=_READY_SECONDS,
            describe=self.logs,
        )

    def stop(self) -> None:
        """End the node with all its containers, and what it left in the kernel."""
        if self._node is not None:
            self._node.kill()
            self._node = None
        # Of containers that were killed with the node. The deepest first.
        for folder in sorted(_cgroups() - self._cgroups, reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def logs(self) -> str:
        """Return the ends of the programs' logs."""
        names = ("node.log", "containerd.log", "kubelet.log")
        files = [self._directory / name for name in names]
        return "\n".join(
            f"{file}:\n{file.read_text(errors='replace')[-4000:]}"
            for file in files
            if file.exists()
        )

    def _containerd(self, *arguments: str) -> None:
        socket = str(self._directory / "containerd.sock")
        command = [self._programs["ctr"], "--address", socket, "--namespace", "k8s.io"]
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            msg = (
                f"ctr {' '.join(arguments)}: exit {done.returncode}: {done.stderr}\n{self.logs()}"
            )
            raise RuntimeError(msg)

    def _write_configuration(self) -> None:
        folder = self._directory
        (folder / "cni").mkdir(parents=True)
        conflist = json.dumps(pod_network.cni_configuration())
        (folder / "cni" / "10-bridge.conflist").write_text(conflist)
        (folder / "containerd.toml").write_text(_CONTAINERD.replace("@DIRECTORY@", str(folder)))
        (folder / "resolv.conf").write_text("")
        kubelet = _kubelet_configuration(folder, self._plane.authority.certificate)
        (folder / "kubelet.yaml").write_text(yaml.safe_dump(kubelet))
        self._plane.identity(USER).write_kubeconfig(folder / "kubelet.kubeconfig")


_CONTAINERD = """
version = 3
root = "@DIRECTORY@/containerd-root"
state = "@DIRECTORY@/containerd-state"
[grpc]
  address = "@DIRECTORY@/containerd.sock"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "localhost/ling-sandbox:test"
[plugins.'io.containerd.cri.v1.runtime']
  # Where a score may not be lowered, every sandbox would die of runc's attempt.
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "@DIRECTORY@/cni"
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      SystemdCgroup = false
"""


def _kubelet_configuration(folder: Path, authority: Path) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{folder}/containerd.sock",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(authority)},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "address": pod_network.GATEWAY,
        "port": _PORT,
        "readOnlyPort": 0,
        "healthzPort": 0,
        "registerNode": True,
        "clusterDNS": [pod_network.DNS],
        "resolvConf": str(folder / "resolv.conf"),
        "podLogsDir": str(folder / "pod-logs"),
        "volumePluginDir": str(folder / "volume-plugins"),
        # A machine that runs tests is no node: swap, full disks and cgroups are as they are.
        "failSwapOn": False,
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "evictionHard": {
            "imagefs.available": "1%",
            "nodefs.available": "1%",
            "memory.available": "100Mi",
        },
        "syncFrequency": "10s",
    }


@contextlib.contextmanager
def only_node() -> Iterator[None]:
    """Wait until no other session of this machine has a node; hold it until leaving."""
    with (Path(tempfile.gettempdir()) / "ling-tpu-real-node.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _favour_pods() -> None:
    """Let pods run beside a busy machine: else all together weigh as one of its processes."""
    for shares in _CGROUPS.glob("cpu*/cpu.shares"):
        pods = shares.parent / "k8s.io"
        pods.mkdir(exist_ok=True)
        (pods / "cpu.shares").write_text("20480")


def _cgroups() -> set[Path]:
    """Return the cgroups of containerd's pods, of version 1 or 2."""
    roots: Sequence[Path] = [*_CGROUPS.glob("k8s.io"), *_CGROUPS.glob("*/k8s.io")]
    return {Path(folder) for root in roots for folder, _, _ in os.walk(root)}
