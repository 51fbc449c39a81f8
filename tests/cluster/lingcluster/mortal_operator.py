"""An operator that is killed at a chosen request and comes back, as a Deployment's pod does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from lingcluster.api_proxy import Dropped, Exchange, Moment
from lingcluster.operator_process import OperatorProcess


@dataclass(frozen=True)
class KillPoint:
    """Where an operator dies.

    Attributes:
      number: of the write, from 1, counted from when the point was set.
      moment: before the API server gets it, or after it has answered and before it is known.
    """

    number: int
    moment: Moment


class MortalOperator:
    """A gate of the operator's proxy; starts the operator, kills it with SIGKILL, starts it again.

    Args:
      start: starts an operator and does not wait for it.

    Attributes:
      died_at: what the operator was about, at each death.
    """

    def __init__(self, start: Callable[[], OperatorProcess]) -> None:
        self.died_at: list[str] = []
        self._start = start
        self._operator = start()
        self._lock = threading.Lock()
        self._point: KillPoint | None = None
        self._writes: list[Exchange] = []

    def die_at(self, point: KillPoint | None) -> None:
        """Set the next point, None for none; writes are counted from now on."""
        with self._lock:
            self._point, self._writes = point, []

    def writes(self) -> list[str]:
        """Return what was written since die_at, in order."""
        with self._lock:
            return [named(each) for each in self._writes]

    def __call__(self, exchange: Exchange, moment: Moment) -> None:
        """Let an exchange pass, unless the operator dies of it.

        Raises:
          Dropped: it did.
        """
        if not exchange.writes:
            return
        with self._lock:
            if moment == "before":
                self._writes.append(exchange)
            known = next((i for i, each in enumerate(self._writes) if each is exchange), None)
            if known is None or self._point != KillPoint(known + 1, moment):
                return
            self._point = None
            self._operator.kill()
            self.died_at.append(f"{moment} {named(exchange)}")
            self._operator = self._start()
        raise Dropped

    def wait_until_ready(self) -> None:
        """Return once the caches of the operator that lives now are filled."""
        self._operator.wait_until_ready()

    def stop(self) -> int:
        """Stop it for good; return its exit code."""
        return self._operator.stop()


def named(exchange: Exchange) -> str:
    """Say what a write does, the same words for the same step of any run."""
    body = exchange.body or {}
    what = f"{exchange.method} {exchange.resource}"
    match exchange.resource, exchange.method:
        case "trainingruns/status", _:
            status = body["status"]
            conditions = status.get("conditions") or []
            last = max((each["lastTransitionTime"] for each in conditions), default="")
            newest = [each for each in conditions if each["lastTransitionTime"] == last]
            said = ", ".join(f"{each['type']}={each['status']}" for each in newest)
            return f"{what} {status['phase']} ({said})"
        case "events", _:
            return f"{what} {body['reason']}"
        case _, "PATCH":
            return f"{what} {body['spec']}"
    return what
