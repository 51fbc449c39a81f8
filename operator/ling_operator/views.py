"""The few fields of a JobSet and of its pods that decisions rest on, read from raw objects."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from ling_operator.api import ATTEMPT_LABEL, METRICS_PORT_ANNOTATION
from ling_operator.bounded_text import clip, printable
from ling_operator.pod_status import (
    DIVERGED_EXIT_CODE,
    gravest_end,
    is_disrupted,
    problem_of,
)
from ling_operator.workload import QUEUE_LABEL
from ling_trainer.health_metrics import Signal

type Raw = Mapping[str, Any]

JOB_INDEX_LABEL = "jobset.sigs.k8s.io/job-index"
JOB_GLOBAL_INDEX_LABEL = "jobset.sigs.k8s.io/job-global-index"
JOB_SET_NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
JOB_SET_UID_LABEL = "jobset.sigs.k8s.io/jobset-uid"
RESTART_ATTEMPT_LABEL = "jobset.sigs.k8s.io/restart-attempt"
COMPLETION_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
MESSAGE_BYTES = 512
TRAINER_CONTAINER = "jax-tpu"
"""Name of the trainer's container; several of a pod are jax-tpu-1, jax-tpu-2, as XPK has them."""
_DIVERGENCE_SIGNALS = frozenset(map(str, Signal))


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
      queue: of Kueue's label; "" without one.
      hosts: pods that it runs at once.
      version: its resourceVersion.
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
    queue: str = ""
    hosts: int = 0
    version: str = ""


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
      metrics_port: of its first trainer container; the others' follow.
      containers: of the trainer.
      ready: they run.
      exit_code: of the trainer's container; None while it has not ended. Of several the gravest:
        divergence first, then what no restart helps; 0 only when all have ended so.
      termination: its last words, None without any.
      end_reason: the kubelet's word for its end, such as OOMKilled.
      message: its last words as they stand, shortened.
      problem: why it does not run, in the scheduler's or the kubelet's words; "" without one.
      disrupted: it was taken away: preempted, drained, its node lost. A node short of memory or
        disk does not count: that may be the trainer's own doing.
      container: name of the trainer's container, the first of several.
      deleting: its deletion has begun; it is live until its phase is terminal or it is gone.
      ends_by: when it will have been killed, while it is deleting.
      gone: it was deleted; kept for its exit code.
      created: when, by the API server's clock.
      job_index: slice; of a JobSet with several replicated Jobs, the Job's place among them all.
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
    created: datetime | None = None
    gone: bool = False
    end_reason: str = ""
    message: str = ""
    problem: str = ""
    disrupted: bool = False
    ends_by: datetime | None = None
    container: str = TRAINER_CONTAINER
    containers: int = 1

    @property
    def diverged(self) -> bool:
        """Tell whether its trainer stopped itself: by its code, or killed after it said so.

        A diverged trainer lingers, so that its page is read; what ends it there is not why.
        """
        said = self.termination is not None and self.termination.signal in _DIVERGENCE_SIGNALS
        return self.exit_code == DIVERGED_EXIT_CODE or (said and self.exit_code not in {None, 0})

    @property
    def live(self) -> bool:
        """Tell whether a process of it may still be writing."""
        return not self.gone and self.phase not in {"Succeeded", "Failed"}


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
        queue=_map(metadata, "labels").get(QUEUE_LABEL, ""),
        version=metadata.get("resourceVersion", ""),
        hosts=sum(
            int(job.get("replicas", 1))
            * int(_map(_map(job, "template"), "spec").get("parallelism", 1))
            for job in _list(_map(raw, "spec"), "replicatedJobs")
        ),
    )


def view_pod(raw: Raw, *, gone: bool = False) -> PodView:
    """Read a pod as the API server returns it; gone marks one from a DELETED watch event."""
    metadata, spec, status = (_map(raw, key) for key in ("metadata", "spec", "status"))
    labels, annotations = _map(metadata, "labels"), _map(metadata, "annotations")
    trainers = [name for name in _names(spec, "containers") if is_trainer(name)]
    # A pod of somebody else's image may call its containers as it likes: any may be the trainer.
    candidates = trainers or _names(spec, "containers") or _names(status, "containerStatuses")
    states = [
        _map(container, "state")
        for container in _list(status, "containerStatuses")
        if container.get("name") in candidates
    ]
    ended = gravest_end(states)
    running = ["running" in state for state in states]
    return PodView(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        job_set=labels.get(JOB_SET_NAME_LABEL, ""),
        job_set_uid=labels.get(JOB_SET_UID_LABEL, ""),
        attempt=_int(labels.get(ATTEMPT_LABEL)),
        job_index=_int(labels.get(JOB_GLOBAL_INDEX_LABEL, labels.get(JOB_INDEX_LABEL))),
        completion_index=_int(labels.get(COMPLETION_INDEX_LABEL)),
        restart_attempt=_int(labels.get(RESTART_ATTEMPT_LABEL)),
        ip=status.get("podIP"),
        host=spec.get("nodeName"),
        host_network=bool(spec.get("hostNetwork", False)),
        metrics_port=_int(annotations.get(METRICS_PORT_ANNOTATION)),
        phase=status.get("phase", "Pending"),
        ready=bool(running) and (all(running) if trainers else any(running)),
        exit_code=ended.get("exitCode"),
        termination=parse_termination(ended.get("message", "")),
        deleting="deletionTimestamp" in metadata,
        created=_time(metadata.get("creationTimestamp")),
        gone=gone,
        end_reason=ended.get("reason", ""),
        message=clip(ended.get("message", ""), MESSAGE_BYTES),
        problem=clip(problem_of(status), MESSAGE_BYTES // 2),
        disrupted=is_disrupted(status),
        ends_by=_time(metadata.get("deletionTimestamp")),
        container=candidates[0] if candidates else TRAINER_CONTAINER,
        containers=max(len(trainers), 1),
    )


def parse_termination(text: str) -> Termination | None:
    """Read a trainer's termination message: JSON of strings; None for anything else."""
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError):  # 4 KiB of brackets are deeper than the parser goes
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


def is_trainer(container: str) -> bool:
    """Tell whether a container of this name is the trainer's, or one of the trainer's."""
    return re.fullmatch(rf"{TRAINER_CONTAINER}(-[0-9]+)?", container) is not None


def _names(part: Raw, key: str) -> list[str]:
    return [str(container.get("name")) for container in _list(part, key)]


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


def _time(value: object) -> datetime | None:
    try:
        return datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _text(value: object) -> str | None:
    return printable(value)[:256] or None if isinstance(value, str) else None
