"""The operator's own metrics, and the two ports that show them and its health."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ling_operator.caches import Caches
from ling_operator.reflector import Key
from ling_operator.run_series import gauge, run_series
from ling_operator.workqueue import WorkQueue

# A watch is silent for 75 s and its retry pauses for 30 s at most; a pass is cut at 120 s.
LONGEST_SILENCE_SECONDS = 240.0
LONGEST_DEAFNESS_SECONDS = 600.0


class Telemetry:
    """Counts what the operator does, and reads the rest from queue and caches when asked."""

    def __init__(
        self,
        queue: WorkQueue[Key],
        caches: Caches,
        *,
        leading: Callable[[], bool] = lambda: True,
        lease_refusal: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._queue = queue
        self._caches = caches
        self._lease_refusal = lease_refusal
        self.registry = CollectorRegistry()
        self.passes = Counter(
            "ling_operator_reconcile",
            "Passes of reconcile by result: ok, conflict, refused or error.",
            ["result"],
            registry=self.registry,
        )
        self.pass_seconds = Histogram(
            "ling_operator_reconcile_seconds",
            "Seconds of a pass, requests included.",
            buckets=(0.001, 0.005, 0.02, 0.1, 0.25, 0.5, 1, 5, 30),
            registry=self.registry,
        )
        self.wait_seconds = Histogram(
            "ling_operator_queue_wait_seconds",
            "Seconds from a change, a page or a timer to the pass that looks at it.",
            buckets=(0.001, 0.005, 0.02, 0.1, 0.25, 0.5, 1, 5, 30),
            registry=self.registry,
        )
        self.scrapes = Counter(
            "ling_operator_scrapes",
            "Reads of trainers' metrics by result: ok or why not.",
            ["result"],
            registry=self.registry,
        )
        ProcessCollector(registry=self.registry)
        self.registry.register(_Snapshot(queue, caches, leading))
        self._working = False

    def workers_started(self) -> None:
        """From now on a queue that stands still is a fault."""
        self._working = True

    def not_ready(self) -> str | None:
        """Say which kinds are not listed yet, or no longer allowed; None when all are there.

        A release that needs a right which nobody gave it never gets ready: the roll-out stops
        at the old one, which still works. Of several namespaces all count, though the runs of
        those that are listed are looked after.
        """
        reflectors = self._caches.reflectors
        missing = [r for r in reflectors if not r.synced.is_set()]
        if missing:
            whys = (f"{r.name} ({r.problem})" if r.problem else r.name for r in missing)
            return f"not listed yet: {', '.join(whys)}"
        refused = [f"{r.name} ({r.refusal})" for r in reflectors if r.refusal is not None]
        lease = self._lease_refusal()
        refused += [f"the Lease ({lease})"] if lease is not None else []
        return f"refused: {', '.join(refused)}" if refused else None

    def not_alive(self) -> str | None:
        """Say what stands still; None while everything moves. The same of a standby.

        An API server that refuses is no reason to restart this process; a watch loop that has
        stopped trying, or a pass that never ends, is. One that is not heard of for ten minutes may
        be away, or it is this process: its authority's certificate has changed, say.
        """
        for reflector in self._caches.reflectors:
            if reflector.last_activity_age > LONGEST_SILENCE_SECONDS:
                return f"the watch of {reflector.name} does nothing"
            if reflector.last_answer_age > LONGEST_DEAFNESS_SECONDS:
                return f"no list, event, bookmark or refusal of {reflector.name} arrives"
        if self._working and self._queue.stalled_seconds > LONGEST_SILENCE_SECONDS:
            return "the workers do nothing"
        return None

    async def serve(self, stack: AsyncExitStack, *, metrics: str, probes: str) -> None:
        """Open the ports; they close with the stack.

        Args:
          stack: owns the servers from now on.
          metrics: HOST:PORT of /metrics; an empty host is every address, "0" opens nothing.
          probes: HOST:PORT of /healthz and /readyz.

        Raises:
          OSError: a port is taken.
        """
        pages: dict[str, Callable[[web.Request], Any]] = {"/metrics": self._metrics}
        await _listen(stack, metrics, pages)
        checks = {"/healthz": self.not_alive, "/readyz": self.not_ready}
        await _listen(stack, probes, {path: _probe(check) for path, check in checks.items()})

    async def _metrics(self, _: web.Request) -> web.Response:
        page = generate_latest(self.registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})


class _Snapshot(Collector):
    """Gauges of the moment. Series of a run live as long as its object: they are read from it.

    Only the leader has them: from two replicas an alert would fire twice.
    """

    def __init__(self, queue: WorkQueue[Key], caches: Caches, leading: Callable[[], bool]) -> None:
        self._queue = queue
        self._caches = caches
        self._leading = leading

    def describe(self) -> Iterable[Metric]:
        """Name nothing in advance, so that registering reads no cache."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        yield GaugeMetricFamily(
            "ling_operator_queue_depth", "Runs waiting for a worker.", value=len(self._queue)
        )
        yield GaugeMetricFamily(
            "ling_operator_queue_stalled_seconds",
            "How long a run has been looked at, or runs have waited without one being taken.",
            value=self._queue.stalled_seconds,
        )
        yield GaugeMetricFamily(
            "ling_operator_workers_busy", "Runs being looked at.", value=self._queue.in_progress
        )
        yield GaugeMetricFamily(
            "ling_operator_leading", "1 on the replica that acts.", value=float(self._leading())
        )
        yield from self._watches()
        if self._leading():
            yield from run_series(self._caches.runs.objects)

    def _watches(self) -> Iterator[Metric]:
        # Empty, which for Prometheus is absent, where one watch is of all namespaces.
        of = ["kind", "watched_namespace"]
        age = gauge(
            "ling_operator_watch_age_seconds", "Since the last list, event or bookmark.", of
        )
        relists = gauge("ling_operator_watch_lists", "Complete lists since the start.", of)
        objects = gauge("ling_operator_watch_objects", "Objects in the cache.", of)
        refused = gauge(
            "ling_operator_watch_refused",
            "1 while the API server refuses it; /readyz has its words.",
            of,
        )
        for reflector in self._caches.reflectors:
            labels = [reflector.kind, reflector.namespace or ""]
            age.add_metric(labels, reflector.last_event_age)
            relists.add_metric(labels, reflector.relists)
            objects.add_metric(labels, len(reflector.objects))
            refused.add_metric(labels, float(reflector.refusal is not None))
        yield from (age, relists, objects, refused)


def _probe(check: Callable[[], str | None]) -> Callable[[web.Request], Any]:
    async def answer(_: web.Request) -> web.Response:
        problem = check()
        return web.Response(text=problem or "ok", status=503 if problem else 200)

    return answer


async def _listen(
    stack: AsyncExitStack, address: str, pages: Mapping[str, Callable[[web.Request], Any]]
) -> None:
    if address == "0":
        return
    host, _, port = address.rpartition(":")
    app = web.Application()
    for path, page in pages.items():
        app.router.add_get(path, page)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, host.strip("[]") or None, int(port)).start()
