"""What an attempt's health says in its conditions, and the alerts behind them. Pure."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from ling_operator.api import Alert, ConditionType, HealthState, Reason, TrainingRunStatus
from ling_operator.conditions import Truth, find, holds
from ling_operator.plan import Observed
from ling_operator.progress import attempt_pods, mark
from ling_operator.verdict import Health, Verdict, findings, fold_heartbeats, judge

ALERT_HOLD = timedelta(minutes=5)
"""An alert stays this long after it last held: what hovers at a threshold is told once."""

type Fact = tuple[Truth, str, str]
"""Status, reason and message of a condition."""


def mark_health(observed: Observed, status: TrainingRunStatus) -> TrainingRunStatus:
    """Set Progressing, MetricsAvailable and Healthy of a live attempt; PodsReady must be set."""
    if status.job_set_uid is None:
        return status
    policy = observed.run.spec.health
    uids = {pod.uid for pod in attempt_pods(observed.pods, status) if pod.live}
    beats = (beat for beat in observed.heartbeats if beat.pod_uid in uids)
    health = fold_heartbeats(status.health, beats, policy)
    found = findings(health, policy)
    alerts = _alerts(health.alerts, found, observed.now)
    health = health.model_copy(update={"alerts": alerts})
    status = status.model_copy(update={"health": health})
    facts = {
        ConditionType.PROGRESSING: _progressing(health, found),
        ConditionType.METRICS_AVAILABLE: _metrics_available(observed, status),
        ConditionType.HEALTHY: _healthy(observed, health, found),
    }
    for kind, (truth, reason, message) in facts.items():
        status = mark(observed, status, kind, truth, reason=reason, message=message)
    return status


def _alerts(
    before: tuple[Alert, ...], found: Iterable[Verdict], now: datetime
) -> tuple[Alert, ...]:
    """Return the alerts that hold, or held within ALERT_HOLD; each keeps when it began."""
    since = {alert.reason: alert.since for alert in before}
    holding = {
        verdict.reason: Alert(
            reason=verdict.reason,
            message=verdict.message,
            step=verdict.step,
            since=since.get(verdict.reason, now),
            last_time=now,
        )
        for verdict in found
        if verdict.action == "Alert"
    }
    held = {a.reason: a for a in before if abs(now - a.last_time) < ALERT_HOLD}
    return tuple((held | holding).values())


def _progressing(health: HealthState, found: tuple[Verdict, ...]) -> Fact:
    stall = next((verdict for verdict in found if verdict.reason == Reason.STALLED), None)
    if stall is not None:
        return "False", stall.reason, stall.message
    if health.step > 0:
        return "True", Reason.STEP_ADVANCED, "Steps are finished."
    return "Unknown", Reason.NO_STEP_YET, "No step was finished yet."


def _healthy(observed: Observed, health: HealthState, found: tuple[Verdict, ...]) -> Fact:
    if not found and health.alerts:
        last = health.alerts[-1]
        return "False", last.reason, f"{last.message} It holds no more."
    verdict = judge(health, observed.run.spec.health)
    truths: dict[Health, Truth] = {Health.HEALTHY: "True", Health.UNKNOWN: "Unknown"}
    return truths.get(verdict.health, "False"), verdict.reason, verdict.message


def _metrics_available(observed: Observed, status: TrainingRunStatus) -> Fact:
    policy, health = observed.run.spec.health, status.health
    rule = policy.metrics_missing
    seconds = max(rule.factor * policy.scrape_interval_seconds, rule.floor_seconds)
    patience = timedelta(seconds=seconds)
    if health.sample_time is not None and abs(observed.now - health.sample_time) <= patience:
        message = "Metrics of process 0 are read."
        if not health.missing:
            return "True", Reason.SCRAPED, message
        message = f"{message} Rules without their series: {', '.join(health.missing)}."
        return "True", Reason.METRICS_MISSING, message
    ready = find(status.conditions, ConditionType.PODS_READY)
    since = ready.last_transition_time if ready is not None else None
    waited = since is not None and abs(observed.now - since) > patience
    if holds(status.conditions, ConditionType.PODS_READY) and waited:
        why = f" {observed.scrape_problem}" if observed.scrape_problem else ""
        message = f"No page for more than {seconds:.0f} s.{why}"
        truth: Truth = "Unknown" if rule.action == "Ignore" else "False"
        return truth, Reason.METRICS_MISSING, message
    return "Unknown", Reason.NO_SAMPLE_YET, "No metrics were read yet."
