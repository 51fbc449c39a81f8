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
    attempts: tuple[AttemptRecord, ...] = ()
