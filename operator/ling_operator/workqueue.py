"""Keys waiting for a worker: each at most once, never two workers on one, backoff per key."""

import asyncio
import itertools
import time
from collections.abc import Hashable

FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 300.0


class WorkQueue[K: Hashable]:
    """A deduplicating queue for one event loop.

    A key added while a worker has it becomes dirty, and is queued again when the worker is done.
    So no change is missed, and no two passes over one object overlap. Urgent keys go first: where
    the API server is slow, all others' progress must not delay what costs machines.
    """

    def __init__(
        self,
        *,
        first_delay_seconds: float = FIRST_DELAY_SECONDS,
        longest_delay_seconds: float = LONGEST_DELAY_SECONDS,
    ) -> None:
        self._first_delay_seconds = first_delay_seconds
        self._longest_delay_seconds = longest_delay_seconds
        self._ready: asyncio.PriorityQueue[tuple[bool, int, K]] = asyncio.PriorityQueue()
        self._order = itertools.count()
        self._waiting: set[K] = set()
        self._urgent: set[K] = set()
        self._dirty: dict[K, float] = {}  # when it was added
        self._in_progress: dict[K, float] = {}
        self._waited: dict[K, float] = {}
        self._last_turn = time.monotonic()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}

    def __len__(self) -> int:
        """Count the keys that wait for a worker now, delayed ones not included."""
        return len(self._waiting)

    @property
    def in_progress(self) -> int:
        """How many keys workers hold."""
        return len(self._in_progress)

    @property
    def stalled_seconds(self) -> float:
        """How long a key has been held, or keys have waited without one being taken; else 0."""
        now = time.monotonic()
        held = now - min(self._in_progress.values(), default=now)
        waited = now - self._last_turn if len(self) else 0.0
        return max(held, waited)

    def add(self, key: K, *, urgent: bool = False) -> None:
        """Queue a key; nothing happens if it waits already, but that an urgent one moves on."""
        if urgent and key not in self._urgent:
            self._urgent.add(key)
            if key in self._waiting:
                self._put(key)  # where it stood before, it is passed over
        if key in self._dirty:
            return
        self._dirty[key] = time.monotonic()
        if key not in self._in_progress:
            self._enqueue(key)

    def add_after(self, key: K, seconds: float) -> None:
        """Queue a key later; of several delays of one key the earliest counts."""
        if seconds <= 0:
            self.add(key)
            return
        loop = asyncio.get_running_loop()
        when = loop.time() + seconds
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= when:
                return
            timer.cancel()
        self._timers[key] = loop.call_at(when, self._expire, key)

    def add_failed(self, key: K, *, first_delay_seconds: float | None = None) -> float:
        """Queue a key again after a failed pass; each failure in a row doubles the delay.

        Args:
          key: to queue.
          first_delay_seconds: where it is not the queue's own.

        Returns: The delay in seconds.
        """
        first = self._first_delay_seconds if first_delay_seconds is None else first_delay_seconds
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        # The exponent is bounded: 2.0 ** 1024 overflows after a day of failures.
        delay = min(first * 2.0 ** min(failures, 30), self._longest_delay_seconds)
        self.add_after(key, delay)
        return delay

    def forget_failures(self, key: K) -> None:
        """Start the key's backoff afresh, after a pass that succeeded."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """Wait for a key and take it; call done() with it afterwards.

        A delay that the key had is dropped: the pass that begins says anew when to look again.
        """
        key = (await self._ready.get())[-1]
        while key not in self._waiting:
            key = (await self._ready.get())[-1]
        self._waiting.discard(key)
        self._urgent.discard(key)
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        now = self._last_turn = self._in_progress[key] = time.monotonic()
        self._waited[key] = now - self._dirty.pop(key)
        return key

    def waited_seconds(self, key: K) -> float:
        """Return how long a key that a worker holds had waited for its turn."""
        return self._waited.get(key, 0.0)

    def done(self, key: K) -> None:
        """Give a key back; it is queued again if it was added meanwhile."""
        self._in_progress.pop(key, None)
        self._waited.pop(key, None)
        if key in self._dirty:
            self._enqueue(key)

    def close(self) -> None:
        """Drop every delayed key."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _enqueue(self, key: K) -> None:
        if not len(self):
            self._last_turn = time.monotonic()
        self._waiting.add(key)
        self._put(key)

    def _put(self, key: K) -> None:
        self._ready.put_nowait((key not in self._urgent, next(self._order), key))

    def _expire(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)
