"""Manifests for tests of the control plane itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lingcluster.client import Manifest

SHELL_IMAGE = "shell"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2"

# As XPK writes it: what is not in the list of restartable codes fails the JobSet for good.
FAIL_ON_FINAL_CODES: Manifest = {
    "rules": [
        {
            "action": "FailJob",
            "onPodConditions": [],
            "onExitCodes": {"operator": "NotIn", "values": [42, *range(127, 256)]},
        },
    ]
}


def container(
    script: str, *, environment: Sequence[Manifest] = (), **fields: Any
) -> dict[str, Any]:
    """Return a container that runs a shell script as its process 1."""
    return {
        "name": "main",
        "image": SHELL_IMAGE,
        "command": ["sh", "-c", script],
        "env": list(environment),
        **fields,
    }


def from_field(name: str, path: str) -> Manifest:
    """Return a variable with a downward API field's value."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def pod(
    name: str, script: str | Mapping[str, Any], *, grace: int = 5, **spec: Any
) -> dict[str, Any]:
    """Return a bare pod of one container, given as a script or as a container."""
    main = container(script) if isinstance(script, str) else dict(script)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": grace,
            "containers": [main],
            **spec,
        },
    }


def jobset(
    name: str,
    script: str | Mapping[str, Any],
    *,
    hosts: int = 2,
    grace: int = 5,
    max_restarts: int | None = None,
    fail_on_final_codes: bool = False,
) -> dict[str, Any]:
    """Return a JobSet of one replicated Job `w` with `hosts` pods."""
    main = container(script) if isinstance(script, str) else dict(script)
    job: dict[str, Any] = {
        "parallelism": hosts,
        "completions": hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": grace,
                "containers": [main],
            }
        },
    }
    spec: dict[str, Any] = {"replicatedJobs": [{"name": "w", "template": {"spec": job}}]}
    if fail_on_final_codes:
        job["podFailurePolicy"] = FAIL_ON_FINAL_CODES
    if max_restarts is not None:
        spec["failurePolicy"] = {
            "maxRestarts": max_restarts,
            "rules": [
                {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
            ],
        }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": spec,
    }
