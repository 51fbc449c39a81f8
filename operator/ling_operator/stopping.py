"""Bringing a JobSet to rest, and back: halts that hold, pauses, Kueue's evictions. Pure."""

from datetime import datetime, timedelta

from ling_operator.api import ConditionType, Reason, Stop, TrainingRunStatus
from ling_operator.conditions import Truth, find, has_reason, holds
from ling_operator.ending import is_cancelled
from ling_operator.plan import Action, DeleteJobSet, Observed, SetSuspend
from ling_operator.progress import attempt_pods, mark
from ling_operator.queueing import is_stopped, resume, stop
from ling_operator.views import JobSetView

OVERRIDE_PAUSE = timedelta(seconds=60)
"""A stop that somebody undoes is done again at most this often."""

KUEUE_PATIENCE = timedelta(seconds=60)
"""Kueue stops a JobSet within a second or two; a halt holds without it too."""

_OURS = frozenset({Reason.SUSPENDING, Reason.SUSPEND_REQUESTED, Reason.RESUMING})

type Step = tuple[TrainingRunStatus, tuple[Action, ...]]


def enforce_stop(observed: Observed, status: TrainingRunStatus, jobset: JobSetView | None) -> Step:
    """Keep a halted or failed attempt stopped; do not fight with whoever undoes it."""
    kinds = (ConditionType.HALTED, ConditionType.FAILED)
    stopped = next((c for c in status.conditions if c.type in kinds and c.status == "True"), None)
    if stopped is None or is_cancelled(status):
        return status, ()
    why, since = stopped.reason, stopped.last_transition_time
    mine = status.stop or Stop()
    if _is_to_go(observed, status) and jobset is not None:
        actions = () if jobset.deleting else (DeleteJobSet(jobset.uid, why),)
        return status.model_copy(update={"stop": mine}), actions
    if jobset is None or jobset.terminal or jobset.deleting or is_stopped(observed, jobset):
        return status.model_copy(update={"stop": mine.model_copy(update={"confirmed": True})}), ()
    actions = stop(observed, jobset, why) or _without_kueue(observed, jobset, why, since)
    if not mine.confirmed:
        return status.model_copy(update={"stop": mine}), actions
    last = mine.override_time
    if not actions or (last is not None and abs(observed.now - last) < OVERRIDE_PAUSE):
        return status, ()
    mine = mine.model_copy(update={"override_time": observed.now})
    return status.model_copy(update={"stop": mine}), actions


def _without_kueue(
    observed: Observed, jobset: JobSetView, why: str, since: datetime
) -> tuple[Action, ...]:
    """Suspend the JobSet itself where Kueue does not; its Workload keeps Kueue from undoing it."""
    if jobset.suspended or abs(observed.now - since) < KUEUE_PATIENCE:
        return ()
    return (SetSuspend(jobset.uid, True, why),)


def _is_to_go(observed: Observed, status: TrainingRunStatus) -> bool:
    """Tell whether a halt deletes the JobSet; never one that somebody else launched."""
    spec = observed.run.spec
    fails = spec.health.halt_mode == "Fail" and spec.watch is None
    return fails and holds(status.conditions, ConditionType.HALTED)


def pause_or_resume(observed: Observed, status: TrainingRunStatus, jobset: JobSetView) -> Step:
    """Follow spec.suspend; a JobSet that somebody else suspended is left to them."""
    if jobset.terminal or jobset.deleting:
        return status, ()
    live = any(pod.live for pod in attempt_pods(observed.pods, status))
    if observed.run.spec.suspend:
        if is_stopped(observed, jobset) and not live:
            reason, message = Reason.SUSPEND_REQUESTED, "spec.suspend is true; no pod runs."
            return _suspended(observed, status, "True", reason, message), ()
        message = "spec.suspend is true; pods write a checkpoint and leave."
        status = _suspended(observed, status, "False", Reason.SUSPENDING, message)
        return status, stop(observed, jobset, Reason.SUSPEND_REQUESTED)
    condition = find(status.conditions, ConditionType.SUSPENDED)
    ours = condition is not None and condition.reason in _OURS
    lost = (Reason.EVICTED,) if ours else (Reason.EVICTED, Reason.DEACTIVATED)
    if has_reason(status.conditions, ConditionType.ADMITTED, *lost):
        truth: Truth = "True" if jobset.suspended and not live else "False"
        message = "The queue took the quota away; pods write a checkpoint and leave."
        return _suspended(observed, status, truth, Reason.EVICTED, message), ()
    if condition is None or condition.reason == Reason.RESUMED:
        return status, ()
    if not jobset.suspended and holds(status.conditions, ConditionType.PODS_READY):
        message = "The run goes on."
        return _suspended(observed, status, "False", Reason.RESUMED, message), ()
    message = "Pods start from the last checkpoint."
    status = _suspended(observed, status, "False", Reason.RESUMING, message)
    return status, resume(observed, jobset, Reason.RESUMING)


def _suspended(
    observed: Observed, status: TrainingRunStatus, truth: Truth, reason: Reason, message: str
) -> TrainingRunStatus:
    kind = ConditionType.SUSPENDED
    return mark(observed, status, kind, truth, reason=reason, message=message)
