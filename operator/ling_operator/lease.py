"""Leader election by a coordination.k8s.io Lease: one replica acts, the others are ready to.

Whoever holds the Lease renews it; another replica takes it once it has not changed for its whole
duration by that replica's own clock, so clocks need not agree. The holder counts its right from
before the request that renewed it, and stops writing a while before anybody else may start: also
when it was frozen in between, since its clock went on.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ling_operator.rest import ApiError, JsonObject, RestClient

LEASE_SECONDS = 10.0
"""Another replica takes a Lease that did not change for this long."""
RENEW_SECONDS = 7.0
"""The holder writes for this long after its last renewal began."""
RETRY_SECONDS = 2.0
_MICROSECONDS = "%Y-%m-%dT%H:%M:%S.%fZ"

_log = logging.getLogger(__name__)


class LostLeaseError(Exception):
    """The Lease could not be renewed in time: this process must end, and start as a standby."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A state of the Lease, and when this process first saw it."""

    version: str
    at: float


def boot_seconds() -> float:
    """Return a clock that only moves on, while the machine sleeps too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaderLease:
    """Takes and keeps one Lease.

    Args:
      client: its requests are not held back by the Lease itself.
      namespace: of the Lease.
      name: of the Lease.
      identity: of this replica; no two may share one.
      clock: seconds; see boot_seconds.

    Attributes:
      acquired: set while this replica leads.
      refusal: what the API server says to the last try, None unless it refused.
    """

    def __init__(
        self,
        client: RestClient,
        *,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float] = boot_seconds,
    ) -> None:
        self.acquired = asyncio.Event()
        self.refusal: str | None = None
        self.identity = identity
        self._client = client
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = name
        self._clock = clock
        self._until = float("-inf")
        self._seen: _Seen | None = None

    @property
    def leading(self) -> bool:
        """Tell whether this replica may write at this moment."""
        return self._clock() < self._until

    async def run(self) -> None:
        """Try to take the Lease, then keep it.

        Raises:
          LostLeaseError: it was this replica's, and is no longer.
        """
        while True:
            started = self._clock()
            try:
                # Somebody else has it who did not wait: the Lease was deleted, or edited.
                mine = await self._try()
                self._until = started + RENEW_SECONDS if mine else float("-inf")
                self.refusal = None
            except ApiError as error:
                self.refusal = str(error) if error.is_refusal else None
                _log.warning("lease not renewed", extra={"error": str(error)})
            if self.leading and not self.acquired.is_set():
                _log.info("leading", extra={"identity": self.identity})
                self.acquired.set()
            elif self.acquired.is_set() and not self.leading:
                msg = f"the Lease was not renewed for {RENEW_SECONDS:g} s, or is another's now"
                raise LostLeaseError(msg)
            await asyncio.sleep(RETRY_SECONDS)

    async def release(self) -> None:
        """Give the Lease up, so that a standby need not wait; nothing may be written after."""
        if not self.leading:
            return
        self._until = float("-inf")
        try:
            lease = await self._client.get(self._path)
            if lease["spec"].get("holderIdentity") == self.identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                await self._client.put(self._path, lease)
        except ApiError as error:
            _log.warning("lease not released", extra={"error": str(error)})

    @property
    def _path(self) -> str:
        return f"{self._collection}/{self._name}"

    async def _try(self) -> bool:
        """Take or renew the Lease; False while it is another replica's.

        Raises:
          ApiError: no answer, or another replica was quicker.
        """
        try:
            lease = await self._client.get(self._path)
        except ApiError as error:
            if not error.is_not_found:
                raise
            body = {"metadata": {"name": self._name}, "spec": self._spec({})}
            await self._client.post(self._collection, _LEASE | body)
            return True
        spec: JsonObject = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder not in {"", self.identity} and not self._expired(lease, spec):
            return False
        # The resourceVersion makes the slower one of two replicas fail with 409.
        lease["spec"] = self._spec(spec)
        await self._client.put(self._path, lease)
        return True

    def _expired(self, lease: JsonObject, spec: JsonObject) -> bool:
        """Tell whether the Lease has stood still for its duration, by this process's clock."""
        version, now = lease["metadata"]["resourceVersion"], self._clock()
        if self._seen is None or self._seen.version != version:
            self._seen = _Seen(version, now)
        return now - self._seen.at > float(spec.get("leaseDurationSeconds") or LEASE_SECONDS)

    def _spec(self, old: JsonObject) -> dict[str, Any]:
        now = datetime.now(UTC).strftime(_MICROSECONDS)
        renewed = {
            **old,
            "holderIdentity": self.identity,
            "leaseDurationSeconds": int(LEASE_SECONDS),
            "renewTime": now,
        }
        if old.get("holderIdentity") == self.identity:
            return renewed
        transitions = int(old.get("leaseTransitions") or 0) + bool(old)
        return {**renewed, "acquireTime": now, "leaseTransitions": transitions}


_LEASE: JsonObject = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
