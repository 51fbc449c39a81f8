"""Kueue as a process: CRDs with their conversion webhook, role, configuration, webhooks by URL."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from lingcluster import installation
from lingcluster.build import Programs
from lingcluster.certificates import KeyPair
from lingcluster.client import KubeClient, Manifest, load_manifests
from lingcluster.processes import answers

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


def crds(programs: Programs, *, url: str, authority: Path) -> list[Manifest]:
    """Return Kueue's CustomResourceDefinitions, converted by the webhook at `url`."""
    folder = programs.assets["kueue"] / _COMPONENTS / "crd/bases"
    found: list[Manifest] = []
    for path in sorted(folder.glob("*.yaml")):
        for crd in load_manifests(path):
            if crd["spec"]["names"]["plural"] in _CONVERTED:
                crd["spec"]["conversion"] = {
                    "strategy": "Webhook",
                    "webhook": {
                        "clientConfig": installation.at(f"{url}/convert", authority),
                        "conversionReviewVersions": ["v1"],
                    },
                }
            found.append(crd)
    return found


def grant_role(programs: Programs, client: KubeClient) -> None:
    """Give USER the rights of Kueue's own roles, and no more."""
    role = programs.assets["kueue"] / _COMPONENTS / "rbac/role.yaml"
    installation.grant_cluster_role(client, USER, role)
    secrets = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "list", "watch"]}
    installation.grant_role(client, USER, NAMESPACE, [secrets])


def start(plane: ControlPlane) -> None:
    """Start Kueue and return when queues can be made; until then its kinds are only there.

    Raises:
      NotReadyError: it did not come up.
    """
    kubeconfig = plane.identity(USER).write_kubeconfig(plane.directory / "kueue.kubeconfig")
    plane.client.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    grant_role(plane.programs, plane.client)
    config, probe = plane.directory / "kueue.yaml", plane.ports["kueue-probe"]
    write_config(
        config,
        address=plane.address,
        webhook_port=plane.ports["kueue-webhook"],
        probe_port=probe,
        tls=plane.serving,
    )
    process = plane.run("kueue", f"--config={config}", f"--kubeconfig={kubeconfig}")
    process.wait_ready(lambda: answers(f"http://{plane.address}:{probe}/readyz"), timeout=60)
    register_webhooks(
        plane.programs, plane.client, url=plane.kueue_url, authority=plane.authority.certificate
    )


def write_config(
    path: Path, *, address: str, webhook_port: int, probe_port: int, tls: KeyPair
) -> None:
    """Write the controller's configuration file.

    Args:
      path: the file.
      address: where webhooks and probes listen.
      webhook_port: HTTPS.
      probe_port: HTTP.
      tls: the webhooks' certificate; its folder holds tls.crt and tls.key.
    """
    _METRICS_CERTIFICATES.mkdir(parents=True, exist_ok=True)
    for name in ("tls.crt", "tls.key"):
        shutil.copyfile(tls.certificate.parent / name, _METRICS_CERTIFICATES / name)
    config: Manifest = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {
            "host": address,
            "port": webhook_port,
            "certDir": str(tls.certificate.parent),
        },
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"{address}:{probe_port}"},
        "integrations": {"frameworks": ["batch/job", "jobset.x-k8s.io/jobset"]},
        "featureGates": {"VisibilityOnDemand": False},
    }
    path.write_text(json.dumps(config, indent=1))


def register_webhooks(
    programs: Programs, client: KubeClient, *, url: str, authority: Path
) -> None:
    """Register the webhooks of JobSets, Workloads and queues, as an installation does."""
    manifests = programs.assets["kueue"] / _COMPONENTS / "webhook/manifests.yaml"
    configurations = load_manifests(manifests)
    for each in configurations:
        each["webhooks"] = [w for w in each["webhooks"] if w["name"] in _WEBHOOKS]
    installation.register_webhooks(
        client, configurations, prefix="kueue", url=url, authority=authority
    )


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
