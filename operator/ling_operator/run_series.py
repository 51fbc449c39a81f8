"""Series of each run, read off its object: they are finite, and go with it. Pure.

What is absent means "not so", or "not known": an alert never rests on the absence of one of them
to be silent.
"""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from ling_operator.api import ConditionType, Phase, Reason, TrainingRun, TrainingRunStatus
from ling_operator.conditions import find, has_reason, holds
from ling_operator.liveness import stall_patience
from ling_operator.run_view import RunView
from ling_trainer.health_metrics import RUN_LABELS

_WITH_PODS = frozenset({Phase.STARTING, Phase.RUNNING, Phase.RESTARTING})


def run_series(views: Mapping[tuple[str, str], RunView]) -> Iterator[Metric]:
    """Yield all families, with the samples of each run that can be read.

    Args:
      views: by namespace and name.
    """
    runs = {(name, space): v.run for (space, name), v in views.items() if v.run is not None}
    yield from _phases(runs)
    yield from _rules(runs)
    yield from _attempts(runs)


type _Runs = Mapping[tuple[str, str], TrainingRun]
"""By the values of RUN_LABELS."""


def _phases(runs: _Runs) -> Iterator[Metric]:
    phase = gauge("ling_run_phase", "1; the phase is a label.", [*RUN_LABELS, "phase"])
    halted = gauge("ling_run_halted", "1 if a health rule or the trainer halted it.", RUN_LABELS)
    time = gauge(
        "ling_run_halted_timestamp_seconds",
        "When and why the run was stopped; absent while it was not.",
        [*RUN_LABELS, "reason"],
    )
    for labels, run in runs.items():
        halt = run.status.halt
        phase.add_metric([*labels, run.status.phase], 1)
        halted.add_metric(labels, float(halt is not None))
        if halt is not None:
            time.add_metric([*labels, halt.reason], halt.time.timestamp())
    yield from (phase, halted, time)


def _rules(runs: _Runs) -> Iterator[Metric]:
    alert = gauge(
        "ling_run_alert",
        "1 while a health rule with action Alert holds, or held within five minutes; only while "
        "the run is Starting, Running or Restarting.",
        [*RUN_LABELS, "reason"],
    )
    ignored = gauge(
        "ling_run_rule_ignored",
        "1 for each health rule with action Ignore; its alerts are silent for the run.",
        [*RUN_LABELS, "rule"],
    )
    patience = gauge(
        "ling_run_stall_patience_seconds",
        "How long spec.health.stall lets the run be silent at present; absent while the operator "
        "reads no page.",
        RUN_LABELS,
    )
    for labels, run in runs.items():
        policy, status = run.spec.health, run.status
        for rule in policy.ignored:
            ignored.add_metric([*labels, rule], 1)
        if status.phase not in _WITH_PODS:
            continue
        for reason in _alert_reasons(status):
            alert.add_metric([*labels, reason], 1)
        if holds(status.conditions, ConditionType.METRICS_AVAILABLE):
            seconds = stall_patience(status.health, policy).total_seconds()
            patience.add_metric(labels, seconds)
    yield from (alert, ignored, patience)


def _alert_reasons(status: TrainingRunStatus) -> Iterator[str]:
    """Yield the reasons of rules that hold; metricsMissing is told by a condition of its own."""
    for alert in status.health.alerts:
        yield alert.reason
    metrics = find(status.conditions, ConditionType.METRICS_AVAILABLE)
    if metrics is not None and metrics.status == "False":
        yield metrics.reason


def _attempts(runs: _Runs) -> Iterator[Metric]:
    attempt = gauge("ling_run_attempt", "Attempt that the run is at.", RUN_LABELS)
    began = gauge(
        "ling_run_attempt_start_timestamp_seconds", "When that attempt began.", RUN_LABELS
    )
    restarts = gauge("ling_run_restarts", "Restarts of that attempt.", RUN_LABELS)
    saved = gauge(
        "ling_run_last_finite_checkpoint_step",
        "Step of the newest checkpoint without a NaN; absent before the first.",
        RUN_LABELS,
    )
    permitted = gauge(
        "ling_run_permitted",
        "0 while the API server refuses what the run needs; see its condition Permitted.",
        RUN_LABELS,
    )
    for labels, run in runs.items():
        status = run.status
        attempt.add_metric(labels, status.attempt)
        restarts.add_metric(labels, status.restarts)
        refused = has_reason(status.conditions, ConditionType.PERMITTED, Reason.REFUSED)
        permitted.add_metric(labels, float(not refused))
        if status.last_finite_checkpoint is not None:
            saved.add_metric(labels, status.last_finite_checkpoint)
        for newest in status.attempts[-1:]:
            began.add_metric(labels, newest.start_time.timestamp())
    yield from (attempt, began, restarts, saved, permitted)


def gauge(name: str, text: str, labels: Iterable[str]) -> GaugeMetricFamily:
    """Return a family without samples."""
    return GaugeMetricFamily(name, text, labels=list(labels))
