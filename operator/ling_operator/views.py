"""The few fields of a JobSet and of its pods that decisions rest on, read from raw objects."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError

from ling_operator.api import (
    ATTEMPT_LABEL,
    METRICS_PORT_ANNOTATION,
    HealthPolicy,
    TrainingRun,
    dump,
)
from ling_operator.bounded_text import clip
from ling_trainer.schema import ConfigError

type Raw = Mapping[str, Any]

JOB_INDEX_LABEL = "jobset.sigs.k8s.io/job-index"
JOB_SET_NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
JOB_SET_UID_LABEL = "jobset.sigs.k8s.io/jobset-uid"
RESTART_ATTEMPT_LABEL = "jobset.sigs.k8s.io/restart-attempt"
COMPLETION_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
MESSAGE_BYTES = 512
TRAINER_CONTAINER = "jax-tpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The controlling owner of an object."""

    api_version: str
    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSetView:
    """One JobSet.

    Attributes:
      attempt: value of our attempt label; 0 without it.
      terminal: "Completed", "Failed" or "" while neither.
      failure: message of the Failed condition.
      restarts: JobSet's own count, resumes included.
      deleting: its deletion has begun; its Jobs and pods may still be there.
    """

    name: str
    uid: str
    owner: Owner | None
    attempt: int
    suspended: bool
    terminal: str
    failure_reason: str
    failure: str
    restarts: int
    restarting: bool
    deleting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Termination:
    """What a trainer wrote as its last words; every field may be missing."""

    reason: str | None = None
    step: int | None = None
    last_finite_step: int | None = None
    value: str | None = None
    signal: str | None = None
    process: int | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """One pod of a JobSet, of whatever attempt; also one that is gone, as last seen.

    Attributes:
      job_set: name of the JobSet; another one may have had it before.
      ip: address of its metrics; None until it runs.
      phase: Pending, Running, Succeeded, Failed or Unknown.
      ready: its trainer's container runs.
      exit_code: of the trainer's container; None while it has not ended.
      termination: its last words, None without any.
      end_reason: the kubelet's word for its end, such as OOMKilled.
      message: its last words as they stand, shortened.
      container: name of the trainer's container, the first of several.
      deleting: its deletion has begun; it is live until its phase is terminal or it is gone.
      gone: it was deleted; kept for its exit code.
      job_index: slice.
      completion_index: host of the slice.
      restart_attempt: JobSet's count of restarts when it was made.
    """

    name: str
    uid: str
    job_set: str
    job_set_uid: str
    attempt: int
    job_index: int
    completion_index: int
    restart_attempt: int
    ip: str | None
    host: str | None
    host_network: bool
    metrics_port: int
    phase: str
    ready: bool
    exit_code: int | None
    termination: Termination | None
    deleting: bool
    gone: bool = False
    end_reason: str = ""
    message: str = ""
    container: str = TRAINER_CONTAINER

    @property
    def live(self) -> bool:
        """Tell whether a process of it may still be writing."""
        return not self.gone and self.phase not in {"Succeeded", "Failed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A stored TrainingRun.

    Attributes:
      run: the object; its spec is a placeholder that starts nothing if spec_error is set.
      spec_error: why the spec cannot be read by this version of the operator.
    """

    run: TrainingRun
    spec_error: str | None = None


def view_run(raw: Raw) -> RunView:
    """Read a TrainingRun as the API server returns it, whatever its spec holds.

    A spec that this version cannot read (a newer CRD's, say) still has a status, and its run may
    still have to be stopped.

    Raises:
      ConfigError: not even metadata and status can be read.
    """
    try:
        return RunView(run=TrainingRun.parse(raw))
    except ConfigError as error:
        spec: dict[str, Any] = {
            "image": "unreadable",
            "attempt": max(_int(_map(raw, "status").get("attempt")), 1),
            "suspend": _map(raw, "spec").get("suspend") is True,
            "health": _readable_health(_map(raw, "spec")),
        }
        return RunView(run=TrainingRun.parse({**raw, "spec": spec}), spec_error=str(error))


def _readable_health(spec: Raw) -> dict[str, Any]:
    """Return what the user wants done about divergence, if at least that can be read."""
    try:
        return dump(HealthPolicy.model_validate(spec.get("health", {}), strict=True))
    except ValidationError:
        return {}


def view_jobset(raw: Raw) -> JobSetView:
    """Read a JobSet as the API server returns it."""
    metadata, status = _map(raw, "metadata"), _map(raw, "status")
    conditions = {c["type"]: c for c in _list(status, "conditions") if c.get("status") == "True"}
    failed = conditions.get("Failed", {})
    terminal = next((t for t in ("Completed", "Failed") if t in conditions), "")
    return JobSetView(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        owner=_owner(metadata),
        attempt=_int(_map(metadata, "labels").get(ATTEMPT_LABEL)),
        suspended=bool(_map(raw, "spec").get("suspend", False)),
        terminal=terminal or status.get("terminalState", ""),
        failure_reason=failed.get("reason", ""),
        failure=failed.get("message", ""),
        restarts=status.get("restarts", 0),
        restarting="RestartingJobSet" in conditions,
        deleting="deletionTimestamp" in metadata,
    )


def view_pod(raw: Raw, *, gone: bool = False) -> PodView:
    """Read a pod as the API server returns it; gone marks one from a DELETED watch event."""
    metadata, spec, status = (_map(raw, key) for key in ("metadata", "spec", "status"))
    labels, annotations = _map(metadata, "labels"), _map(metadata, "annotations")
    state = _trainer_state(status)
    ended = _map(state, "terminated")
    return PodView(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        job_set=labels.get(JOB_SET_NAME_LABEL, ""),
        job_set_uid=labels.get(JOB_SET_UID_LABEL, ""),
        attempt=_int(labels.get(ATTEMPT_LABEL)),
        job_index=_int(labels.get(JOB_INDEX_LABEL)),
        completion_index=_int(labels.get(COMPLETION_INDEX_LABEL)),
        restart_attempt=_int(labels.get(RESTART_ATTEMPT_LABEL)),
        ip=status.get("podIP"),
        host=spec.get("nodeName"),
        host_network=bool(spec.get("hostNetwork", False)),
        metrics_port=_int(annotations.get(METRICS_PORT_ANNOTATION)),
        phase=status.get("phase", "Pending"),
        ready="running" in state,
        exit_code=ended.get("exitCode"),
        termination=parse_termination(ended.get("message", "")),
        deleting="deletionTimestamp" in metadata,
        gone=gone,
        end_reason=ended.get("reason", ""),
        message=clip(ended.get("message", ""), MESSAGE_BYTES),
        container=str(trainers[0]["name"]) if trainers else TRAINER_CONTAINER,
    )


def parse_termination(text: str) -> Termination | None:
    """Read a trainer's termination message: JSON of strings; None for anything else."""
    try:
        loaded = json.loads(text)
    except ValueError:
        return None
    if not isinstance(loaded, dict):
        return None
    fields = cast("dict[str, object]", loaded)
    return Termination(
        reason=_text(fields.get("reason")),
        step=_number(fields.get("step")),
        last_finite_step=_number(fields.get("lastFiniteStep")),
        value=_text(fields.get("value")),
        signal=_text(fields.get("signal")),
        process=_number(fields.get("process")),
        message=_text(fields.get("message")),
    )


def _trainer_state(status: Raw) -> Raw:
    for container in _list(status, "containerStatuses"):
        if container.get("name") == TRAINER_CONTAINER:
            return _map(container, "state")
    return {}


def _owner(metadata: Raw) -> Owner | None:
    for reference in _list(metadata, "ownerReferences"):
        if reference.get("controller"):
            return Owner(
                api_version=reference.get("apiVersion", ""),
                kind=reference.get("kind", ""),
                name=reference.get("name", ""),
                uid=reference.get("uid", ""),
            )
    return None


def _map(raw: Raw, key: str) -> Raw:
    return raw.get(key) or {}


def _list(raw: Raw, key: str) -> list[Raw]:
    return raw.get(key) or []


def _int(text: object) -> int:
    """Read a label's number; 0 for a missing or foreign one."""
    return _number(text) or 0


def _number(value: object) -> int | None:
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _text(value: object) -> str | None:
    return value[:256] if isinstance(value, str) and value else None
