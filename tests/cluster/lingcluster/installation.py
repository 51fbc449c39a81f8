"""What installing any controller takes: rights for its user, webhooks registered by URL."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path

from lingcluster.client import KubeClient, Manifest, load_manifests

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


def at(url: str, authority: Path) -> Manifest:
    """Return a webhook's clientConfig: its URL, trusted by the certificate in `authority`."""
    return {"url": url, "caBundle": base64.b64encode(authority.read_bytes()).decode()}


def register_webhooks(
    client: KubeClient,
    configurations: Iterable[Manifest],
    *,
    prefix: str,
    url: str,
    authority: Path,
) -> None:
    """Register webhook configurations at `url` instead of at a Service.

    Args:
      client: the administrator's.
      configurations: as an installation has them.
      prefix: of their names here.
      url: without a path.
      authority: certificate that signed the webhooks'.
    """
    for configuration in configurations:
        name = f"{prefix}-{configuration['metadata']['name']}"
        configuration["metadata"]["name"] = name
        for webhook in configuration["webhooks"]:
            path = webhook["clientConfig"]["service"]["path"]
            webhook["clientConfig"] = at(url + path, authority)
        collection = configuration["kind"].lower() + "s"
        client.apply(f"{_ADMISSION}/{collection}/{name}", configuration)


def _binding(user: str, scope: str) -> Manifest:
    return {
        "apiVersion": f"{_GROUP}/v1",
        "kind": f"{scope}RoleBinding",
        "metadata": {"name": user},
        "roleRef": {"apiGroup": _GROUP, "kind": f"{scope}Role", "name": user},
        "subjects": [{"apiGroup": _GROUP, "kind": "User", "name": user}],
    }
