"""The transitions that people are told about, read off the status. Pure.

They are planned anew in every pass while they are young, so that an operator that dies between
the status write and the event does not lose it; the name makes each of them one event.
"""

from datetime import datetime, timedelta
from typing import Literal

from ling_operator.api import Condition, ConditionType, Reason, TrainingRunStatus
from ling_operator.conditions import holds
from ling_operator.plan import Event

EVENT_AGE = timedelta(minutes=50)
"""The API server forgets events after an hour: an older one would appear a second time."""

type Kind = Literal["Normal", "Warning"]

_TOLD: dict[tuple[str, str], Kind] = {
    (ConditionType.CREATED, "True"): "Normal",
    (ConditionType.CREATED, "False"): "Warning",
    (ConditionType.PODS_READY, "True"): "Normal",
    (ConditionType.METRICS_AVAILABLE, "False"): "Warning",
    (ConditionType.HEALTHY, "False"): "Warning",
    (ConditionType.PERMITTED, "False"): "Warning",
    (ConditionType.SUSPENDED, "True"): "Normal",
    (ConditionType.HALTED, "True"): "Warning",
    (ConditionType.COMPLETE, "True"): "Normal",
    (ConditionType.FAILED, "True"): "Warning",
}
_SILENT = {Reason.CREATING, Reason.NOT_STARTED, Reason.WAITING_FOR_PREVIOUS}


def events_of(status: TrainingRunStatus, now: datetime) -> tuple[Event, ...]:
    """Return the events of the transitions younger than EVENT_AGE."""
    events = [_event(status, condition) for condition in status.conditions]
    events += [
        Event(
            type="Warning",
            reason=alert.reason,
            message=alert.message,
            attempt=status.attempt,
            time=alert.since,
        )
        for alert in status.health.alerts
    ]
    if status.stop is not None and status.stop.override_time is not None:
        events.append(
            Event(
                type="Warning",
                reason=Reason.HALT_OVERRIDDEN,
                message="The JobSet was un-suspended by somebody and is suspended again; "
                "raise spec.attempt to go on.",
                attempt=status.attempt,
                time=status.stop.override_time,
            )
        )
    return tuple(e for e in events if e is not None and now - e.time < EVENT_AGE)


def _event(status: TrainingRunStatus, condition: Condition) -> Event | None:
    kind = _TOLD.get((condition.type, condition.status))
    halted = holds(status.conditions, ConditionType.HALTED)
    if kind is None or condition.reason in _SILENT:
        return None
    alerts = {alert.reason for alert in status.health.alerts}
    if condition.type == ConditionType.HEALTHY and (halted or condition.reason in alerts):
        return None  # told by Halted, for the same reason, or as an alert
    return Event(
        type=kind,
        reason=condition.reason,
        message=condition.message,
        attempt=status.attempt,
        time=condition.last_transition_time,
    )
