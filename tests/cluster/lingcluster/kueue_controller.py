"""Kueue as a process: its CRDs, which its webhook converts, its rights, and queues."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from lingcluster import installation
from lingcluster.client import KubeClient, Manifest, load_manifests

if TYPE_CHECKING:
    from lingcluster.control_plane import ControlPlane

USER = "kueue-controller"
NAMESPACE = "kueue-system"
QUEUES = "/apis/kueue.x-k8s.io/v1beta2"
_COMPONENTS = Path("config/components")
_WEBHOOKS = frozenset(
    f"{kind}{resource}.kb.io"
    for kind in "mv"
    for resource in ("jobset", "workload", "clusterqueue", "resourceflavor")
)
_CONVERTED = frozenset({
    "clusterqueues", "cohorts", "localqueues", "multikueueclusters", "workloads",
})  # fmt: skip
# Kueue insists on a certificate at this path, even with its metrics off.
_METRICS_CERTIFICATES = Path("/etc/kueue/metrics/certs")
_CONFIGURATION: Manifest = {
    "apiVersion": "config.kueue.x-k8s.io/v1beta2",
    "namespace": NAMESPACE,
    "integrations": {"frameworks": ["batch/job", "jobset.x-k8s.io/jobset"]},
    "featureGates": {"VisibilityOnDemand": False},
}


def crds(plane: ControlPlane) -> list[Manifest]:
    """Return Kueue's CustomResourceDefinitions, converted by its webhook."""
    folder = plane.programs.assets["kueue"] / _COMPONENTS / "crd/bases"
    convert = installation.at(f"{plane.webhook_url('kueue')}/convert", plane.authority.certificate)
    found: list[Manifest] = []
    for path in sorted(folder.glob("*.yaml")):
        for crd in load_manifests(path):
            if crd["spec"]["names"]["plural"] in _CONVERTED:
                crd["spec"]["conversion"] = {
                    "strategy": "Webhook",
                    "webhook": {
                        "clientConfig": convert,
                        "conversionReviewVersions": ["v1"],
                    },
                }
            found.append(crd)
    return found


def start(plane: ControlPlane) -> None:
    """Start Kueue and return when queues can be made; until then its kinds are only there.

    Raises:
      NotReadyError: it did not come up.
    """
    components = plane.programs.assets["kueue"] / _COMPONENTS
    plane.client.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    # The rights of Kueue's own roles, and no more.
    installation.grant_cluster_role(plane.client, USER, components / "rbac/role.yaml")
    secrets = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "list", "watch"]}
    installation.grant_role(plane.client, USER, NAMESPACE, [secrets])
    _METRICS_CERTIFICATES.mkdir(parents=True, exist_ok=True)
    for name in ("tls.crt", "tls.key"):
        shutil.copyfile(plane.serving.certificate.parent / name, _METRICS_CERTIFICATES / name)
    installation.start_controller(plane, "kueue", user=USER, config=_CONFIGURATION)
    webhooks = load_manifests(components / "webhook/manifests.yaml")
    for each in webhooks:
        each["webhooks"] = [w for w in each["webhooks"] if w["name"] in _WEBHOOKS]
    installation.register_webhooks(plane, "kueue", webhooks)


def make_queue(
    client: KubeClient, namespace: str, name: str, *, pods: int, chips: int = 0
) -> None:
    """Make a LocalQueue of a namespace with a ClusterQueue of its own: a quota of pods.

    Args:
      client: the administrator's.
      namespace: of the LocalQueue.
      name: of the LocalQueue; the ClusterQueue is called <namespace>-<name>.
      pods: how many may run at once.
      chips: of google.com/tpu that they may have; 0 admits no pod that asks for any.
    """
    quotas = {"pods": pods} | ({"google.com/tpu": chips} if chips else {})
    shared = f"{namespace}-{name}"
    flavor = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor"}
    client.apply(f"{QUEUES}/resourceflavors/any", flavor | {"metadata": {"name": "any"}})
    cluster_queue: Manifest = {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "ClusterQueue",
        "metadata": {"name": shared},
        "spec": {
            "namespaceSelector": {},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": [
                {
                    "coveredResources": list(quotas),
                    "flavors": [
                        {
                            "name": "any",
                            "resources": [
                                {"name": resource, "nominalQuota": quota}
                                for resource, quota in quotas.items()
                            ],
                        }
                    ],
                }
            ],
        },
    }
    client.apply(f"{QUEUES}/clusterqueues/{shared}", cluster_queue)
    local_queue: Manifest = {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "LocalQueue",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"clusterQueue": shared},
    }
    client.apply(f"{QUEUES}/namespaces/{namespace}/localqueues/{name}", local_queue)
