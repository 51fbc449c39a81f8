"""JobSet's controller as a process: CRD, role, configuration and webhooks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lingcluster import installation
from lingcluster.build import Programs
from lingcluster.client import load_manifests

if TYPE_CHECKING:
    from lingcluster.control_plane import ControlPlane

USER = "jobset-controller"
_COMPONENTS = Path("config/components")


def crd_files(programs: Programs) -> list[Path]:
    """Return JobSet's CustomResourceDefinitions."""
    return sorted((programs.assets["jobset"] / _COMPONENTS / "crd/bases").glob("*.yaml"))


def start(plane: ControlPlane) -> None:
    """Start JobSet's controller, its kind being there; return when JobSets can be made.

    Raises:
      NotReadyError: it did not come up.
    """
    components = plane.programs.assets["jobset"] / _COMPONENTS
    # The rights of JobSet's own role, and no more.
    installation.grant_cluster_role(plane.client, USER, components / "rbac/role.yaml")
    config = {"apiVersion": "config.jobset.x-k8s.io/v1alpha1"}
    installation.start_controller(plane, "jobset", user=USER, config=config)
    webhooks = load_manifests(components / "webhook/manifests.yaml")
    for webhook in (w for each in webhooks for w in each["webhooks"]):
        if "pods" in webhook["rules"][0]["resources"]:
            # As JobSet's own installation does: other pods do not depend on its controller.
            webhook["objectSelector"] = {
                "matchExpressions": [
                    {"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}
                ]
            }
    installation.register_webhooks(plane, "jobset", webhooks)
