"""Conditions: set and find; a transition time changes only when the status does."""

from datetime import datetime
from typing import Literal

from ling_operator.api import Condition, ConditionType
from ling_operator.bounded_text import printable

type Conditions = tuple[Condition, ...]
type Truth = Literal["True", "False", "Unknown"]

_MESSAGE_LENGTH = 1024  # a page, a trainer or an API server may have said some of it


def find(conditions: Conditions, kind: ConditionType) -> Condition | None:
    """Return the condition of a type, None if it was never set."""
    return next((c for c in conditions if c.type == kind), None)


def holds(conditions: Conditions, kind: ConditionType) -> bool:
    """Tell whether the condition is set and True."""
    found = find(conditions, kind)
    return found is not None and found.status == "True"


def has_reason(conditions: Conditions, kind: ConditionType, *reasons: str) -> bool:
    """Tell whether the condition is set for one of these reasons."""
    found = find(conditions, kind)
    return found is not None and found.reason in reasons


def set_condition(
    conditions: Conditions,
    kind: ConditionType,
    status: Truth,
    *,
    reason: str,
    message: str = "",
    generation: int,
    now: datetime,
) -> Conditions:
    """Return the conditions with one set; its place is kept, a new one goes to the end."""
    old = find(conditions, kind)
    since = old.last_transition_time if old is not None and old.status == status else now
    new = Condition(
        type=kind,
        status=status,
        reason=reason,
        message=printable(message)[:_MESSAGE_LENGTH],
        observed_generation=generation,
        last_transition_time=since,
    )
    if old is None:
        return (*conditions, new)
    return tuple(new if c.type == kind else c for c in conditions)
