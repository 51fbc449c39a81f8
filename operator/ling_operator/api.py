"""TrainingRun v1alpha1: what a user asks for, and what the operator saw. The CRD is made of it."""

import difflib
import json
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError

from ling_trainer.config import RunConfig
from ling_trainer.schema import ConfigError, Schema, section_type

GROUP = "ling.primatrix.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "TrainingRun"
PLURAL = "trainingruns"
SINGULAR = "trainingrun"
SHORT_NAME = "trun"
RUN_LABEL = f"{GROUP}/run"
ATTEMPT_LABEL = f"{GROUP}/attempt"
METRICS_PORT_ANNOTATION = f"{GROUP}/metrics-port"
TEMPLATE_HASH_ANNOTATION = f"{GROUP}/template-hash"
MAX_ATTEMPTS_KEPT = 10

type PositiveInt = Annotated[int, Field(ge=1)]
type Count = Annotated[int, Field(ge=0)]
type Fragment = dict[str, Any]
"""A piece of a Kubernetes object, passed on as written; the API server checks it in the pod."""


class Phase(StrEnum):
    """One word for a run, by precedence: the first of these that holds."""

    HALTED = "Halted"
    COMPLETE = "Complete"
    FAILED = "Failed"
    CANCELLED = "Cancelled"
    SUSPENDED = "Suspended"
    RESTARTING = "Restarting"
    RUNNING = "Running"
    STARTING = "Starting"
    QUEUED = "Queued"
    PENDING = "Pending"


class ConditionType(StrEnum):
    """Types written to status.conditions."""

    CREATED = "Created"
    PODS_READY = "PodsReady"
    PROGRESSING = "Progressing"
    METRICS_AVAILABLE = "MetricsAvailable"
    HEALTHY = "Healthy"
    SUSPENDED = "Suspended"
    HALTED = "Halted"
    COMPLETE = "Complete"
    FAILED = "Failed"


class Reason(StrEnum):
    """Reasons that the operator gives; a trainer's own reason may stand in Halted and Failed."""

    JOB_SET_CREATED = "JobSetCreated"
    CREATING = "Creating"
    CREATE_FAILED = "CreateFailed"
    INVALID_CONFIG = "InvalidConfig"
    NAME_CONFLICT = "NameConflict"
    WAITING_FOR_PREVIOUS = "WaitingForPrevious"
    JOB_SET_DELETED = "JobSetDeleted"
    NOT_STARTED = "NotStarted"

    PODS_RUNNING = "PodsRunning"
    PODS_PENDING = "PodsPending"
    NO_PODS = "NoPods"

    STEP_ADVANCED = "StepAdvanced"
    NO_STEP_YET = "NoStepYet"

    SCRAPED = "Scraped"
    METRICS_MISSING = "MetricsMissing"
    NO_SAMPLE_YET = "NoSampleYet"

    HEALTHY = "Healthy"
    NON_FINITE_LOSS = "NonFiniteLoss"
    NON_FINITE_GRADIENT = "NonFiniteGradient"
    DIVERGED = "Diverged"

    SUSPEND_REQUESTED = "SuspendRequested"
    SUSPENDING = "Suspending"
    RESUMING = "Resuming"
    RESUMED = "Resumed"
    HALT_OVERRIDDEN = "HaltOverridden"

    FINISHED = "Finished"
    CONFIGURATION_ERROR = "ConfigurationError"
    DATA_ERROR = "DataError"
    CHECKPOINT_ERROR = "CheckpointError"
    METRICS_PORT_TAKEN = "MetricsPortTaken"
    RESTARTS_EXHAUSTED = "RestartsExhausted"
    JOB_SET_FAILED = "JobSetFailed"
    NO_PROGRESS = "NoProgress"
    SUPERSEDED = "Superseded"


class TpuSlice(Schema):
    """TPU slices, all of one shape."""

    accelerator: Annotated[str, Field(min_length=1, max_length=63)]
    """GKE's label value (tpu-v5p-slice) or a type that names the size too (v5p-32)."""
    topology: Annotated[str, Field(pattern=r"^[0-9]+x[0-9]+(x[0-9]+)?$", max_length=15)] | None = (
        None
    )
    """Chips along each axis, such as 2x4 or 2x2x4. A type like v5p-32 needs none."""
    slices: Annotated[int, Field(ge=1, le=1024)] = 1
    """Slices joined over the data-centre network."""


