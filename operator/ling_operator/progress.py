"""What the cluster says about an attempt: pods, restarts, steps, health, into the status. Pure."""

import math
from datetime import datetime, timedelta
from statistics import median

from ling_operator.api import (
    ENDED,
    AttemptRecord,
    ConditionType,
    HealthState,
    Reason,
    TrainingProgress,
    TrainingRun,
    TrainingRunStatus,
)
from ling_operator.conditions import Truth, has_reason, set_condition
from ling_operator.plan import Observed
from ling_operator.pods_ready import pods_ready
from ling_operator.runnable import num_hosts
from ling_operator.verdict import HealthSample, brought_back, fold, is_ahead
from ling_operator.views import JobSetView, PodView
from ling_trainer.health_metrics import DEFAULT_PORT
from ling_trainer.schema import ConfigError

_FASTEST = 1e15
_LONGEST_ESTIMATE = timedelta(days=3650)


def own_jobset(observed: Observed) -> JobSetView | None:
    """Return the JobSet if this very object controls it, of whatever attempt."""
    jobset, uid = observed.jobset, observed.run.metadata.uid
    owned = jobset is not None and jobset.owner is not None and jobset.owner.uid == uid
    return jobset if owned else None


def current_jobset(observed: Observed, status: TrainingRunStatus) -> JobSetView | None:
    """Return the JobSet of the status's attempt; one with another uid is not it."""
    if observed.run.spec.watch is not None:
        watched = observed.jobset
        return watched if watched is not None and watched.uid == status.job_set_uid else None
    jobset, uid = own_jobset(observed), status.job_set_uid
    if jobset is None:
        return None
    # Once it is known, its label counts no more: somebody may have changed or removed it.
    is_it = jobset.attempt == status.attempt if uid is None else jobset.uid == uid
    return jobset if is_it else None


def attempt_pods(pods: tuple[PodView, ...], status: TrainingRunStatus) -> tuple[PodView, ...]:
    """Return the pods of the status's attempt; none before its JobSet is known."""
    uid, after = status.job_set_uid, status.pods_after
    if uid is None:
        return ()
    return tuple(pod for pod in pods if pod.job_set_uid == uid and _is_younger(pod, after))


def scrape_target(run: TrainingRun, pods: tuple[PodView, ...]) -> PodView | None:
    """Return the pod to scrape: process 0 of the newest restart; None after the run's end."""
    if run.status.phase in ENDED:
        return None
    candidates = [
        pod
        for pod in attempt_pods(pods, run.status)
        if is_process_zero(pod) and pod.live and pod.phase == "Running" and pod.ip is not None
    ]
    return max(candidates, key=lambda pod: pod.restart_attempt, default=None)


def heartbeat_targets(run: TrainingRun, pods: tuple[PodView, ...]) -> tuple[PodView, ...]:
    """Return the pods whose heartbeat to read: all of the newest restart; none after the end."""
    if scrape_target(run, pods) is None:
        return ()
    newest = newest_pods(attempt_pods(pods, run.status))
    return tuple(p for p in newest if p.live and p.phase == "Running" and p.ip is not None)


def accepts(sample: HealthSample, pods: tuple[PodView, ...]) -> bool:
    """Tell whether a page is process 0's of the attempt whose pods these are.

    On the node's network another run's trainer may answer at the same address: there a page has
    to say whose it is.
    """
    asked = next((p for p in pods if p.uid == sample.pod_uid and is_process_zero(p)), None)
    if asked is None:
        return False
    if sample.page_pod_uid is None:
        return not asked.host_network
    return sample.page_pod_uid == asked.uid


def observe_attempt(observed: Observed, status: TrainingRunStatus) -> TrainingRunStatus:
    """Fold what was observed into the status of an attempt that has not ended."""
    if status.job_set_uid is None:
        return status
    pods = attempt_pods(observed.pods, status)
    jobset = current_jobset(observed, status)
    before = status.health.highest_step
    if observed.sample is not None and accepts(observed.sample, pods):
        status = _take_sample(observed, status, observed.sample)
    last_words = max((p.termination.step or 0 for p in pods if p.termination), default=0)
    highest = max(status.health.highest_step, last_words)
    health = status.health.model_copy(update={"highest_step": highest})
    update: dict[str, object] = {"health": health}
    if highest > before:
        update["restarts_without_progress"] = 0
    status = status.model_copy(update=update)
    if jobset is not None:
        status = _count_restarts(observed, status, jobset, pods)
    status = _record_steps(status)
    return _mark_pods(observed, status, pods)


def observe_end(observed: Observed, status: TrainingRunStatus) -> TrainingRunStatus:
    """Keep PodsReady true to the facts after the attempt has ended; nothing else moves."""
    return _mark_pods(observed, status, attempt_pods(observed.pods, status))


def mark(
    observed: Observed,
    status: TrainingRunStatus,
    kind: ConditionType,
    truth: Truth,
    *,
    reason: str,
    message: str,
) -> TrainingRunStatus:
    """Return the status with one condition set as of now."""
    conditions = set_condition(
        status.conditions,
        kind,
        truth,
        reason=reason,
        message=message,
        generation=observed.run.metadata.generation,
        now=observed.now,
    )
    return status.model_copy(update={"conditions": conditions})


