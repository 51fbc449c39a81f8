"""The metrics page: an immutable snapshot, swapped as a whole, behind an HTTP server."""

import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ling_trainer import health_metrics
from ling_trainer.ends import ExitCode, end_run
from ling_trainer.health_metrics import Kind, Metric
from ling_trainer.progress import Progress

type Value = float | Mapping[tuple[str, ...], float]
"""One sample, or one for each combination of label values (run and run_namespace apart)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What runs where: the labels of every series, and those of ling_run_info."""

    run: str
    run_namespace: str
    pod_uid: str
    process: int
    processes: int
    attempt: int
    preset: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a page shows of one moment.

    Attributes:
      heartbeat: when the process last passed the end of a step or validation batch, or started.
      progress: of the run.
      target_steps: steps asked for.
      checkpoint_step: newest committed checkpoint; 0 while there is none.
      checkpoint_time: when that was seen, or when training began; 0 before.
      checkpoint_period: steps asked for between checkpoints; 0 where none are made.
      log: the last step's and the last evaluation's log keys; empty before the first of each,
        since a loss of 0 would be a lie.
    """

    heartbeat: float
    progress: Progress
    target_steps: int
    checkpoint_step: int
    checkpoint_time: float
    checkpoint_period: int
    log: Mapping[str, float]


class Exporter(Collector):
    """Serve the series of health_metrics: all of them in process 0, else every_process' alone.

    A scrape sees one snapshot, never the step of one and the loss of another.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._snapshot: Snapshot | None = None
        self._server: WSGIServer | None = None

    def publish(self, snapshot: Snapshot) -> None:
        """Show this snapshot from now on."""
        self._snapshot = snapshot

    def serve(self, *, address: str, port: int) -> str:
        """Answer GET /metrics in a daemon thread.

        Args:
          address: where to listen; an empty string is every address.
          port: 0 lets the system choose.

        Returns:
          The page's URL.

        Raises:
          EndRun: the port is taken (exit code 5), or the address is not this machine's (2).
        """
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, _ = start_http_server(port, address or "0.0.0.0", registry)  # noqa: S104
        except OSError as error:
            raise _cannot_listen(error, address, port) from error
        host = f"[{address}]" if ":" in address else address or "0.0.0.0"  # noqa: S104
        return f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop answering."""
        if self._server:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield the snapshot's series, in the order of health_metrics."""
        snapshot = self._snapshot
        if snapshot is None:
            return
        values = _values(snapshot, self._identity)
        common = (self._identity.run, self._identity.run_namespace)
        for metric in (*health_metrics.logged_in(snapshot.log), *health_metrics.ON_WIRE_ONLY):
            if self._identity.process != 0 and not metric.every_process:
                continue
            yield _family(metric, values[metric.name], common)


def _values(snapshot: Snapshot, identity: Identity) -> dict[str, Value]:
    """Return the value of each series by its name."""
    m, progress = health_metrics, snapshot.progress
    nonfinite = {(str(k), str(s)): float(n) for (k, s), n in progress.nonfinite_steps.items()}
    info = (
        identity.pod_uid,
        str(identity.process),
        str(identity.processes),
        str(identity.attempt),
        identity.preset,
        identity.version,
    )
    logged = {x.name: float(snapshot.log[str(x.log_key)]) for x in m.logged_in(snapshot.log)}
    return {
        **logged,
        m.STEP.name: progress.step,
        m.TARGET_STEPS.name: snapshot.target_steps,
        m.LAST_FINITE_STEP.name: progress.last_finite_step,
        m.LAST_NONFINITE_STEP.name: progress.last_nonfinite_step,
        m.LAST_STEP_TIMESTAMP.name: progress.last_step_time,
        m.LAST_FINITE_CHECKPOINT.name: snapshot.checkpoint_step,
        m.LAST_CHECKPOINT_TIMESTAMP.name: snapshot.checkpoint_time,
        m.CHECKPOINT_PERIOD.name: snapshot.checkpoint_period,
        m.CONSECUTIVE_MAX.name: progress.longest_nonfinite_row,
        m.NONFINITE_STEPS.name: nonfinite,
        m.STEPS.name: progress.steps_total,
        m.TOKENS.name: progress.tokens_total,
        m.EMPTY_STEPS.name: progress.empty_steps_total,
        m.HEARTBEAT.name: snapshot.heartbeat,
        m.RUN_INFO.name: {info: 1.0},
    }


def _family(
    metric: Metric, value: Value, common: tuple[str, ...]
) -> GaugeMetricFamily | CounterMetricFamily:
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=(*health_metrics.RUN_LABELS, *metric.labels))
    samples = value if isinstance(value, Mapping) else {(): value}
    for labels, sample in samples.items():
        family.add_metric((*common, *labels), sample)
    return family


def _cannot_listen(error: OSError, address: str, port: int) -> Exception:
    where = f"{address or 'every address'}, port {port}"
    if error.errno == errno.EADDRINUSE:
        return end_run(
            ExitCode.METRICS_PORT,
            "MetricsPortTaken",
            f"metrics.metrics_port: {where} is taken by another process; end it (`ss -ltnp "
            f"'sport = :{port}'` names it) or set metrics.metrics_port to a free port",
        )
    return end_run(
        ExitCode.CONFIGURATION,
        "InvalidConfig",
        f"metrics.metrics_port: cannot listen on {where}: {error.strerror}; correct POD_IP or "
        "metrics.metrics_port",
    )
