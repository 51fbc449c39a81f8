"""The Node objects of the process kubelet: pools labelled and tainted as on GKE."""

from __future__ import annotations

from dataclasses import dataclass, field

from lingcluster.client import Manifest
from lingcluster.log_server import PORT as LOG_PORT
from lingcluster.pod_status import now

TPU_RESOURCE = "google.com/tpu"
_TPU_TAINT = {"key": TPU_RESOURCE, "value": "present", "effect": "NoSchedule"}


@dataclass(frozen=True)
class NodePool:
    """Nodes that are alike.

    Attributes:
      name: value of the node pool label; nodes are NAME-0, NAME-1 ...
      size: how many.
      labels: beside those that every node has.
      tpu_chips: per node; a pool with chips is tainted, so only pods that ask for them land there.
    """

    name: str
    size: int
    labels: dict[str, str] = field(default_factory=dict[str, str])
    tpu_chips: int = 0

    def node_names(self) -> list[str]:
        """Return the names of the pool's nodes."""
        return [f"{self.name}-{index}" for index in range(self.size)]


def tpu_pool(name: str, *, accelerator: str, topology: str, hosts: int, chips: int) -> NodePool:
    """Return one slice's node pool, `chips` on each of its `hosts`."""
    labels = {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    return NodePool(name, hosts, labels, chips)


DEFAULT_POOLS = (
    NodePool("cpu", 4),
    tpu_pool("v6e-a", accelerator="tpu-v6e-slice", topology="4x4", hosts=4, chips=4),
    tpu_pool("v6e-b", accelerator="tpu-v6e-slice", topology="4x4", hosts=4, chips=4),
    tpu_pool("tpu7x-a", accelerator="tpu7x", topology="2x2x2", hosts=2, chips=4),
)


def node_manifest(pool: NodePool, name: str) -> Manifest:
    """Return the Node object without its status."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                "cloud.google.com/gke-nodepool": pool.name,
                **pool.labels,
            },
        },
        "spec": {"taints": taints(pool)},
    }


def taints(pool: NodePool) -> list[Manifest]:
    """Return the taints of a ready node (a new one is tainted not-ready by admission)."""
    return [dict(_TPU_TAINT)] if pool.tpu_chips else []


def node_status(pool: NodePool, name: str, *, address: str) -> Manifest:
    """Return the status of a ready node, far larger than this machine."""
    resources = {"cpu": "208", "memory": "400Gi", "ephemeral-storage": "100Gi", "pods": "110"}
    if pool.tpu_chips:
        resources[TPU_RESOURCE] = str(pool.tpu_chips)
    return {
        "capacity": resources,
        "allocatable": resources,
        "addresses": [
            {"type": "InternalIP", "address": address},
            {"type": "Hostname", "address": name},
        ],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": LOG_PORT}},
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "ProcessKubelet",
                "message": "pods run as local processes",
                "lastHeartbeatTime": now(),
                "lastTransitionTime": now(),
            }
        ],
        "nodeInfo": {
            "architecture": "amd64",
            "bootID": "",
            "containerRuntimeVersion": "process://1",
            "kernelVersion": "",
            "kubeProxyVersion": "",
            "kubeletVersion": "v1.36.3",
            "machineID": "",
            "operatingSystem": "linux",
            "osImage": "process kubelet",
            "systemUUID": "",
        },
    }
