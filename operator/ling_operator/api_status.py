"""status of a TrainingRun: what the operator saw and decided."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from ling_operator.api_names import Phase, Seen
from ling_operator.health_state import HealthState


class Condition(Seen):
    """metav1.Condition."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""
    observed_generation: int = 0
    last_transition_time: datetime


class TrainingProgress(Seen):
    """Where the run is."""

    step: int = 0
    """Last finished step; the first is 1."""
    target_steps: int | None = None
    loss: str | None = None
    """learning/loss of the last step seen, as text: NaN has no place in JSON."""
    tokens_per_second: int | None = None
    estimated_completion_time: datetime | None = None
    """When the target is reached at the present pace, the median of the last 20 pages."""


class Halt(Seen):
    """Why and where a run was stopped."""

    reason: str
    step: int | None = None
    """First bad step."""
    value: str | None = None
    host: str | None = None
    """Node of the pod that showed it."""
    message: str = ""
    time: datetime
    restore_before_step: int | None = None
    """The next attempt restores a checkpoint before this step; null takes the newest."""


class Stop(Seen):
    """How far a stop that the operator decided has been carried out."""

    confirmed: bool = False
    """The JobSet was seen suspended (or at an end) after the decision."""
    override_time: datetime | None = None
    """When somebody's un-suspending was last undone."""


class ProcessEnd(Seen):
    """How one process of an attempt ended otherwise than well."""

    pod: str
    host: str | None = None
    restart: int = 0
    """The JobSet's restart that the pod belonged to."""
    exit_code: int
    reason: str | None = None
    """The kubelet's word for it, such as OOMKilled."""
    message: str | None = None
    """Termination message, at most 512 bytes: its beginning and its end."""


class Evidence(Seen):
    """What an attempt left, read before its pods were sent away."""

    time: datetime
    log_pod: str | None = None
    """Pod of process 0 that the lines are of."""
    log: tuple[str, ...] = ()
    """Last lines of process 0, at most 20 of them and 4 KiB together."""
    log_problem: str | None = None
    """Why there are no lines."""
    ended: tuple[ProcessEnd, ...] = ()
    """The first eight processes that were seen to end otherwise than well."""


class Mttr(Seen):
    """Mean time to recover, over all attempts of the run.

    The run is down from when its phase becomes Restarting, Halted or Failed, or a restart is
    counted, until a process started since has finished a step; steps that are done again count.
    Several restarts before that step are one outage, and so is a halt with the time until
    somebody raised the attempt. A pause, completion and cancellation end an outage uncounted;
    an eviction by the queue begins none.
    """

    recoveries: int = 0
    """Outages that ended."""
    total_seconds: int = 0
    mean_seconds: int | None = None
    """total_seconds / recoveries."""
    last_seconds: int | None = None
    """Length of the last one."""
    down_since: datetime | None = None
    """Begin of the present outage; null while there is none."""
    down_pod_uid: str | None = None
    """Process 0 when it began: what this one shows afterwards is no recovery."""


class AttemptRecord(Seen):
    """One attempt, for the history."""

    attempt: int
    job_set_uid: str | None = Field(
        default=None, validation_alias="jobSetUID", serialization_alias="jobSetUID"
    )
    reason: str | None = None
    """Why it ended; null while it runs."""
    first_step: int | None = None
    last_step: int | None = None
    start_time: datetime
    end_time: datetime | None = None
    evidence: Evidence | None = None
    """Kept of an attempt that was halted or failed; in full for the newest three."""


class TrainingRunStatus(Seen):
    """What the operator saw and decided."""

    observed_generation: int = 0
    phase: Phase = Phase.PENDING
    attempt: int = 0
    """Attempt that the rest of the status is about; 0 before the first."""
    job_set_uid: str | None = Field(
        default=None, validation_alias="jobSetUID", serialization_alias="jobSetUID"
    )
    restarts: int = 0
    """Restarts of the attempt; a resume is none."""
    restarts_without_progress: int = 0
    job_set_restarts: int = 0
    """JobSet's own count when last seen; it counts resumes too."""
    conditions: tuple[Condition, ...] = ()
    training: TrainingProgress = TrainingProgress()
    health: HealthState = HealthState()
    halt: Halt | None = None
    stop: Stop | None = None
    last_finite_checkpoint: int | None = None
    restore_before_step: int | None = None
    pods_after: datetime | None = None
    """With spec.watch: pods of the JobSet created up to then belong to earlier attempts."""
    mttr: Mttr = Mttr()
    attempts: tuple[AttemptRecord, ...] = ()
