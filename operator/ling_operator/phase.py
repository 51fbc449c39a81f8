"""One word for a run, by fixed precedence. Pure."""

from ling_operator.api import ConditionType, Phase, Reason, TrainingRunStatus
from ling_operator.conditions import find, has_reason, holds
from ling_operator.ending import is_cancelled
from ling_operator.plan import Observed
from ling_operator.progress import attempt_pods, current_jobset, is_pausing, newest_pods


def phase_of(observed: Observed, status: TrainingRunStatus) -> Phase:
    """Return the first phase that holds, in the order of the class Phase."""
    conditions = status.conditions
    for kind, phase in (
        (ConditionType.HALTED, Phase.HALTED),
        (ConditionType.COMPLETE, Phase.COMPLETE),
        (ConditionType.FAILED, Phase.FAILED),
    ):
        if holds(conditions, kind):
            return phase
    if is_cancelled(status):
        return Phase.CANCELLED
    if observed.run.spec.suspend:
        return Phase.SUSPENDED
    return _phase_of_live(observed, status)


def _phase_of_live(observed: Observed, status: TrainingRunStatus) -> Phase:
    jobset = current_jobset(observed, status)
    if jobset is None:
        return Phase.PENDING
    if holds(status.conditions, ConditionType.PODS_READY):
        return Phase.RUNNING
    resuming = has_reason(status.conditions, ConditionType.SUSPENDED, Reason.RESUMING)
    if jobset.suspended:
        admitted = find(status.conditions, ConditionType.ADMITTED)
        waits = admitted is not None and admitted.status != "True"
        return Phase.STARTING if resuming and not waits else Phase.QUEUED
    newest = newest_pods(attempt_pods(observed.pods, status))
    lost = any(pod.phase == "Failed" or pod.deleting for pod in newest)
    if not is_pausing(status) and (status.restarts > 0 or jobset.restarting or lost):
        return Phase.RESTARTING
    return Phase.STARTING
