"""The API server's audit log: what is written to it, and reading it back."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLICY: dict[str, Any] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    # One record a request, when its answer is known; a watch's when it is opened as well.
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}


@dataclass(frozen=True)
class AuditRecord:
    """One answered request.

    Attributes:
      user: the authenticated user's name.
      verb: get, list, watch, create, update, patch, delete ...
      group: API group, "" for core.
      resource: plural, with the subresource after a slash.
      namespace: "" for cluster-scoped requests.
      name: "" for collections.
      code: HTTP status.
      uri: the request's path and query.
      user_agent: what the client calls itself.
    """

    user: str
    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    code: int
    uri: str
    user_agent: str


class AuditLog:
    """Reads the records that lie after a mark; the API server writes each before it answers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0

    def mark(self) -> AuditLog:
        """Return a view that holds only requests answered from now on."""
        view = AuditLog(self.path)
        view._start = self.path.stat().st_size
        return view

    def records(self, *, user: str | None = None, code: int | None = None) -> list[AuditRecord]:
        """Return the records, of one user and with one status where these are given."""
        with self.path.open("rb") as file:
            file.seek(self._start)
            lines = file.read().split(b"\n")[:-1]  # what follows the last newline is unfinished
        found = [_record(json.loads(line)) for line in lines]
        return [
            record
            for record in found
            if (user is None or record.user == user) and (code is None or record.code == code)
        ]

    def wait_for(self, *, user: str, timeout: float = 10.0) -> list[AuditRecord]:
        """Return the user's records once there are any.

        Raises:
          TimeoutError: there are none after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if found := self.records(user=user):
                return found
            time.sleep(0.1)
        raise TimeoutError(f"no request of {user} in {self.path} after {timeout:.0f} s")


def _record(event: dict[str, Any]) -> AuditRecord:
    target = event.get("objectRef") or {}
    resource = target.get("resource", "")
    if subresource := target.get("subresource"):
        resource = f"{resource}/{subresource}"
    return AuditRecord(
        user=event["user"].get("username", ""),
        verb=event["verb"],
        group=target.get("apiGroup", ""),
        resource=resource,
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        code=(event.get("responseStatus") or {}).get("code", 0),
        uri=event["requestURI"],
        user_agent=event.get("userAgent", ""),
    )
