"""The few fields of a Kueue Workload that decisions rest on. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

type Raw = Mapping[str, Any]

KUEUE_GROUP = "kueue.x-k8s.io"
QUEUE_LABEL = f"{KUEUE_GROUP}/queue-name"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadView:
    """One Workload: what Kueue makes of a JobSet in a queue, and decides about.

    Attributes:
      owner: name of the JobSet that it stands for; "" for another kind's.
      owner_uid: that JobSet's uid; the name alone may be an earlier one's.
      active: False stops the JobSet and frees its quota until it is True again.
      admitted: it has its quota, and its pods may run.
      message: why it is not admitted, in Kueue's words.
    """

    name: str
    uid: str
    owner: str
    owner_uid: str
    active: bool
    admitted: bool
    message: str


def view_workload(raw: Raw) -> WorkloadView:
    """Read a Workload of any API version that has had conditions."""
    metadata, spec, status = (_map(raw.get(key)) for key in ("metadata", "spec", "status"))
    owners = [o for o in _list(metadata.get("ownerReferences")) if o.get("kind") == "JobSet"]
    owner: Raw = owners[0] if owners else {}
    conditions = {str(c.get("type")): c for c in _list(status.get("conditions"))}
    return WorkloadView(
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        owner=str(owner.get("name", "")),
        owner_uid=str(owner.get("uid", "")),
        active=spec.get("active") is not False,
        admitted=_true(conditions.get("Admitted")),
        message=_why_waiting(conditions),
    )


def _why_waiting(conditions: Mapping[str, Raw]) -> str:
    """Return the message of the eviction, else of the quota that is not there."""
    evicted, quota = conditions.get("Evicted"), conditions.get("QuotaReserved")
    for condition in (evicted if _true(evicted) else None, quota):
        if condition is not None and not (condition is quota and _true(quota)):
            return str(condition.get("message", ""))
    return ""


def _true(condition: Raw | None) -> bool:
    return condition is not None and condition.get("status") == "True"


def _map(value: Any) -> Raw:
    return cast("Raw", value) if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Raw]:
    items = cast("Sequence[Any]", value) if isinstance(value, Sequence) else ()
    return [_map(item) for item in items]
