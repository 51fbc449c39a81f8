"""A watch that only records: every change of a collection, in the API server's order."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass

from lingcluster.client import Identity, Manifest, wait_for

ENDED = frozenset({"Succeeded", "Failed"})
"""Phases of a pod whose processes are gone."""


@dataclass(frozen=True)
class Change:
    """One event of a watch.

    Attributes:
      time: when it arrived, in seconds since the epoch.
      type: ADDED, MODIFIED or DELETED; what was there at the start counts as ADDED.
      object: the object after the change.
    """

    time: float
    type: str
    object: Manifest


class Recording:
    """Record the changes of a collection from a thread, between entering and leaving.

    Args:
      identity: who asks.
      path: the collection's.
    """

    def __init__(self, identity: Identity, path: str) -> None:
        self.changes: list[Change] = []
        self._path = path
        self._headers = {"Authorization": f"Bearer {identity.token}"}
        parts = urllib.parse.urlsplit(identity.server)
        assert parts.hostname is not None
        context = ssl.create_default_context(cafile=str(identity.certificate_authority))
        self._connect = functools.partial(
            http.client.HTTPSConnection, parts.hostname, parts.port, context=context
        )
        self._connection = self._connect()
        self._thread = threading.Thread(target=self._read, name=f"watch {path}", daemon=True)

    def __enter__(self) -> Recording:
        self._connection.request("GET", f"{self._path}?watch=true", headers=self._headers)
        self._socket = self._connection.sock
        self._response = self._connection.getresponse()
        assert self._response.status == 200, self._response.read()
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.catch_up()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._response.close()
        self._connection.close()

    def catch_up(self) -> None:
        """Wait until all that a list shows now is recorded: a watch lags behind other answers.

        Raises:
          TimeoutError: it is not within the usual time.
        """
        known = {change.object["metadata"]["uid"] for change in list(self.changes)}
        connection = self._connect()
        try:
            connection.request("GET", self._path, headers=self._headers)
            listed = {
                item["metadata"]["uid"]: int(item["metadata"]["resourceVersion"])
                for item in json.load(connection.getresponse())["items"]
            }
        finally:
            connection.close()

        def recorded() -> bool:
            seen = {change.object["metadata"]["uid"]: change for change in list(self.changes)}
            gone = known - listed.keys()
            return all(seen[uid].type == "DELETED" for uid in gone) and all(
                uid in seen and int(seen[uid].object["metadata"]["resourceVersion"]) >= version
                for uid, version in listed.items()
            )

        wait_for(f"the watch of {self._path} to catch up", recorded)

    def _read(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            while line := self._response.readline():
                event = json.loads(line)
                self.changes.append(Change(time.time(), event["type"], event["object"]))


def first_time(changes: list[Change], holds: Callable[[Manifest], object]) -> float:
    """Return when an object first was as `holds` wants it, in seconds since the epoch.

    Raises:
      StopIteration: none ever was.
    """
    return next(change.time for change in changes if holds(change.object))


def terminations(changes: list[Change]) -> dict[str, Manifest]:
    """Return how the first container of each pod ended, by the pod's name in order of creation.

    A pod that had not ended when it was last seen maps to an empty state.
    """
    ends: dict[str, Manifest] = {}
    for change in changes:
        statuses = change.object["status"].get("containerStatuses") or [{}]
        ended = statuses[0].get("state", {}).get("terminated")
        name = change.object["metadata"]["name"]
        ends[name] = ended or ends.get(name, {})
    return ends


def alive_together(changes: list[Change], label: str) -> set[frozenset[str]]:
    """Return every set of a label's values that had a live pod at one moment.

    Moments are the API server's own: the order of a watch is that of the writes.
    """
    live: dict[str, str] = {}
    moments: set[frozenset[str]] = set()
    for change in changes:
        metadata = change.object["metadata"]
        if change.type == "DELETED" or change.object["status"].get("phase") in ENDED:
            live.pop(metadata["uid"], None)
        else:
            live[metadata["uid"]] = metadata["labels"][label]
        moments.add(frozenset(live.values()))
    return moments
