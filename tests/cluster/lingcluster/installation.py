"""What running any controller takes: rights for its user, a process, webhooks by URL."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lingcluster.client import KubeClient, Manifest, load_manifests
from lingcluster.processes import answers

if TYPE_CHECKING:
    from lingcluster.control_plane import ControlPlane

_GROUP = "rbac.authorization.k8s.io"
_RBAC = f"/apis/{_GROUP}/v1"
_ADMISSION = "/apis/admissionregistration.k8s.io/v1"


def grant_cluster_role(client: KubeClient, user: str, role_file: Path) -> None:
    """Give a user the rights of the ClusterRole in a file, under the user's name."""
    (role,) = load_manifests(role_file)
    role["metadata"]["name"] = user
    client.apply(f"{_RBAC}/clusterroles/{user}", role)
    client.apply(f"{_RBAC}/clusterrolebindings/{user}", _binding(user, "Cluster"))


def grant_role(client: KubeClient, user: str, namespace: str, rules: list[Manifest]) -> None:
    """Give a user rights in one namespace."""
    role = {"apiVersion": f"{_GROUP}/v1", "kind": "Role", "metadata": {"name": user}}
    own = f"{_RBAC}/namespaces/{namespace}"
    client.apply(f"{own}/roles/{user}", {**role, "rules": rules})
    client.apply(f"{own}/rolebindings/{user}", _binding(user, ""))


def start_controller(plane: ControlPlane, name: str, *, user: str, config: Manifest) -> None:
    """Start a controller and return when it is ready.

    Args:
      plane: has the ports NAME-webhook and NAME-probe.
      name: the program's.
      user: who it is to the API server.
      config: its apiVersion, and what it is told beside what every controller is.

    Raises:
      NotReadyError: it did not come up.
    """
    probe = f"{plane.address}:{plane.ports[f'{name}-probe']}"
    shared: Manifest = {
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        # Its own certificate management registers webhooks by Service, which leads nowhere here.
        "internalCertManagement": {"enable": False},
        "webhook": {
            "host": plane.address,
            "port": plane.ports[f"{name}-webhook"],
            "certDir": str(plane.serving.certificate.parent),
        },
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": probe},
    }
    path = plane.directory / f"{name}.yaml"
    path.write_text(json.dumps(shared | config, indent=1))
    kubeconfig = plane.identity(user).write_kubeconfig(plane.directory / f"{name}.kubeconfig")
    process = plane.run(name, f"--config={path}", f"--kubeconfig={kubeconfig}")
    process.wait_ready(lambda: answers(f"http://{probe}/readyz"), timeout=60)


def at(url: str, authority: Path) -> Manifest:
    """Return a webhook's clientConfig: its URL, trusted by the certificate in `authority`."""
    return {"url": url, "caBundle": base64.b64encode(authority.read_bytes()).decode()}


def register_webhooks(plane: ControlPlane, name: str, configurations: Iterable[Manifest]) -> None:
    """Register a controller's webhooks by its URL instead of by a Service.

    Args:
      plane: has the port NAME-webhook.
      name: the controller's, and the prefix of the configurations' names here.
      configurations: as an installation has them.
    """
    url = plane.webhook_url(name)
    for configuration in configurations:
        own = configuration["metadata"]["name"] = f"{name}-{configuration['metadata']['name']}"
        for webhook in configuration["webhooks"]:
            path = webhook["clientConfig"]["service"]["path"]
            webhook["clientConfig"] = at(url + path, plane.authority.certificate)
        collection = configuration["kind"].lower() + "s"
        plane.client.apply(f"{_ADMISSION}/{collection}/{own}", configuration)


def _binding(user: str, scope: str) -> Manifest:
    return {
        "apiVersion": f"{_GROUP}/v1",
        "kind": f"{scope}RoleBinding",
        "metadata": {"name": user},
        "roleRef": {"apiGroup": _GROUP, "kind": f"{scope}Role", "name": user},
        "subjects": [{"apiGroup": _GROUP, "kind": "User", "name": user}],
    }
