"""Observed state to plan. The centre of the operator; pure, and total. Start reading here.

A pass looks at everything and decides anew, whatever woke it: it moves to a new attempt if
spec.attempt asks for one, folds what the cluster shows into the status, sets an ending if there
is one, and plans at most one action that brings the JobSet closer to what the status says. The
status is written before the action, so what an operator that dies in between has begun is in it.
"""

from datetime import timedelta

from ling_operator.api import (
    GROUP,
    KIND,
    MAX_ATTEMPTS_KEPT,
    AttemptRecord,
    ConditionType,
    Phase,
    Reason,
    TrainingProgress,
    TrainingRunStatus,
)
from ling_operator.conditions import find
from ling_operator.ending import end_attempt, has_ended
from ling_operator.events import events_of
from ling_operator.evidence import keep_evidence, log_to_read, thin_out
from ling_operator.health_conditions import mark_health
from ling_operator.jobset import build_jobset
from ling_operator.phase import phase_of
from ling_operator.plan import CreateJobSet, DeleteJobSet, Observed, Plan
from ling_operator.pods_ready import hindrance
from ling_operator.progress import (
    current_jobset,
    mark,
    observe_attempt,
    observe_end,
    own_jobset,
)
from ling_operator.queueing import observe_queue
from ling_operator.recovery import measure_recovery
from ling_operator.runnable import target_steps
from ling_operator.settle import settle
from ling_operator.stopping import (
    KUEUE_PATIENCE,
    OVERRIDE_PAUSE,
    Step,
    enforce_stop,
    pause_or_resume,
)
from ling_operator.views import Owner
from ling_operator.watching import adopt, await_jobset, carry_over
from ling_trainer.schema import ConfigError

WAIT = timedelta(seconds=5)
"""Look again at what no watch tells."""


def reconcile(observed: Observed) -> Plan:
    """Decide. Same input, same plan; applying a plan twice is applying it once.

    Args:
      observed: all that the decision may depend on.

    Returns: The new status, at most one action, the events of young transitions, and when to look
      again. The status equals the one observed where nothing needs to be written.
    """
    old = observed.run.status
    if observed.run.metadata.deletion_timestamp is not None:
        return Plan(status=old)  # the garbage collector removes what the object owns
    status = _begin_attempt(observed)
    status = _adopt(observed, status)
    if not has_ended(status):
        status = mark_health(observed, observe_attempt(observed, status))
    status = end_attempt(observed, status)
    if has_ended(status):
        status = keep_evidence(observed, observe_end(observed, status))
    status = observe_queue(observed, status)
    status, actions = _act(observed, status)
    status = _note_refusal(observed, status)
    status = measure_recovery(observed, _as_of_now(observed, status))
    return Plan(
        status=settle(observed, status),
        actions=actions,
        events=events_of(status, observed.now),
        requeue_after=_look_again(observed, status),
        read_log=log_to_read(observed, status),
    )


def _as_of_now(observed: Observed, status: TrainingRunStatus) -> TrainingRunStatus:
    """Date the status: phase, and the generation that it and every condition were judged by."""
    generation, phase = observed.run.metadata.generation, phase_of(observed, status)
    training = status.training
    if phase != Phase.RUNNING:  # nobody knows when it goes on
        training = training.model_copy(update={"estimated_completion_time": None})
    return status.model_copy(
        update={
            "phase": phase,
            "observed_generation": generation,
            "training": training,
            "conditions": tuple(
                c.model_copy(update={"observed_generation": generation}) for c in status.conditions
            ),
        }
    )


def _begin_attempt(observed: Observed) -> TrainingRunStatus:
    """Move to the attempt that spec asks for, if it is a higher one; a lower one is ignored."""
    old, wanted = observed.run.status, observed.run.spec.attempt
    if wanted <= old.attempt:
        return old
    attempts = old.attempts
    if attempts and attempts[-1].end_time is None:
        ended = {"reason": Reason.SUPERSEDED, "end_time": observed.now}
        attempts = (*attempts[:-1], attempts[-1].model_copy(update=ended))
    attempts = (*attempts, AttemptRecord(attempt=wanted, start_time=observed.now))
    new = TrainingRunStatus(
        attempt=wanted,
        attempts=thin_out(attempts[-MAX_ATTEMPTS_KEPT:]),
        last_finite_checkpoint=old.last_finite_checkpoint,
        restore_before_step=_restore_before(old),
    )
    return new if observed.run.spec.watch is None else carry_over(old, new)


def _restore_before(old: TrainingRunStatus) -> int | None:
    """Return the step that the next attempt has to restore before; None for no such limit.

    A limit stays until an attempt has got beyond it: until then the bad checkpoints may be there.
    """
    if old.halt is not None and old.halt.restore_before_step is not None:
        return old.halt.restore_before_step
    limit = old.restore_before_step
    passed = limit is not None and old.health.highest_step >= limit
    return None if passed else limit


