"""What is kept of an attempt that was halted or failed, before its pods are gone. Pure.

Bounded, since it lives in the object: 20 lines and 4 KiB of process 0's output, eight ends of
processes with 512 bytes of message each; in full for the newest three attempts, of older ones the
first message alone. A log that cannot be read at once is done without: a halt does not wait.
"""

from ling_operator.api import (
    AttemptRecord,
    ConditionType,
    Evidence,
    ProcessEnd,
    TrainingRunStatus,
)
from ling_operator.conditions import holds
from ling_operator.plan import LogSource, Observed
from ling_operator.progress import attempt_pods, is_process_zero
from ling_operator.views import PodView

LOG_LINES = 20
LOG_BYTES = 4096
ENDS_KEPT = 8
ATTEMPTS_IN_FULL = 3

_STOPS = (ConditionType.HALTED, ConditionType.FAILED)
_STOPPED = 143


def log_to_read(observed: Observed, status: TrainingRunStatus) -> LogSource | None:
    """Return the log to read before this plan is carried out; None where none is needed."""
    if not _just_stopped(observed.run.status, status):
        return None
    pod = _process_zero(attempt_pods(observed.pods, status))
    if pod is None or (observed.log is not None and observed.log.uid == pod.uid):
        return None
    return LogSource(pod.name, pod.uid, pod.container)


def keep_evidence(observed: Observed, status: TrainingRunStatus) -> TrainingRunStatus:
    """Record what a halted or failed attempt left; later only ends of processes are added."""
    if not status.attempts or not any(holds(status.conditions, kind) for kind in _STOPS):
        return status
    record = status.attempts[-1]
    pods = attempt_pods(observed.pods, status)
    evidence = record.evidence
    if _just_stopped(observed.run.status, status):
        evidence = _with_log(observed, pods, evidence)
    if evidence is None:
        return status  # stopped by a version that kept none
    evidence = evidence.model_copy(update={"ended": _ends(evidence.ended, pods)})
    record = record.model_copy(update={"evidence": evidence})
    return status.model_copy(update={"attempts": (*status.attempts[:-1], record)})


def thin_out(attempts: tuple[AttemptRecord, ...]) -> tuple[AttemptRecord, ...]:
    """Return the attempts with little evidence left of all but the newest."""
    older = len(attempts) - ATTEMPTS_IN_FULL
    return tuple(_thin(each) if i < older else each for i, each in enumerate(attempts))


def _thin(record: AttemptRecord) -> AttemptRecord:
    evidence = record.evidence
    if evidence is None or (not evidence.log and len(evidence.ended) <= 1):
        return record
    problem = "left out: the attempt is an old one"
    little = Evidence(time=evidence.time, log_problem=problem, ended=evidence.ended[:1])
    return record.model_copy(update={"evidence": little})


def _just_stopped(before: TrainingRunStatus, after: TrainingRunStatus) -> bool:
    """Tell whether this pass is the one that halts or fails the attempt."""
    same = before.attempt == after.attempt
    return any(
        holds(after.conditions, kind) and not (same and holds(before.conditions, kind))
        for kind in _STOPS
    )


def _process_zero(pods: tuple[PodView, ...]) -> PodView | None:
    """Return the newest pod of process 0 that has had a chance to print something."""
    started = [
        pod
        for pod in pods
        if is_process_zero(pod)
        and not pod.gone
        and pod.phase in {"Running", "Succeeded", "Failed"}
    ]
    return max(started, key=lambda pod: pod.restart_attempt, default=None)


def _with_log(observed: Observed, pods: tuple[PodView, ...], before: Evidence | None) -> Evidence:
    pod, log = _process_zero(pods), observed.log
    evidence = Evidence(time=observed.now, ended=before.ended if before is not None else ())
    if pod is None:
        found: dict[str, object] = {"log_problem": "no pod of process 0 is left"}
    elif log is None or log.uid != pod.uid:
        found = {"log_pod": pod.name, "log_problem": "not read"}
    else:
        found = {"log_pod": pod.name, "log": log.lines, "log_problem": log.problem}
    if before is not None and before.log and not found.get("log"):
        return before  # a halt that follows another end: what was read then is still the best
    return evidence.model_copy(update=found)


def _ends(kept: tuple[ProcessEnd, ...], pods: tuple[PodView, ...]) -> tuple[ProcessEnd, ...]:
    """Return the ends kept so far and those that are new, the telling ones first."""
    known = {end.pod for end in kept}
    new = [pod for pod in pods if pod.name not in known and _tells(pod)]
    new.sort(
        key=lambda pod: (
            not pod.diverged,
            -pod.restart_attempt,
            pod.job_index,
            pod.completion_index,
        )
    )
    return (*kept, *map(_end, new))[:ENDS_KEPT]


def _tells(pod: PodView) -> bool:
    if pod.exit_code is None or pod.exit_code == 0:
        return False
    return pod.exit_code != _STOPPED or bool(pod.message)


def _end(pod: PodView) -> ProcessEnd:
    return ProcessEnd(
        pod=pod.name,
        host=pod.host,
        restart=pod.restart_attempt,
        exit_code=pod.exit_code or 0,
        reason=pod.end_reason or None,
        message=pod.message or None,
    )
