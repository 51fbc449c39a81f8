"""A pod's status from the states of its containers, as a kubelet reports it. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lingcluster.client import Manifest
from lingcluster.pod_spec import PodAddresses

type Phase = Literal["Pending", "Running", "Succeeded", "Failed"]


@dataclass(frozen=True)
class Waiting:
    """Not started, or between two starts."""

    reason: str
    message: str = ""

    def manifest(self) -> Manifest:
        """Return the API's ContainerState."""
        waiting = {"reason": self.reason}
        return {"waiting": {**waiting, "message": self.message} if self.message else waiting}


@dataclass(frozen=True)
class Running:
    """Its process lives."""

    started_at: str

    def manifest(self) -> Manifest:
        """Return the API's ContainerState."""
        return {"running": {"startedAt": self.started_at}}


@dataclass(frozen=True)
class Terminated:
    """Its process ended."""

    exit_code: int
    started_at: str
    finished_at: str
    message: str
    container_id: str
    reason: str = ""

    def manifest(self) -> Manifest:
        """Return the API's ContainerState."""
        state: Manifest = {
            "exitCode": self.exit_code,
            "reason": self.reason or ("Completed" if self.exit_code == 0 else "Error"),
            "startedAt": self.started_at,
            "finishedAt": self.finished_at,
            "containerID": self.container_id,
        }
        return {"terminated": {**state, "message": self.message} if self.message else state}


type ContainerState = Waiting | Running | Terminated


@dataclass
class ContainerRecord:
    """What a kubelet knows of one container."""

    name: str
    image: str
    state: ContainerState = field(default_factory=lambda: Waiting("ContainerCreating"))
    last_termination: Terminated | None = None
    restart_count: int = 0

    def manifest(self) -> Manifest:
        """Return the API's ContainerStatus."""
        running = isinstance(self.state, Running)
        status: Manifest = {
            "name": self.name,
            "image": self.image,
            "imageID": self.image,
            "ready": running,
            "started": running,
            "restartCount": self.restart_count,
            "state": self.state.manifest(),
        }
        if self.last_termination is not None:
            status["lastState"] = self.last_termination.manifest()
        return status


def now() -> str:
    """Return the time as the API writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def phase(
    containers: Sequence[ContainerRecord],
    init_containers: Sequence[ContainerRecord] = (),
    *,
    over: bool,
) -> Phase:
    """Return the phase.

    Args:
      containers: the pod's containers.
      init_containers: while they run the pod is Pending; one that failed fails it.
      over: nothing of the pod runs, and nothing of it will be started again.
    """
    if over:
        succeeded = all(
            isinstance(each.state, Terminated) and each.state.exit_code == 0
            for each in (*init_containers, *containers)
        )
        return "Succeeded" if succeeded else "Failed"
    ran = any(
        isinstance(each.state, Running | Terminated) or each.last_termination is not None
        for each in containers
    )
    return "Running" if ran else "Pending"


def conditions(
    pod_phase: Phase, containers: Sequence[ContainerRecord], before: Mapping[str, Manifest]
) -> list[Manifest]:
    """Return the kubelet's own conditions; those of others are not among them.

    Args:
      pod_phase: the new phase.
      containers: the pod's containers.
      before: type -> condition as last reported; an unchanged status keeps its time.
    """
    over = pod_phase in ("Succeeded", "Failed")
    ready = not over and all(isinstance(each.state, Running) for each in containers)
    why = (
        ""
        if ready
        else {"Succeeded": "PodCompleted", "Failed": "PodFailed"}.get(
            pod_phase, "ContainersNotReady"
        )
    )
    return [
        _condition("PodReadyToStartContainers", not over, "", before),
        _condition("Initialized", pod_phase != "Pending", "", before),
        _condition("Ready", ready, why, before),
        _condition("ContainersReady", ready, why, before),
    ]


def _condition(kind: str, holds: bool, reason: str, before: Mapping[str, Manifest]) -> Manifest:
    status = "True" if holds else "False"
    old = before.get(kind)
    unchanged = old is not None and old["status"] == status
    condition: Manifest = {
        "type": kind,
        "status": status,
        "lastTransitionTime": old["lastTransitionTime"] if old and unchanged else now(),
    }
    return {**condition, "reason": reason} if reason else condition


def pod_status(
    pod_phase: Phase,
    *,
    containers: Sequence[ContainerRecord],
    init_containers: Sequence[ContainerRecord],
    addresses: PodAddresses,
    started_at: str,
    before: Mapping[str, Manifest],
) -> Manifest:
    """Return the fields of status that a kubelet owns."""
    status: Manifest = {
        "phase": pod_phase,
        "hostIP": addresses.node,
        "hostIPs": [{"ip": addresses.node}],
        "podIP": addresses.public,
        "podIPs": [{"ip": addresses.public}],
        "startTime": started_at,
        "conditions": conditions(pod_phase, containers, before),
        "containerStatuses": [each.manifest() for each in containers],
    }
    if init_containers:
        status["initContainerStatuses"] = [each.manifest() for each in init_containers]
    return status
