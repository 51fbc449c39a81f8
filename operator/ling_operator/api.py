"""TrainingRun v1alpha1, whole. The CRD is made of it; import what belongs to it from here."""

import difflib
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, Self

from pydantic import ConfigDict, ValidationError

from ling_operator.api_names import (
    API_VERSION,
    ATTEMPT_LABEL,
    ENDED,
    GROUP,
    KIND,
    MAX_ATTEMPTS_KEPT,
    METRICS_PORT_ANNOTATION,
    PLURAL,
    RUN_LABEL,
    SHORT_NAME,
    SINGULAR,
    TEMPLATE_HASH_ANNOTATION,
    VERSION,
    ConditionType,
    Count,
    Fragment,
    Phase,
    PositiveInt,
    Reason,
)
from ling_operator.api_spec import (
    CpuHosts,
    PodTemplate,
    TpuSlice,
    TrainingRunSpec,
    WatchedJobSet,
)
from ling_operator.api_status import (
    AttemptRecord,
    Condition,
    Evidence,
    Halt,
    Mttr,
    ProcessEnd,
    Stop,
    TrainingProgress,
    TrainingRunStatus,
)
from ling_operator.health_policy import (
    HealthPolicy,
    NonFinitePolicy,
)
from ling_operator.health_state import Alert, HealthState, SeriesState, Window
from ling_trainer.config import RunConfig
from ling_trainer.schema import ConfigError, Schema, section_type

__all__ = [
    "API_VERSION",
    "ATTEMPT_LABEL",
    "ENDED",
    "GROUP",
    "KIND",
    "MAX_ATTEMPTS_KEPT",
    "METRICS_PORT_ANNOTATION",
    "PLURAL",
    "RUN_LABEL",
    "RUN_SCHEMA",
    "SHORT_NAME",
    "SINGULAR",
    "TEMPLATE_HASH_ANNOTATION",
    "VERSION",
    "Alert",
    "AttemptRecord",
    "Condition",
    "ConditionType",
    "Count",
    "CpuHosts",
    "Evidence",
    "Fragment",
    "Halt",
    "HealthPolicy",
    "HealthState",
    "Metadata",
    "Mttr",
    "NonFinitePolicy",
    "Phase",
    "PodTemplate",
    "PositiveInt",
    "ProcessEnd",
    "Reason",
    "SeriesState",
    "Stop",
    "TpuSlice",
    "TrainingProgress",
    "TrainingRun",
    "TrainingRunSpec",
    "TrainingRunStatus",
    "WatchedJobSet",
    "Window",
    "dump",
]


_TOO_DEEP = "the object is nested too deeply; remove what spec.run has no use for"


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
        except RecursionError:
            raise ConfigError(_TOO_DEEP) from None
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
    if problem["type"] == "json_invalid":  # all of the object is its input
        return _TOO_DEEP
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