class CpuHosts(Schema):
    """Processes on CPU hosts: tests, drills and small models."""

    processes: Annotated[int, Field(ge=1, le=1024)] = 1
    """Trainer processes, each a pod of its own."""


class WatchedJobSet(Schema):
    """A JobSet that somebody else launched. Reserved: this version refuses it."""

    job_set: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of the JobSet."""


class NonFinitePolicy(Schema):
    """What follows a NaN or an infinity in the loss or in the gradients."""

    consecutive_steps: PositiveInt = 1
    """Non-finite steps in a row that make the run diverged."""
    action: Literal["Halt", "Alert", "Ignore"] = "Halt"
    """Halt stops the run; Alert only sets the condition Healthy to False; Ignore looks away."""


class HealthPolicy(Schema):
    """When a run is stopped. Thresholds act at once; trainerStops from the next attempt on."""

    scrape_interval_seconds: Annotated[int, Field(ge=1, le=3600)] = 5
    """Seconds between two reads of the trainer's metrics."""
    trainer_stops: bool = True
    """The trainer itself stops after nonFinite.consecutiveSteps, without waiting for a scrape."""
    non_finite: NonFinitePolicy = NonFinitePolicy()


class PodTemplate(Schema):
    """What the pods have besides the trainer. Lists and objects are Kubernetes' own."""

    env: tuple[Fragment, ...] = ()
    """Environment variables of the trainer's container."""
    resources: Fragment = Field(default_factory=dict[str, Any])
    """Requests and limits; google.com/tpu is set by the operator."""
    volumes: tuple[Fragment, ...] = ()
    volume_mounts: tuple[Fragment, ...] = ()
    """Mounts of the trainer's container."""
    service_account_name: str | None = None
    host_network: bool = False
    """Share the node's network; one trainer a node then, since its metrics port is the node's."""
    privileged: bool = False
    termination_grace_period_seconds: Annotated[int, Field(ge=1)] = 300
    """Seconds from SIGTERM to SIGKILL; must outlast a checkpoint."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    image_pull_secrets: tuple[Fragment, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict[str, str])
    """Labels of the JobSet and its pods."""
    annotations: dict[str, str] = Field(default_factory=dict[str, str])
    """Annotations of the JobSet and its pods."""
    tolerations: tuple[Fragment, ...] = ()
    priority_class_name: str | None = None
    node_selector: dict[str, str] = Field(default_factory=dict[str, str])
    init_containers: tuple[Fragment, ...] = ()
    sidecars: tuple[Fragment, ...] = ()
    """Containers beside the trainer's."""
    ttl_seconds_after_finished: Count | None = None
    """Seconds after its end when the JobSet is deleted; null keeps it."""


class TrainingRunSpec(Schema):
    """What the user asks for. Fixed when an attempt starts, but for suspend and health."""

    suspend: bool = False
    """Pause: pods checkpoint and leave; false goes on from there."""
    attempt: PositiveInt = 1
    """Raise it to start again, from the last good checkpoint, after a halt, failure or edit."""
    image: Annotated[str, Field(min_length=1)]
    """Container image of the trainer."""
    command: tuple[str, ...] = ()
    """Entry point, exec form; empty is `python3 -m ling_trainer`."""
    args: tuple[str, ...] = ()
    """Arguments of the entry point; key=value overrides for ling_trainer."""
    tpu: TpuSlice | None = None
    """Run on TPU slices. This or cpu."""
    cpu: CpuHosts | None = None
    """Run on CPU hosts. This or tpu."""
    watch: WatchedJobSet | None = None
    """Reserved: this version refuses it."""
    run: Fragment = Field(default_factory=dict[str, Any])
    """Settings of the trainer: a preset and what differs from it."""
    queue: str | None = None
    """Reserved for Kueue's queue name: this version refuses it."""
    restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """Crashes survived; a lost peer or a preempted host is restarted without being counted."""
    health: HealthPolicy = HealthPolicy()
    template: PodTemplate = PodTemplate()


class _Seen(Schema):
    """Base of status: an operator that is rolled back reads what a newer one wrote."""

    model_config = ConfigDict(extra="ignore")


