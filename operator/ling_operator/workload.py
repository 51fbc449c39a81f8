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
      version: its resourceVersion.
    """

    name: str
    uid: str
    owner: str
    owner_uid: str
    active: bool
    admitted: bool
    message: str
    version: str = ""


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
        version=str(metadata.get("resourceVersion", "")),
        message=_why_waiting(conditions, _list(status.get("admissionChecks"))),
    )


def _why_waiting(conditions: Mapping[str, Raw], checks: Sequence[Raw]) -> str:
    """Return why there is no admission: an eviction, no quota, or a check of those that follow.

    With its quota a Workload may still wait, for machines that are being provisioned for it.
    """
    evicted, quota = (_map(conditions.get(kind)) for kind in ("Evicted", "QuotaReserved"))
    if _true(evicted):
        return str(evicted.get("message", ""))
    if not _true(quota):
        return str(quota.get("message", ""))
    open_checks = (check for check in checks if check.get("state") != "Ready")
    return next(map(_of_check, open_checks), "")


def _of_check(check: Raw) -> str:
    said = f"The quota is reserved; admission check {check.get('name')} is {check.get('state')}"
    return f"{said}: {check['message']}" if check.get("message") else f"{said}."


def _true(condition: Raw | None) -> bool:
    return condition is not None and condition.get("status") == "True"


def _map(value: Any) -> Raw:
    return cast("Raw", value) if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Raw]:
    items = cast("Sequence[Any]", value) if isinstance(value, Sequence) else ()
    return [_map(item) for item in items]
