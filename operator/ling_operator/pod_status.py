"""A pod's status: how its trainer ended, why it does not run, whether it was taken away. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

type Raw = Mapping[str, Any]

DIVERGED_EXIT_CODE = 90
FINAL_EXIT_CODES = (2, 3, 4, 5, DIVERGED_EXIT_CODE)
RESTART_EXIT_CODES = (42, 134, 139, 143)
"""139 is 134 of a container's process 1, for which the kernel ignores SIGABRT."""
_BEING_SET_UP = frozenset({None, "PodInitializing", "ContainerCreating"})
_NODE_PRESSURE = "Evicted"
_NOTHING: Raw = {}


def gravest_end(states: Sequence[Raw]) -> Raw:
    """Return the end that says most; nothing while the others may still say more than a 0 does."""
    ends = [_map(state, "terminated") for state in states]
    bad = [end for end in ends if end.get("exitCode")]
    if bad:
        return min(bad, key=lambda end: _gravity(end["exitCode"]))
    return ends[0] if ends and all(ends) else {}


def problem_of(status: Raw) -> str:
    """Say why a pod does not run, as the scheduler or the kubelet does; "" without a reason.

    That it is being set up is none.
    """
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        return _words(scheduled)
    init = _containers(status, "initContainerStatuses")
    for _, state in (*init, *_containers(status, "containerStatuses")):
        waiting = _map(state, "waiting")
        if waiting.get("reason") not in _BEING_SET_UP:
            return _words(waiting)
    for name, state in init:
        code = _map(state, "terminated").get("exitCode")
        if code:
            return f"init container {name} ended with {code}"
    return _words(status)


def is_disrupted(status: Raw) -> bool:
    """Tell whether a pod was taken away: preempted, drained, its node lost.

    By a node that is short of memory or disk it was not: that may be the trainer's own doing.
    """
    disruption = _condition(status, "DisruptionTarget")
    return disruption.get("status") == "True" and status.get("reason") != _NODE_PRESSURE


def _condition(status: Raw, kind: str) -> Raw:
    conditions: Sequence[Raw] = status.get("conditions") or ()
    found = (each for each in conditions if each.get("type") == kind)
    return next(found, _NOTHING)


def _containers(status: Raw, key: str) -> list[tuple[str, Raw]]:
    """Return the name and the state of each container."""
    statuses: Sequence[Raw] = status.get(key) or ()
    return [(str(each.get("name")), _map(each, "state")) for each in statuses]


def _map(raw: Raw, key: str) -> Raw:
    return raw.get(key) or _NOTHING


def _words(said: Raw) -> str:
    """Join a reason and its message, of which either may be missing."""
    return ": ".join(str(said[key]) for key in ("reason", "message") if said.get(key))


def _gravity(exit_code: int) -> int:
    codes = (DIVERGED_EXIT_CODE, *FINAL_EXIT_CODES)
    if exit_code in codes:
        return codes.index(exit_code)
    # Of a broken collective one process dies by itself, and the others of its death.
    return len(codes) + (exit_code in RESTART_EXIT_CODES)