def is_pausing(status: TrainingRunStatus) -> bool:
    """Tell whether pods that come and go now are a pause's or an eviction's, not a restart's."""
    reasons = (Reason.SUSPENDING, Reason.SUSPEND_REQUESTED, Reason.EVICTED, Reason.RESUMING)
    return has_reason(status.conditions, ConditionType.SUSPENDED, *reasons)


def newest_pods(pods: tuple[PodView, ...]) -> tuple[PodView, ...]:
    """Return the pods of the newest restart that still exist."""
    there = [pod for pod in pods if not pod.gone]
    newest = max((pod.restart_attempt for pod in there), default=0)
    return tuple(pod for pod in there if pod.restart_attempt == newest)


def loss_text(loss: float | None) -> str | None:
    """Write a loss for the status: NaN and infinities have no place in JSON."""
    if loss is None:
        return None
    if math.isnan(loss):
        return "NaN"
    return f"{loss:.4f}" if math.isfinite(loss) else ("Inf" if loss > 0 else "-Inf")


def metrics_port_of(run: TrainingRun, pod: PodView) -> int:
    """Return the port of a pod's metrics; 0 if nobody says which."""
    watch = run.spec.watch
    if watch is None:
        return pod.metrics_port
    return watch.metrics_port or pod.metrics_port or DEFAULT_PORT


def _is_younger(pod: PodView, moment: datetime | None) -> bool:
    return moment is None or (pod.created is not None and pod.created > moment)


def is_process_zero(pod: PodView) -> bool:
    """Tell whether a pod is the first host of the first slice, whose metrics are the run's."""
    return pod.job_index == 0 and pod.completion_index == 0


def _take_sample(
    observed: Observed, status: TrainingRunStatus, sample: HealthSample
) -> TrainingRunStatus:
    if is_ahead(sample.time, observed.now):  # read before the clock was set back
        return status
    health = brought_back(status.health, sample, observed.now)
    health = fold(health, sample, observed.run.spec.health)
    if health == status.health:
        return status
    target = sample.target_steps or status.training.target_steps
    training = TrainingProgress(
        step=health.step,
        target_steps=target,
        loss=loss_text(sample.loss) if health.step else None,
        tokens_per_second=_speed(sample.tokens_per_second),
        estimated_completion_time=_completion(health, target),
    )
    update: dict[str, object] = {"health": health, "training": training}
    if sample.last_finite_checkpoint:
        update["last_finite_checkpoint"] = sample.last_finite_checkpoint
    return status.model_copy(update=update)


def _speed(speed: float | None) -> int | None:
    """Return a whole number that the API server takes; None for what is no speed."""
    return round(speed) if speed is not None and 0 <= speed <= _FASTEST else None


def _completion(health: HealthState, target: int | None) -> datetime | None:
    """Return when the target is reached at the median pace; None before any step was timed."""
    paces = health.step_seconds.values
    if target is None or health.progress_time is None or not paces:
        return None
    seconds = max(target - health.step, 0) * median(paces)
    if seconds > _LONGEST_ESTIMATE.total_seconds():
        return None
    # Whole seconds: what is left does not change with every page.
    return (health.progress_time + timedelta(seconds=seconds)).replace(microsecond=0)


def _count_restarts(
    observed: Observed,
    status: TrainingRunStatus,
    jobset: JobSetView,
    pods: tuple[PodView, ...],
) -> TrainingRunStatus:
    """Count what JobSet counts, less what a suspend or a resume made it count."""
    seen = max([jobset.restarts, *(pod.restart_attempt for pod in pods)])
    new = max(seen - status.job_set_restarts, 0)
    if observed.run.spec.suspend or jobset.suspended or is_pausing(status):
        new = 0
    # A host that was taken away is no crash loop, however often it happens. And without a step
    # number on the page nobody can say whether a restart got further.
    ended = range(status.job_set_restarts, seen)
    disrupted = {pod.restart_attempt for pod in pods if pod.disrupted}.intersection(ended)
    crashes = max(new - len(disrupted), 0) if status.health.shows_step else 0
    return status.model_copy(
        update={
            "job_set_restarts": max(seen, status.job_set_restarts),
            "restarts": status.restarts + new,
            "restarts_without_progress": status.restarts_without_progress + crashes,
        }
    )


def _record_steps(status: TrainingRunStatus) -> TrainingRunStatus:
    step = status.health.highest_step
    if not status.attempts or step == 0:
        return status
    record: AttemptRecord = status.attempts[-1]
    first = record.first_step if record.first_step is not None else status.health.step or step
    record = record.model_copy(update={"first_step": first, "last_step": step})
    return status.model_copy(update={"attempts": (*status.attempts[:-1], record)})


def _mark_pods(
    observed: Observed, status: TrainingRunStatus, pods: tuple[PodView, ...]
) -> TrainingRunStatus:
    newest = newest_pods(pods)
    expected = max(_expected_pods(observed, status) or len(newest), 1)
    truth, reason, message = pods_ready(newest, expected=expected, now=observed.now)
    kind = ConditionType.PODS_READY
    return mark(observed, status, kind, truth, reason=reason, message=message)


def _expected_pods(observed: Observed, status: TrainingRunStatus) -> int:
    """Return how many pods the attempt has when all are there; 0 if that is not known."""
    if observed.run.spec.watch is not None:
        jobset = current_jobset(observed, status)
        return jobset.hosts if jobset is not None else 0
    try:
        return num_hosts(observed.run.spec)
    except ConfigError:
        return 0
