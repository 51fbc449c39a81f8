"""The workers and the scraper: whatever wakes a run, it is observed, reconciled and executed."""

import asyncio
import logging
import random
import time
from typing import Never

from ling_operator.caches import Caches
from ling_operator.cluster import Cluster
from ling_operator.reconcile import reconcile
from ling_operator.reflector import Key
from ling_operator.rest import ApiError
from ling_operator.scrape import ScrapeFailure, ScrapeSession, scrape
from ling_operator.scrape_jobs import ScrapeJob
from ling_operator.telemetry import Telemetry
from ling_operator.verdict import HealthSample, Heartbeat
from ling_operator.workqueue import WorkQueue

PASS_SECONDS = 120.0
RESYNC_SECONDS = 600.0
HEARTBEAT_SECONDS = 60.0
_CONFLICT_SECONDS = 0.2  # the watch is about to bring what we did not know
_TICK_SECONDS = 0.1
_SOON_SECONDS = 5.0

_log = logging.getLogger(__name__)


class Controller:
    """Brings every run of the caches to where its spec and its health say it should be."""

    def __init__(
        self, queue: WorkQueue[Key], caches: Caches, cluster: Cluster, telemetry: Telemetry
    ) -> None:
        self._queue = queue
        self._caches = caches
        self._cluster = cluster
        self._telemetry = telemetry
        self._stopping = False
        self._scraping: set[Key] = set()

    async def work(self) -> None:
        """Take one run after another until stopped."""
        while not self._stopping:
            key = await self._queue.get()
            try:
                await self._pass(key)
            finally:
                self._queue.done(key)

    async def stop(self, seconds: float) -> None:
        """Take no more runs, and give the passes in flight some seconds to end."""
        self._stopping = True
        until = time.monotonic() + seconds
        while self._queue.in_progress and time.monotonic() < until:
            await asyncio.sleep(_TICK_SECONDS)

    async def resync(self) -> Never:
        """Look at every run now and then, whether or not something woke it."""
        while True:
            await asyncio.sleep(RESYNC_SECONDS)
            for key in self._caches.runs.objects:
                self._queue.add(key)

    async def scrape(self, session: ScrapeSession) -> Never:
        """Read process 0 of every live run at its interval, and all hosts now and then."""
        due: dict[Key, float] = {}
        beats_due: dict[Key, float] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                now = time.monotonic()
                due = {key: when for key, when in due.items() if self._waits(key, when - now)}
                beats_due = {key: when for key, when in beats_due.items() if when > now}
                for key in self._caches.runs.objects.keys() - beats_due.keys():
                    jobs = self._caches.heartbeat_jobs(key, HEARTBEAT_SECONDS)
                    beats_due[key] = now + _apart(HEARTBEAT_SECONDS)
                    for job in jobs:
                        group.create_task(self._read_heartbeat(session, job))
                for key in self._caches.runs.objects.keys() - due.keys() - self._scraping:
                    job = self._caches.scrape_job(key)
                    if job is not None:
                        due[key] = now + _apart(job.interval_seconds)
                        self._scraping.add(key)  # or a trainer that is slow is asked ever more
                        group.create_task(self._scrape(session, job))
                await asyncio.sleep(_TICK_SECONDS)

    def _waits(self, key: Key, seconds: float) -> bool:
        """Tell whether a page is due in so many seconds still: its interval may be shorter now."""
        if seconds <= _SOON_SECONDS:
            return seconds > 0
        return seconds <= self._caches.scrape_seconds(key)

    async def _pass(self, key: Key) -> None:
        started = time.monotonic()
        self._telemetry.wait_seconds.observe(self._queue.waited_seconds(key))
        try:
            async with asyncio.timeout(PASS_SECONDS):
                result = await self._reconcile(key)
        except ApiError as error:
            result = self._refused(key, error)
        except Exception:
            # The top of an edge: one object's fault, ours or its own, must not stop the others.
            delay = self._queue.add_failed(key)
            _log.exception("pass failed", extra={"run": "/".join(key), "retry_seconds": delay})
            result = "error"
        self._telemetry.passes.labels(result).inc()
        self._telemetry.pass_seconds.observe(time.monotonic() - started)

    async def _reconcile(self, key: Key) -> str:
        observed = await self._cluster.observe(*key)
        if observed is None:
            self._queue.forget_failures(key)
            return "ok"
        plan = reconcile(observed)
        if plan.read_log is not None:  # what the plan does takes it away
            await self._cluster.read_log(key, plan.read_log)
            observed = await self._cluster.observe(*key) or observed
            plan = reconcile(observed)
        if plan.status.phase != observed.run.status.phase:
            change = {"phase": plan.status.phase, "before": observed.run.status.phase}
            _log.info("phase", extra={"run": "/".join(key)} | change)
        await self._cluster.execute(observed, plan)
        self._queue.forget_failures(key)
        if self._cluster.refusal(key) != observed.refusal:
            self._queue.add(key)
        if plan.requeue_after is not None:
            self._queue.add_after(key, plan.requeue_after.total_seconds())
        return "ok"

    def _refused(self, key: Key, error: ApiError) -> str:
        if error.is_conflict:
            # While a watch is dead its news does not come, so that this backs off as well.
            self._queue.add_failed(key, first_delay_seconds=_CONFLICT_SECONDS)
            return "conflict"
        delay = self._queue.add_failed(key)
        problem = {"run": "/".join(key), "error": str(error), "retry_seconds": delay}
        _log.warning("request refused", extra=problem)
        return "refused"

    async def _scrape(self, session: ScrapeSession, job: ScrapeJob) -> None:
        try:
            result = await scrape(session, job.target)
        finally:
            self._scraping.discard(job.key)
        failed = isinstance(result, ScrapeFailure)
        self._telemetry.scrapes.labels(result.reason if failed else "ok").inc()
        self._cluster.record(job.key, result)
        self._queue.add(job.key, urgent=isinstance(result, HealthSample) and result.is_nonfinite)

    async def _read_heartbeat(self, session: ScrapeSession, job: ScrapeJob) -> None:
        result = await scrape(session, job.target, again_soon=False)
        if isinstance(result, HealthSample) and result.heartbeat is not None:
            beat = Heartbeat(
                host=job.host,
                pod_uid=job.target.pod_uid,
                container=job.container,
                read_time=result.time,
                time=result.heartbeat,
            )
            self._cluster.record_heartbeat(job.key, beat)


def _apart(seconds: float) -> float:
    """Return a little less than an interval, so that runs read together drift apart."""
    return seconds * random.uniform(0.8, 1.0)  # noqa: S311 - no secret depends on it
