"""Names of the TrainingRun API: group, labels, phases, condition types, reasons, shared types."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from ling_trainer.schema import Schema

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


ENDED = frozenset({Phase.HALTED, Phase.COMPLETE, Phase.FAILED, Phase.CANCELLED})
"""Phases that only a raised attempt leaves."""


class ConditionType(StrEnum):
    """Types written to status.conditions."""

    CREATED = "Created"
    ADMITTED = "Admitted"
    PODS_READY = "PodsReady"
    PROGRESSING = "Progressing"
    PERMITTED = "Permitted"
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
    JOB_SET_FOUND = "JobSetFound"
    JOB_SET_NOT_FOUND = "JobSetNotFound"
    NOT_STARTED = "NotStarted"

    REFUSED = "Refused"
    ACCEPTED = "Accepted"

    ADMITTED = "Admitted"
    NO_WORKLOAD = "NoWorkload"
    WAITING_FOR_QUOTA = "WaitingForQuota"
    EVICTED = "Evicted"
    DEACTIVATED = "Deactivated"

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
    LOSS_SPIKE = "LossSpike"
    GRAD_NORM_SPIKE = "GradNormSpike"
    ZERO_GRADIENTS = "ZeroGradients"
    LOSS_MASK_COLLAPSE = "LossMaskCollapse"
    ZERO_LOSS = "ZeroLoss"
    STALLED = "Stalled"
    STRAGGLER_HOST = "StragglerHost"

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


class Seen(Schema):
    """Base of status: an operator that is rolled back reads what a newer one wrote."""

    model_config = ConfigDict(extra="ignore")