class Condition(_Seen):
    """metav1.Condition."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""
    observed_generation: int = 0
    last_transition_time: datetime


class TrainingProgress(_Seen):
    """Where the run is."""

    step: int = 0
    """Last finished step; the first is 1."""
    target_steps: int | None = None
    loss: str | None = None
    """learning/loss of the last step seen, as text: NaN has no place in JSON."""
    tokens_per_second: int | None = None


class HealthState(_Seen):
    """The fold over samples: all that verdicts rest on, so that a restart forgets nothing."""

    pod_uid: str | None = None
    """Pod of the process that the counters below belong to."""
    sample_time: datetime | None = None
    """When the last page was read."""
    progress_time: datetime | None = None
    """When a page first showed the current step."""
    step: int = 0
    """Last finished step of the last page."""
    highest_step: int = 0
    """Highest step of the attempt, restarts included."""
    nonfinite_steps: int = 0
    """Non-finite steps of the attempt, each counted once."""
    process_nonfinite_steps: int = 0
    """Those of the current process."""
    nonfinite_row: int = 0
    """Non-finite steps in a row up to the last one seen."""
    longest_nonfinite_row: int = 0
    """Longest row of the current process."""
    first_nonfinite_step: int | None = None
    """First step of the last row."""
    last_nonfinite_step: int | None = None
    last_finite_step: int = 0
    signal: str | None = None
    """NonFiniteLoss or NonFiniteGradient."""
    value: str | None = None
    """nan or inf."""


class Halt(_Seen):
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


class Stop(_Seen):
    """How far a stop that the operator decided has been carried out."""

    confirmed: bool = False
    """The JobSet was seen suspended (or at an end) after the decision."""
    override_time: datetime | None = None
    """When somebody's un-suspending was last undone."""


class AttemptRecord(_Seen):
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


class TrainingRunStatus(_Seen):
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


class Metadata(Schema):
    """The part of ObjectMeta that decisions read."""

    model_config = ConfigDict(extra="ignore")

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 1
    resource_version: str = ""
    deletion_timestamp: datetime | None = None


class TrainingRun(Schema):
    """A pre-training run on TPU slices or CPU hosts, stopped when it diverges."""

    api_version: Literal["ling.primatrix.io/v1alpha1"] = "ling.primatrix.io/v1alpha1"
    kind: Literal["TrainingRun"] = "TrainingRun"
    metadata: Metadata
    spec: TrainingRunSpec
    status: TrainingRunStatus = TrainingRunStatus()

    @classmethod
    def parse(cls, manifest: Mapping[str, Any]) -> Self:
        """Read an object as YAML or the API server gives it.

        Raises:
          ConfigError: an unknown key, a wrong type or a value out of bounds; a line for each.
        """
        try:
            text = json.dumps(manifest, default=str, allow_nan=False)
        except ValueError:
            raise ConfigError("NaN and infinities have no place in a TrainingRun") from None
        try:
            return cls.model_validate_json(text, strict=True)
        except ValidationError as error:
            lines = [_describe(problem) for problem in error.errors(include_url=False)]
            raise ConfigError("\n".join(lines)) from None

    def dump_status(self) -> Fragment:
        """Return the status as the API server stores it: camelCase, absent instead of null."""
        return dump(self.status)


def dump(part: Schema) -> Fragment:
    """Return a part of an object as JSON values: camelCase, absent instead of null."""
    return part.model_dump(mode="json", by_alias=True, exclude_none=True)


def _describe(problem: Mapping[str, Any]) -> str:
    """Render a problem in the names of the YAML file, with a near name for an unknown key."""
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"{path} is not set; give it a value"
    if problem["type"] != "extra_forbidden":
        text = str(problem["msg"])
        return f"{path}={problem['input']!r}: {text[:1].lower()}{text[1:]}"
    schema: type[Schema] | None = TrainingRun
    for part in problem["loc"][:-1]:
        fields = schema.model_fields.values() if schema else ()
        schema = next((section_type(f.annotation) for f in fields if f.alias == part), None)
    known = [str(field.alias) for field in schema.model_fields.values()] if schema else []
    near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
    return f"{path} is not a field; {hint}"


RUN_SCHEMA = RunConfig
"""Class behind spec.run, for the CRD's properties and for the operator's own validation."""
