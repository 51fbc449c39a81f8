"""JobSet's controller as a process: CRD, role, configuration, and webhooks registered by URL."""

from __future__ import annotations

import json
from pathlib import Path

from lingcluster import installation
from lingcluster.build import Programs
from lingcluster.certificates import KeyPair
from lingcluster.client import KubeClient, Manifest, load_manifests

USER = "jobset-controller"
_COMPONENTS = Path("config/components")


def crd_files(programs: Programs) -> list[Path]:
    """Return JobSet's CustomResourceDefinitions."""
    return sorted((programs.assets["jobset"] / _COMPONENTS / "crd/bases").glob("*.yaml"))


def grant_role(programs: Programs, client: KubeClient) -> None:
    """Give USER the rights of JobSet's own role, and no more."""
    role = programs.assets["jobset"] / _COMPONENTS / "rbac/role.yaml"
    installation.grant_cluster_role(client, USER, role)


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
    manifests = programs.assets["jobset"] / _COMPONENTS / "webhook/manifests.yaml"
    configurations = load_manifests(manifests)
    for webhook in (w for each in configurations for w in each["webhooks"]):
        if "pods" in webhook["rules"][0]["resources"]:
            # As JobSet's own installation does: other pods do not depend on its controller.
            webhook["objectSelector"] = {
                "matchExpressions": [
                    {"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}
                ]
            }
    installation.register_webhooks(
        client, configurations, prefix="jobset", url=url, authority=authority
    )
