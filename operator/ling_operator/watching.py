"""A JobSet that somebody else launched: when it may be watched, how an attempt begins on it. Pure.

It is stopped and let go on like one of ours, by its Workload or by spec.suspend, but never made
and never deleted. Attempts follow one another on the same JobSet, so that one begins only after
the last pod of a stopped one has ended, and what earlier pods tell is not held against it.
"""

from ling_operator.api import (
    GROUP,
    KIND,
    ConditionType,
    Reason,
    TrainingProgress,
    TrainingRunStatus,
)
from ling_operator.conditions import find
from ling_operator.plan import Action, Observed
from ling_operator.progress import mark
from ling_operator.queueing import is_stopped, stop
from ling_operator.runnable import jobset_name, require_runnable
from ling_operator.views import JobSetView, PodView
from ling_trainer.schema import ConfigError

type Step = tuple[TrainingRunStatus, tuple[Action, ...]]


def carry_over(old: TrainingRunStatus, new: TrainingRunStatus) -> TrainingRunStatus:
    """Return the status of a new attempt with what still holds of its JobSet from the last one."""
    paused = find(old.conditions, ConditionType.SUSPENDED)
    return new.model_copy(
        update={
            "stop": old.stop,
            "pods_after": old.pods_after,
            "conditions": (paused,) if paused is not None else (),
        }
    )


def adopt(observed: Observed, status: TrainingRunStatus) -> TrainingRunStatus:
    """Note the JobSet that the attempt watches, once nothing stands in the way."""
    jobset = observed.jobset
    if status.job_set_uid is not None or jobset is None or refusal(observed, status) is not None:
        return status
    same = jobset.uid == _previous_uid(status)
    pods = _pods_of(observed, jobset)
    resumes = same and status.stop is not None and not jobset.terminal
    after = status.pods_after if same else None
    if resumes:
        made = [pod.created for pod in pods if pod.created is not None]
        after = max([*made, *([after] if after is not None else [])], default=None)
    last = status.attempts[-1].model_copy(update={"job_set_uid": jobset.uid})
    status = status.model_copy(
        update={
            "job_set_uid": jobset.uid,
            "attempts": (*status.attempts[:-1], last),
            "training": TrainingProgress(),
            "job_set_restarts": max([jobset.restarts, *(pod.restart_attempt for pod in pods)]),
            "stop": None,
            "pods_after": after,
            "conditions": status.conditions if same else (),
        }
    )
    if resumes:
        status = mark(
            observed,
            status,
            ConditionType.SUSPENDED,
            "False",
            reason=Reason.RESUMING,
            message="Pods start from the last checkpoint.",
        )
    return mark(
        observed,
        status,
        ConditionType.CREATED,
        "True",
        reason=Reason.JOB_SET_FOUND,
        message=f"JobSet {jobset.name} is watched as attempt {status.attempt}.",
    )


def await_jobset(observed: Observed, status: TrainingRunStatus) -> Step:
    """Say why there is nothing to watch yet, and bring a stopped attempt's JobSet to rest."""
    found = refusal(observed, status)
    if found is None:
        return status, ()
    reason, message = found
    kind = ConditionType.CREATED
    status = mark(observed, status, kind, "False", reason=reason, message=message)
    jobset = observed.jobset
    if reason != Reason.WAITING_FOR_PREVIOUS or jobset is None or is_stopped(observed, jobset):
        return status, ()
    return status, stop(observed, jobset, reason)


def refusal(observed: Observed, status: TrainingRunStatus) -> tuple[Reason, str] | None:
    """Return what stands in the way of watching, None if nothing does."""
    problem = _spec_problem(observed)
    if problem is not None:
        return Reason.INVALID_CONFIG, problem
    name, jobset = jobset_name(observed.run), observed.jobset
    if jobset is None or jobset.deleting:
        what = "is being deleted" if jobset is not None else "does not exist in this namespace"
        return Reason.JOB_SET_NOT_FOUND, f"JobSet {name} {what}; it is watched once it is there."
    owner = jobset.owner
    if owner is not None and (owner.kind, owner.api_version.split("/")[0]) == (KIND, GROUP):
        message = f"JobSet {name} belongs to TrainingRun {owner.name}, which watches over it."
        return Reason.NAME_CONFLICT, f"{message} Delete this object."
    if observed.other_watcher is not None:
        message = f"JobSet {name} is watched by TrainingRun {observed.other_watcher} already."
        return Reason.NAME_CONFLICT, f"{message} Delete one of the two."
    live = [pod.name for pod in _pods_of(observed, jobset) if pod.live]
    stopped = status.stop is not None and jobset.uid == _previous_uid(status)
    if stopped and live and not jobset.terminal:
        message = f"Pods of the last attempt are still there: {', '.join(sorted(live)[:5])}."
        return Reason.WAITING_FOR_PREVIOUS, message
    return None


def _spec_problem(observed: Observed) -> str | None:
    if observed.spec_error is not None:
        return observed.spec_error
    try:
        require_runnable(observed.run)
    except ConfigError as error:
        return str(error)
    return None


def _previous_uid(status: TrainingRunStatus) -> str | None:
    """Return the JobSet of the last attempt that had one; spec may have been raised twice."""
    earlier = (each.job_set_uid for each in reversed(status.attempts[:-1]))
    return next((uid for uid in earlier if uid is not None), None)


def _pods_of(observed: Observed, jobset: JobSetView) -> list[PodView]:
    return [pod for pod in observed.pods if pod.job_set_uid == jobset.uid]
