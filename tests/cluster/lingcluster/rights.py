"""The rights of a ClusterRole, one by one, and service accounts that have some of them."""

from __future__ import annotations

import copy
from pathlib import Path

from lingcluster.client import Identity, Manifest, load_manifests
from lingcluster.control_plane import ControlPlane

RBAC = "/apis/rbac.authorization.k8s.io/v1"

type Right = tuple[str, str, str]
"""API group, resource (with its subresource after a slash) and verb."""


def cluster_role(manifests: Path) -> Manifest:
    """Return the ClusterRole of the folder manifests/operator."""
    documents = load_manifests(manifests / "rbac.yaml")
    (role,) = (each for each in documents if each["kind"] == "ClusterRole")
    return role


def rights(role: Manifest) -> set[Right]:
    """Return every right of a role."""
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def without(role: Manifest, right: Right) -> list[Manifest]:
    """Return the rules of a role less one right."""
    less = copy.deepcopy(role)
    for rule in less["rules"]:
        if rule["apiGroups"] == [right[0]] and rule["resources"] == [right[1]]:
            rule["verbs"].remove(right[2])
    less["rules"] = [rule for rule in less["rules"] if rule["verbs"]]
    assert rights(less) == rights(role) - {right}
    return less["rules"]


def limited(control_plane: ControlPlane, namespace: str, role: Manifest) -> Identity:
    """Make a service account with a role of its own; return its identity."""
    client, name = control_plane.client, f"limited-{namespace}"
    client.create(f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": name}})
    client.create(f"{RBAC}/clusterroles", {"metadata": {"name": name}, "rules": role["rules"]})
    client.create(
        f"{RBAC}/clusterrolebindings",
        {
            "metadata": {"name": name},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": name,
            },
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        },
    )
    return control_plane.service_account(namespace, name)
