"""A run in a queue: what Kueue says of it, and how it is stopped and resumed there. Pure.

Kueue un-suspends an admitted JobSet within a second, so under Kueue a JobSet is stopped by its
Workload's spec.active alone: that evicts the pods, suspends the JobSet and frees the quota.
"""

from ling_operator.api import ConditionType, Reason, TrainingRunStatus
from ling_operator.conditions import has_reason, holds
from ling_operator.plan import Action, Observed, SetSuspend, SetWorkloadActive
from ling_operator.progress import current_jobset, mark
from ling_operator.views import JobSetView


def observe_queue(observed: Observed, status: TrainingRunStatus) -> TrainingRunStatus:
    """Set Admitted for a run in a queue; other runs do not have the condition."""
    queue, jobset = observed.run.spec.queue, current_jobset(observed, status)
    kind, workload = ConditionType.ADMITTED, observed.workload
    if jobset is None:
        if not holds(status.conditions, kind):
            return status
        message = "The JobSet is gone, and its quota is free."
        return mark(observed, status, kind, "False", reason=Reason.NO_WORKLOAD, message=message)
    if not _is_queued(observed, jobset) and workload is None:
        return status
    if workload is None:
        message = (
            f"Kueue has made no Workload yet; is it installed, with a LocalQueue "
            f"{queue or jobset.queue} in this namespace?"
        )
        return mark(observed, status, kind, "Unknown", reason=Reason.NO_WORKLOAD, message=message)
    if workload.admitted and workload.active:
        message = f"Workload {workload.name} has its quota."
        return mark(observed, status, kind, "True", reason=Reason.ADMITTED, message=message)
    ran = holds(status.conditions, kind) or has_reason(status.conditions, kind, Reason.EVICTED)
    if not workload.active:
        reason, default = Reason.DEACTIVATED, "The Workload is not active; its quota is free."
    elif ran:
        reason, default = Reason.EVICTED, "The quota was taken away; Kueue will admit it again."
    else:
        reason, default = Reason.WAITING_FOR_QUOTA, "Waiting for quota."
    message = (workload.message or default) if workload.active else f"{default} {workload.message}"
    return mark(observed, status, kind, "False", reason=reason, message=message.strip())


def is_stopped(observed: Observed, jobset: JobSetView) -> bool:
    """Tell whether a JobSet is suspended for good, unless somebody undoes it."""
    if observed.workload is not None:
        return jobset.suspended and not observed.workload.active
    # In a queue whose Workload is not there yet, Kueue would still start it.
    return jobset.suspended and not _is_queued(observed, jobset)


def stop(observed: Observed, jobset: JobSetView, reason: str) -> tuple[Action, ...]:
    """Return the action that stops a JobSet; none while one that was taken is carried out."""
    workload = observed.workload
    if workload is not None:
        if not workload.active:
            return ()
        return (SetWorkloadActive(workload.name, workload.uid, False, reason),)
    return () if jobset.suspended else (SetSuspend(jobset.uid, True, reason),)


def resume(observed: Observed, jobset: JobSetView, reason: str) -> tuple[Action, ...]:
    """Return the action that lets a JobSet go on; in a queue it is Kueue that starts it."""
    workload = observed.workload
    if workload is not None:
        if workload.active:
            return ()
        return (SetWorkloadActive(workload.name, workload.uid, True, reason),)
    if not jobset.suspended or _is_queued(observed, jobset):
        return ()
    return (SetSuspend(jobset.uid, False, reason),)


def _is_queued(observed: Observed, jobset: JobSetView) -> bool:
    """Tell whether Kueue is to start the JobSet: its label says so, also of a watched one."""
    return observed.run.spec.queue is not None or bool(jobset.queue)
