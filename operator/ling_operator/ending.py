"""How an attempt ends: halted, complete, failed or cancelled, as an intent in the status. Pure.

Once set, an ending stays for the attempt. Only a halt may still follow another ending: exit code
90 of any pod, or last words that say so, mean that the run diverged, whatever its Job ended with.
"""

from ling_operator.api import ConditionType, Halt, Reason, TrainingRunStatus
from ling_operator.conditions import find, has_reason, holds
from ling_operator.plan import Observed
from ling_operator.progress import attempt_pods, current_jobset, mark
from ling_operator.verdict import Health, Verdict, judge
from ling_operator.views import PodView

FAILURES = {
    2: Reason.CONFIGURATION_ERROR,
    3: Reason.DATA_ERROR,
    4: Reason.CHECKPOINT_ERROR,
    5: Reason.METRICS_PORT_TAKEN,
}
"""Exit codes that no restart can help."""
MAX_RESTARTS_WITHOUT_PROGRESS = 3
_REASON_LENGTH = 128  # an event's reason has no place for more


def has_ended(status: TrainingRunStatus) -> bool:
    """Tell whether the attempt is over; only a raised spec.attempt goes on from there."""
    kinds = (ConditionType.HALTED, ConditionType.COMPLETE, ConditionType.FAILED)
    return any(holds(status.conditions, kind) for kind in kinds) or is_cancelled(status)


def is_cancelled(status: TrainingRunStatus) -> bool:
    """Tell whether somebody deleted the attempt's JobSet."""
    return has_reason(status.conditions, ConditionType.CREATED, Reason.JOB_SET_DELETED)


def end_attempt(observed: Observed, status: TrainingRunStatus) -> TrainingRunStatus:
    """Return the status with the ending that the observation proves, if any."""
    if holds(status.conditions, ConditionType.HALTED):
        return status
    pods = attempt_pods(observed.pods, status)
    halt = _halt_by_exit(observed, pods)
    if halt is None and not has_ended(status):
        halt = _halt_by_verdict(observed, status, pods)
    if halt is not None:
        return _halted(observed, status, halt)
    if has_ended(status) or status.job_set_uid is None:
        return status
    return _ended_otherwise(observed, status, pods)


def _halt_by_exit(observed: Observed, pods: tuple[PodView, ...]) -> Halt | None:
    """Read the last words of the pods that stopped themselves; process 0's first."""
    diverged = [pod for pod in pods if pod.diverged]
    if not diverged:
        return None
    pod = min(
        diverged, key=lambda p: (p.termination is None, p.job_index, p.completion_index, p.name)
    )
    words = pod.termination
    step = words.step if words is not None else None
    if words is not None and step is not None and words.last_finite_step is not None:
        step = min(words.last_finite_step + 1, step)  # the first step of the row
    reason = (words.reason or words.signal) if words is not None else None
    host = pod.host or pod.name
    where = f" at step {step}" if step is not None else ""
    value = words.value if words is not None else None
    return Halt(
        reason=_word(reason) or Reason.DIVERGED,
        step=step,
        value=value,
        host=host,
        message=f"The trainer on {host} stopped itself{where}: {value or 'not finite'}.",
        time=observed.now,
    )


def _halt_by_verdict(
    observed: Observed, status: TrainingRunStatus, pods: tuple[PodView, ...]
) -> Halt | None:
    policy = observed.run.spec.health
    verdict = judge(status.health, policy)
    jobset = current_jobset(observed, status)
    if policy.metrics_missing.action == "Halt" and verdict.action != "Halt":
        verdict = _missing_metrics(status) or verdict
    if verdict.action != "Halt":
        return None
    if jobset is not None and jobset.terminal == "Completed":
        return None
    pod = next((p for p in pods if p.uid == status.health.pod_uid), None)
    return Halt(
        reason=verdict.reason,
        step=verdict.step,
        value=verdict.value,
        host=(pod.host or pod.name) if pod is not None else None,
        message=verdict.message,
        time=observed.now,
        restore_before_step=verdict.restore_before_step,
    )


def _missing_metrics(status: TrainingRunStatus) -> Verdict | None:
    found = find(status.conditions, ConditionType.METRICS_AVAILABLE)
    if found is None or (found.status, found.reason) != ("False", Reason.METRICS_MISSING):
        return None
    return Verdict(
        health=Health.UNKNOWN, reason=found.reason, message=found.message, action="Halt"
    )


