"""What a decision is made of, and what it may order: Observed, Plan, the actions, events."""

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from ling_operator.api import TrainingRun, TrainingRunStatus
from ling_operator.verdict import HealthSample, Heartbeat
from ling_operator.views import JobSetView, PodView
from ling_operator.workload import WorkloadView

type Manifest = dict[str, Any]

_NAME_LENGTH = 253 - 17  # a run that only watches may have a name as long as any object's
STEADY_WRITE = timedelta(seconds=10)
"""Progress alone is written this often, where the API server keeps up."""


@dataclass(frozen=True, slots=True)
class LogSource:
    """A pod whose output to read."""

    pod: str
    uid: str
    container: str


@dataclass(frozen=True, slots=True)
class LogTail:
    """The last lines of a pod's output.

    Attributes:
      uid: the pod's.
      problem: why there are no lines; None where there are.
    """

    uid: str
    lines: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All that a decision may depend on. If it is not here, it does not count.

    Attributes:
      run: the object, with the status last written.
      spec_error: why its spec could not be read (then run.spec is a placeholder); else None.
      jobset: the JobSet of the run's name, or the one it watches, whoever owns it; None without.
      workload: the Kueue Workload of exactly that JobSet; None outside a queue.
      other_watcher: another TrainingRun that watches that JobSet, before this one.
      pods: every pod of JobSets of that name, of any attempt; also those gone, while remembered.
      jobs: names of the Jobs with the label jobset-name that still exist.
      sample: the newest page of the run's metrics; None before the first.
      heartbeats: of all hosts, as last read.
      scrape_problem: why there is no newer page, for the message of a condition.
      create_error: what the API server said to the last refused CreateJobSet of this attempt.
      refusal: what else it refuses that this run needs, and its words; None if nothing.
      log: of the pod that an earlier plan asked for, if it was just read; else None.
      steady_write: how long progress alone waits for its write.
      now: the time of the decision.
    """

    run: TrainingRun
    spec_error: str | None = None
    jobset: JobSetView | None = None
    workload: WorkloadView | None = None
    other_watcher: str | None = None
    pods: tuple[PodView, ...] = ()
    jobs: tuple[str, ...] = ()
    sample: HealthSample | None = None
    heartbeats: tuple[Heartbeat, ...] = ()
    scrape_problem: str | None = None
    create_error: str | None = None
    refusal: str | None = None
    log: LogTail | None = None
    steady_write: timedelta = STEADY_WRITE
    now: datetime


@dataclass(frozen=True, slots=True)
class CreateJobSet:
    """POST the JobSet; 409 means observe again.

    The status is written before it even when nothing in it changed: the resourceVersion proves
    that the object seen is the newest, so that a deleted JobSet is not made anew from an old one.
    """

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class SetSuspend:
    """Patch spec.suspend of the JobSet with this uid."""

    uid: str
    suspend: bool
    reason: str


@dataclass(frozen=True, slots=True)
class DeleteJobSet:
    """Delete the JobSet with this uid, in the foreground: gone means that its pods are gone."""

    uid: str
    reason: str


@dataclass(frozen=True, slots=True)
class SetWorkloadActive:
    """Patch spec.active of the Kueue Workload with this name and uid."""

    name: str
    uid: str
    active: bool
    reason: str


type Action = CreateJobSet | SetSuspend | DeleteJobSet | SetWorkloadActive


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A transition told to people. A later pass plans it again; its name makes it one event.

    Attributes:
      time: of the transition; with uid, attempt and reason it makes the name.
    """

    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    attempt: int
    time: datetime

    def name(self, run: TrainingRun) -> str:
        """Return the object's name: the same for the same transition, however often planned."""
        key = f"{run.metadata.uid}/{self.attempt}/{self.reason}/{self.time.isoformat()}"
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        return f"{run.metadata.name[:_NAME_LENGTH].rstrip('-')}.{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do: write status (unless it equals the one observed), act, then tell.

    Attributes:
      status: the whole new status.
      actions: at most one, executed after the status write succeeded.
      events: posted after the actions, each until the API server has it.
      requeue_after: look again then, even if nothing changes; None waits for a change.
      read_log: read this log, if it can be had at once, and decide again with it: what the plan
        does would take it away. A plan is whole without it.
    """

    status: TrainingRunStatus
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after: timedelta | None = None
    read_log: LogSource | None = None
