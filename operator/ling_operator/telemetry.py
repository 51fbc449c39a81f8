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

from ling_operator.api import ENDED, ConditionType, Reason
from ling_operator.caches import Caches
from ling_operator.conditions import has_reason
from ling_operator.reflector import Key
from ling_operator.workqueue import WorkQueue
from ling_trainer.health_metrics import RUN_LABELS

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
        at the old one, which still works.
        """
        reflectors = self._caches.reflectors
        missing = [r for r in reflectors if not r.synced.is_set()]
        if missing:
            whys = (f"{r.kind} ({r.problem})" if r.problem else r.kind for r in missing)
            return f"not listed yet: {', '.join(whys)}"
        refused = [f"{r.kind} ({r.refusal})" for r in reflectors if r.refusal is not None]
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
                return f"the watch of {reflector.kind} does nothing"
            if reflector.last_answer_age > LONGEST_DEAFNESS_SECONDS:
                return f"no list, event, bookmark or refusal of {reflector.kind} arrives"
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
            yield from self._runs()
            yield from self._attempts()

    def _watches(self) -> Iterator[Metric]:
        age = _gauge(
            "ling_operator_watch_age_seconds", "Since the last list, event or bookmark.", ["kind"]
        )
        relists = _gauge("ling_operator_watch_lists", "Complete lists since the start.", ["kind"])
        objects = _gauge("ling_operator_watch_objects", "Objects in the cache.", ["kind"])
        refused = _gauge(
            "ling_operator_watch_refused",
            "1 while the API server refuses it; /readyz has its words.",
            ["kind"],
        )
        for reflector in self._caches.reflectors:
            labels = [reflector.kind]
            age.add_metric(labels, reflector.last_event_age)
            relists.add_metric(labels, reflector.relists)
            objects.add_metric(labels, len(reflector.objects))
            refused.add_metric(labels, float(reflector.refusal is not None))
        yield from (age, relists, objects, refused)

    def _runs(self) -> Iterator[Metric]:
        phase = _gauge("ling_run_phase", "1; the phase is a label.", [*RUN_LABELS, "phase"])
        halted = _gauge("ling_run_halted", "1 if the run was stopped as diverged.", RUN_LABELS)
        time = _gauge(
            "ling_run_halted_timestamp_seconds",
            "When and why the run was stopped; absent while it was not.",
            [*RUN_LABELS, "reason"],
        )
        alert = _gauge(
            "ling_run_alert",
            "1 while a health rule with action Alert holds, or held within five minutes.",
            [*RUN_LABELS, "reason"],
        )
        for (namespace, name), view in self._caches.runs.objects.items():
            if view.run is None:
                continue
            status, halt = view.run.status, view.run.status.halt
            phase.add_metric([name, namespace, status.phase], 1)
            halted.add_metric([name, namespace], float(halt is not None))
            if halt is not None:
                time.add_metric([name, namespace, halt.reason], halt.time.timestamp())
            for held in () if status.phase in ENDED else status.health.alerts:
                alert.add_metric([name, namespace, held.reason], 1)
        yield from (phase, halted, time, alert)

    def _attempts(self) -> Iterator[Metric]:
        attempt = _gauge("ling_run_attempt", "Attempt that the run is at.", RUN_LABELS)
        began = _gauge(
            "ling_run_attempt_start_timestamp_seconds", "When that attempt began.", RUN_LABELS
        )
        restarts = _gauge("ling_run_restarts", "Restarts of that attempt.", RUN_LABELS)
        saved = _gauge(
            "ling_run_last_finite_checkpoint_step",
            "Step of the newest checkpoint without a NaN; absent before the first.",
            RUN_LABELS,
        )
        permitted = _gauge(
            "ling_run_permitted",
            "0 while the API server refuses what the run needs; see its condition Permitted.",
            RUN_LABELS,
        )
        for (namespace, name), view in self._caches.runs.objects.items():
            if view.run is None:
                continue
            status = view.run.status
            attempt.add_metric([name, namespace], status.attempt)
            restarts.add_metric([name, namespace], status.restarts)
            refused = has_reason(status.conditions, ConditionType.PERMITTED, Reason.REFUSED)
            permitted.add_metric([name, namespace], float(not refused))
            if status.last_finite_checkpoint is not None:
                saved.add_metric([name, namespace], status.last_finite_checkpoint)
            for newest in status.attempts[-1:]:
                began.add_metric([name, namespace], newest.start_time.timestamp())
        yield from (attempt, began, restarts, saved, permitted)


def _gauge(name: str, text: str, labels: Iterable[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=list(labels))


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