def _halted(observed: Observed, status: TrainingRunStatus, halt: Halt) -> TrainingRunStatus:
    why = {"reason": halt.reason, "message": halt.message}
    status = mark(observed, status, ConditionType.HALTED, "True", **why)
    status = mark(observed, status, ConditionType.HEALTHY, "False", **why)
    return _close(observed, status, halt.reason).model_copy(update={"halt": halt})


def _ended_otherwise(
    observed: Observed, status: TrainingRunStatus, pods: tuple[PodView, ...]
) -> TrainingRunStatus:
    jobset = current_jobset(observed, status)
    if jobset is not None and jobset.terminal == "Completed":
        training = status.training
        step = max(training.step, status.health.highest_step, training.target_steps or 0)
        training = training.model_copy(update={"step": step})
        status = status.model_copy(update={"training": training})
        status = mark(
            observed,
            status,
            ConditionType.COMPLETE,
            "True",
            reason=Reason.FINISHED,
            message="All processes ended with 0.",
        )
        return _close(observed, status, Reason.FINISHED)
    terminal, watched = jobset is not None and jobset.terminal, observed.run.spec.watch is not None
    # Of a watched JobSet restarts and codes are its launcher's: it alone says that it has failed.
    failure = None if watched and not terminal else _failure_by_exit(pods)
    spent = status.restarts_without_progress >= MAX_RESTARTS_WITHOUT_PROGRESS
    if failure is None and spent and not watched:
        failure = (
            Reason.NO_PROGRESS,
            (
                f"{status.restarts_without_progress} restarts in a row, and no step beyond "
                f"{status.health.highest_step}; see the logs, and raise spec.attempt to try again."
            ),
        )
    if failure is None and jobset is not None and jobset.terminal == "Failed":
        exhausted = jobset.failure_reason == "ReachedMaxRestarts"
        reason = Reason.RESTARTS_EXHAUSTED if exhausted else Reason.JOB_SET_FAILED
        cause = f"{jobset.failure_reason}: " if watched else ""
        failure = reason, f"{cause}{jobset.failure}"
    if failure is not None:
        reason, message = failure
        kind = ConditionType.FAILED
        status = mark(observed, status, kind, "True", reason=reason, message=message)
        return _close(observed, status, reason)
    if jobset is None or jobset.deleting:
        status = mark(
            observed,
            status,
            ConditionType.CREATED,
            "False",
            reason=Reason.JOB_SET_DELETED,
            message=(
                "The JobSet was deleted, or another has its name now; "
                "raise spec.attempt to watch the next one of its name."
                if watched
                else "The JobSet was deleted; raise spec.attempt to start again."
            ),
        )
        return _close(observed, status, Reason.JOB_SET_DELETED)
    return status


def _failure_by_exit(pods: tuple[PodView, ...]) -> tuple[str, str] | None:
    """Return reason and message of the first pod, in global order, with a final exit code.

    Of a pod that was taken away the code does not count: the Job makes another in its place.
    """
    ordered = sorted(pods, key=lambda p: (p.job_index, p.completion_index, p.name))
    pod = next((p for p in ordered if p.exit_code in FAILURES and not p.disrupted), None)
    if pod is None or pod.exit_code is None:
        return None
    words = pod.termination
    reason = _word(words.reason if words is not None else None) or FAILURES[pod.exit_code]
    said = f": {words.message}" if words is not None and words.message else "."
    return reason, f"The trainer in pod {pod.name} ended with {pod.exit_code}{said}"


def _word(reason: str | None) -> str | None:
    """Return a trainer's reason if a condition and an event can hold it: one CamelCase word."""
    if reason is None or len(reason) > _REASON_LENGTH:
        return None
    good = reason.isascii() and reason.isalnum() and reason[0].isalpha()
    return reason if good else None


def _close(observed: Observed, status: TrainingRunStatus, reason: str) -> TrainingRunStatus:
    if not status.attempts:
        return status
    record = status.attempts[-1]
    end = record.end_time or observed.now
    record = record.model_copy(update={"reason": reason, "end_time": end})
    return status.model_copy(update={"attempts": (*status.attempts[:-1], record)})
