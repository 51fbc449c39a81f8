"""JobSet's controller as a process: CRD, role, configuration, and webhooks registered by URL."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from lingcluster.build import Programs
from lingcluster.certificates import KeyPair
from lingcluster.client import KubeClient, Manifest, load_manifests

USER = "jobset-controller"
_COMPONENTS = Path("config/components")
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_ADMISSION = "/apis/admissionregistration.k8s.io/v1"


def crd_files(programs: Programs) -> list[Path]:
    """Return JobSet's CustomResourceDefinitions."""
    return sorted((programs.assets["jobset"] / _COMPONENTS / "crd/bases").glob("*.yaml"))


def grant_role(programs: Programs, client: KubeClient) -> None:
    """Give USER the rights of JobSet's own role, and no more."""
    (role,) = load_manifests(programs.assets["jobset"] / _COMPONENTS / "rbac/role.yaml")
    role["metadata"]["name"] = USER
    client.apply(f"{_RBAC}/clusterroles/{USER}", role)
    binding: Manifest = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": USER},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": USER,
        },
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": USER}],
    }
    client.apply(f"{_RBAC}/clusterrolebindings/{USER}", binding)


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
    config: Manifest = {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        # Its own certificate management registers webhooks by Service, which leads nowhere here.
        "internalCertManagement": {"enable": False},
        "webhook": {
            "host": address,
            "port": webhook_port,
            "certDir": str(tls.certificate.parent),
        },
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"{address}:{probe_port}"},
    }
    path.write_text(json.dumps(config, indent=1))


def register_webhooks(
    programs: Programs, client: KubeClient, *, url: str, authority: Path
) -> None:
    """Register JobSet's webhooks at `url`, trusted by the certificate in `authority`."""
    bundle = base64.b64encode(authority.read_bytes()).decode()
    manifests = programs.assets["jobset"] / _COMPONENTS / "webhook/manifests.yaml"
    for configuration in load_manifests(manifests):
        name = f"jobset-{configuration['metadata']['name']}"
        configuration["metadata"]["name"] = name
        for webhook in configuration["webhooks"]:
            path = webhook["clientConfig"]["service"]["path"]
            webhook["clientConfig"] = {"url": url + path, "caBundle": bundle}
            if "pods" in webhook["rules"][0]["resources"]:
                # As JobSet's own installation does: other pods do not depend on its controller.
                webhook["objectSelector"] = {
                    "matchExpressions": [
                        {"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}
                    ]
                }
        collection = configuration["kind"].lower() + "s"
        client.apply(f"{_ADMISSION}/{collection}/{name}", configuration)
