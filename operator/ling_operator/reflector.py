"""A cache of one kind of object that survives silence, expiry and restarts of the API server."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ling_operator.rest import ApiError, JsonObject, RestClient, WatchIdleError

type Key = tuple[str, str]
"""Namespace and name."""

PAGE = 500
WATCH_SECONDS = (240.0, 300.0)
FIRST_BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 30.0
_HTTP_GONE = 410
_SETTLED_SECONDS = 10.0
_REFUSAL_SECONDS = 2.0  # an API server that starts refuses too, until it has read the roles

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change[T]:
    """What happened to an object: its new state, or its last one if it is deleted."""

    key: Key
    object: T
    deleted: bool


class Reflector[T]:
    """Lists, then watches, for ever; `objects` is what the API server last said.

    A deletion that happened while no watch was open is found by the next list and reported like
    any other. Of each object only its view is kept: what decisions read, a tenth of the whole.

    Args:
      path: of the collection; a function is asked before each list, and may raise ApiError.
      on_synced: called once, when `synced` is set.

    Attributes:
      kind: for logs and metrics, such as 'pods'.
      namespace: that the collection is of; None for all.
      synced: set after the first complete list.
      relists: number of complete lists.
      problem: why there is no watch at this moment, None while there is one.
    """

    def __init__(
        self,
        client: RestClient,
        path: str | Callable[[], Awaitable[str]],
        *,
        kind: str,
        namespace: str | None,
        view: Callable[[JsonObject], T],
        on_change: Callable[[Change[T]], None],
        on_synced: Callable[[], None] = lambda: None,
        label_selector: str | None = None,
        watch_seconds: tuple[float, float] = WATCH_SECONDS,
    ) -> None:
        self.kind = kind
        self.namespace = namespace
        self.synced = asyncio.Event()
        self.relists = 0
        self._client = client
        self._path = path if isinstance(path, str) else ""
        self._find_path = None if isinstance(path, str) else path
        self._view = view
        self._on_change = on_change
        self._on_synced = on_synced
        self._selection = {"labelSelector": label_selector} if label_selector else {}
        self._watch_seconds = watch_seconds
        self._objects: dict[Key, T] = {}
        self._resource_version: str | None = None
        self._backoff = FIRST_BACKOFF_SECONDS
        self._last_event = self._last_answer = self._last_activity = time.monotonic()
        self.problem: str | None = None
        self._last_logged: str | None = None
        self._refused_since: float | None = None

    @property
    def name(self) -> str:
        """What is watched, for people: the kind, and where if not everywhere."""
        return f"{self.kind} in {self.namespace}" if self.namespace is not None else self.kind

    @property
    def objects(self) -> Mapping[Key, T]:
        """The cache, read-only."""
        return MappingProxyType(self._objects)

    @property
    def last_event_age(self) -> float:
        """Seconds since a list, an event or a bookmark arrived: how old the cache may be."""
        return time.monotonic() - self._last_event

    @property
    def last_answer_age(self) -> float:
        """Seconds since the API server said anything, a refusal included."""
        return time.monotonic() - max(self._last_event, self._last_answer)

    @property
    def last_activity_age(self) -> float:
        """Seconds since anything happened, failed attempts included: is the loop itself alive?"""
        return time.monotonic() - self._last_activity

    @property
    def refusal(self) -> str | None:
        """What the API server says to our lists and watches, once it has refused for a while."""
        since = self._refused_since
        lasting = since is not None and time.monotonic() - since >= _REFUSAL_SECONDS
        return self.problem if lasting else None

    async def run(self) -> None:
        """Keep the cache current until cancelled; errors are logged and retried."""
        while True:
            started = time.monotonic()
            try:
                if self._resource_version is None:
                    await self._list()
                await self._watch()
                settled = time.monotonic() - started > _SETTLED_SECONDS
                problem = None if settled else "the watch ended at once"
                self._backoff = FIRST_BACKOFF_SECONDS if settled else self._backoff
            except WatchIdleError as error:
                # A watch from a resource version that the server never had (an etcd restored from
                # a backup) is silent for ever, so only a new list helps.
                self._resource_version = None
                problem = str(error)
            except ApiError as error:
                if error.status is not None:
                    self._last_answer = time.monotonic()
                    if not error.is_overload:
                        self._resource_version = None
                if error.is_refusal and not error.is_expired and self._refused_since is None:
                    self._refused_since = time.monotonic()
                if error.is_not_found:
                    # The kind is not installed yet, so there are none. Later a 404 proves
                    # nothing: taking it for deletions would cancel every run.
                    self._mark_synced()
                problem = str(error)
            self._last_activity = time.monotonic()
            if problem is not None:
                await self._pause(problem)

    async def _pause(self, problem: str) -> None:
        if problem != self._last_logged:
            where = {"kind": self.kind, "error": problem, "namespace": self.namespace}
            _log.warning("watch interrupted", extra=where)
        self.problem = self._last_logged = problem
        # Jitter, so that a thousand watches do not return in step; no secret depends on it.
        await asyncio.sleep(self._backoff * random.uniform(0.5, 1.0))  # noqa: S311
        self._backoff = min(self._backoff * 2, LONGEST_BACKOFF_SECONDS)

    async def _list(self) -> None:
        """Read every page, then replace the cache and report what changed."""
        if self._find_path is not None:
            self._path = await self._find_path()
        found: dict[Key, T] = {}
        page: dict[str, str] = {}
        while True:
            answer = await self._client.get(self._path, **self._selection, **page, limit=str(PAGE))
            for item in answer.get("items") or ():
                found[_key(item)] = self._view(item)
            token = answer["metadata"].get("continue")
            if not token:
                break
            page = {"continue": token}
        gone = {key: item for key, item in self._objects.items() if key not in found}
        self._objects = found
        self._resource_version = answer["metadata"]["resourceVersion"]
        self.relists += 1
        self._mark_event()
        what = {"kind": self.kind, "objects": len(found), "namespace": self.namespace}
        _log.info("listed", extra=what)
        for key, item in gone.items():
            self._on_change(Change(key=key, object=item, deleted=True))
        for key, item in found.items():
            self._on_change(Change(key=key, object=item, deleted=False))
        self._mark_synced()

    async def _watch(self) -> None:
        """Follow events until the server closes the stream.

        Raises:
          ApiError: refused, broken or expired.
          WatchIdleError: silence.
        """
        low, high = self._watch_seconds
        seconds = random.uniform(low, high)  # noqa: S311 - see _pause
        events = self._client.watch(
            self._path,
            on_open=self._opened,
            **self._selection,
            watch="true",
            allowWatchBookmarks="true",
            resourceVersion=self._resource_version or "",
            timeoutSeconds=str(max(1, int(seconds))),
        )
        async for event in events:
            kind, item = event["type"], event["object"]
            if kind == "ERROR":
                raise _stream_error(item)
            self._resource_version = item["metadata"]["resourceVersion"]
            self._mark_event()
            self._backoff = FIRST_BACKOFF_SECONDS
            self._last_logged = None
            if kind != "BOOKMARK":
                self._apply(_key(item), self._view(item), deleted=kind == "DELETED")

    def _apply(self, key: Key, item: T, *, deleted: bool) -> None:
        if deleted:
            self._objects.pop(key, None)
        else:
            self._objects[key] = item
        self._on_change(Change(key=key, object=item, deleted=deleted))

    def _opened(self) -> None:
        self.problem = self._refused_since = None

    def _mark_synced(self) -> None:
        if not self.synced.is_set():
            self.synced.set()
            self._on_synced()

    def _mark_event(self) -> None:
        self._last_event = self._last_activity = time.monotonic()


def _key(item: JsonObject) -> Key:
    metadata = item["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _stream_error(status: JsonObject) -> ApiError:
    """Read an ERROR event: an expired watch is HTTP 200 with one of these, code 410."""
    return ApiError(
        status=int(status.get("code") or _HTTP_GONE),
        reason=str(status.get("reason", "")),
        message=str(status.get("message", "the watch failed")),
    )
