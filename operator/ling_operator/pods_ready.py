"""Do all pods of an attempt run, and what keeps the first that does not? Pure."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from ling_operator.api import Reason
from ling_operator.conditions import Truth
from ling_operator.views import PodView

_OVERDUE = timedelta(seconds=30)
"""A kubelet that is there kills a pod, and says so, within this of the end of its grace."""


def pods_ready(
    newest: tuple[PodView, ...], *, expected: int, now: datetime
) -> tuple[Truth, Reason, str]:
    """Return status, reason and message of PodsReady.

    Args:
      newest: the pods of the newest restart.
      expected: how many there are when all are.
      now: the time.
    """
    running = sum(p.phase == "Running" and p.ready and not p.deleting for p in newest)
    ended_well = sum(p.phase == "Succeeded" for p in newest)
    message = f"{running} of {expected} pods run."
    if running + ended_well >= expected:
        return "True", Reason.PODS_RUNNING, message
    why = hindrance(newest, now)
    return "False", Reason.PODS_PENDING if newest else Reason.NO_PODS, f"{message}{why}"


def hindrance(pods: Iterable[PodView], now: datetime) -> str:
    """Say what keeps the first pod, in global order, from running or from going; "" if nothing.

    The others of a slice are not even made before the first has its node.
    """
    for pod in sorted(pods, key=lambda p: (p.job_index, p.completion_index, p.name)):
        words = _stuck(pod, now) or pod.problem or _kept(pod)
        if words:
            return f" {pod.name}: {words}"
    return ""


def _stuck(pod: PodView, now: datetime) -> str:
    """Say that a pod should be gone: a node that is lost keeps it, and all that waits for it."""
    if not pod.live or pod.ends_by is None or now - pod.ends_by < _OVERDUE:
        return ""
    when = pod.ends_by.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"was to end by {when}; is its node {pod.host} lost?"


def _kept(pod: PodView) -> str:
    """Say that a pod goes on without its trainer: neither an end nor a restart comes of it."""
    if pod.exit_code is None or pod.phase != "Running" or pod.deleting:
        return ""
    return f"its trainer ended with {pod.exit_code}, but other containers of it still run."