def _adopt(observed: Observed, status: TrainingRunStatus) -> TrainingRunStatus:
    """Note the JobSet of the attempt when it is first seen."""
    if observed.run.spec.watch is not None:
        return adopt(observed, status)
    jobset = current_jobset(observed, status)
    if jobset is None or status.job_set_uid is not None:
        return status
    attempts = status.attempts
    if attempts:
        last = attempts[-1].model_copy(update={"job_set_uid": jobset.uid})
        attempts = (*attempts[:-1], last)
    update: dict[str, object] = {
        "job_set_uid": jobset.uid,
        "attempts": attempts,
        "training": TrainingProgress(target_steps=target_steps(observed.run)),
    }
    status = status.model_copy(update=update)
    return mark(
        observed,
        status,
        ConditionType.CREATED,
        "True",
        reason=Reason.JOB_SET_CREATED,
        message=f"JobSet {jobset.name} runs attempt {status.attempt}.",
    )


def _act(observed: Observed, status: TrainingRunStatus) -> Step:
    current = current_jobset(observed, status)
    if has_ended(status):
        return enforce_stop(observed, status, current)
    if current is not None:
        return pause_or_resume(observed, status, current)
    if observed.run.spec.watch is not None:
        return await_jobset(observed, status)
    old = own_jobset(observed)
    if old is not None:
        message = f"The JobSet of attempt {old.attempt} and its pods have to go first."
        status = _not_created(observed, status, Reason.WAITING_FOR_PREVIOUS, message)
        delete = DeleteJobSet(old.uid, f"attempt {status.attempt} replaces {old.attempt}")
        return status, () if old.deleting else (delete,)
    return _create(observed, status)


def _create(observed: Observed, status: TrainingRunStatus) -> Step:
    """Create the JobSet once nothing stands in its way; say what does."""
    refusal = _refusal(observed, status)
    if refusal is not None:
        reason, message = refusal
        return _not_created(observed, status, reason, message), ()
    try:
        manifest = build_jobset(
            observed.run,
            attempt=status.attempt,
            restore_before_step=status.restore_before_step,
        )
    except ConfigError as error:
        return _not_created(observed, status, Reason.INVALID_CONFIG, str(error)), ()
    reason, message = Reason.CREATING, "The JobSet is being created."
    if observed.create_error is not None:
        reason, message = Reason.CREATE_FAILED, observed.create_error
    return _not_created(observed, status, reason, message), (CreateJobSet(manifest),)


def _refusal(observed: Observed, status: TrainingRunStatus) -> tuple[Reason, str] | None:
    """Return what stands in the way of a JobSet, None if nothing does."""
    if observed.spec_error is not None:
        return Reason.INVALID_CONFIG, observed.spec_error
    if observed.run.spec.suspend:
        return Reason.NOT_STARTED, "spec.suspend is true; nothing was started yet."
    name = observed.run.metadata.name
    if observed.jobset is not None:
        owner = observed.jobset.owner
        if _is_earlier_run(owner, name):
            message = f"The JobSet of an earlier TrainingRun {name} is still there."
            return Reason.WAITING_FOR_PREVIOUS, message
        whose = f"{owner.kind} {owner.name}" if owner is not None else "nobody"
        message = (
            f"A JobSet {name} exists and belongs to {whose}; it is left alone. "
            "Delete it, or give this run another name."
        )
        return Reason.NAME_CONFLICT, message
    live = sorted(pod.name for pod in observed.pods if pod.live)
    if live or observed.jobs:
        stuck = hindrance((pod for pod in observed.pods if pod.deleting), observed.now)
        message = f"Still there: {', '.join([*observed.jobs, *live][:5])}.{stuck}"
        return Reason.WAITING_FOR_PREVIOUS, message
    return None


def _is_earlier_run(owner: Owner | None, name: str) -> bool:
    if owner is None or owner.kind != KIND or owner.name != name:
        return False
    return owner.api_version.split("/")[0] == GROUP


def _not_created(
    observed: Observed, status: TrainingRunStatus, reason: Reason, message: str
) -> TrainingRunStatus:
    kind = ConditionType.CREATED
    return mark(observed, status, kind, "False", reason=reason, message=message)


def _note_refusal(observed: Observed, status: TrainingRunStatus) -> TrainingRunStatus:
    """Say what the operator may not do; without a refusal ever there is no such condition."""
    kind, refusal = ConditionType.PERMITTED, observed.refusal
    if refusal is not None:
        return mark(observed, status, kind, "False", reason=Reason.REFUSED, message=refusal)
    if find(status.conditions, kind) is None:
        return status
    message = "The API server accepts what the run needs."
    return mark(observed, status, kind, "True", reason=Reason.ACCEPTED, message=message)


def _look_again(observed: Observed, status: TrainingRunStatus) -> timedelta | None:
    """Return when something may be due that no watch tells."""
    if has_ended(status):
        stop = status.stop
        if stop is not None and not stop.confirmed:
            return KUEUE_PATIENCE
        if stop is not None and stop.override_time is not None:
            left = stop.override_time + OVERRIDE_PAUSE - observed.now
            return max(left, timedelta(seconds=1)) if left > timedelta() else None
        return None
    if current_jobset(observed, status) is None:
        return WAIT
    # Each scrape is followed by a pass; this is for a run that cannot be scraped.
    return 2 * timedelta(seconds=observed.run.spec.health.scrape_interval_seconds)
