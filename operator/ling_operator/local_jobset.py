"""A JobSet as local processes: start, suspend, restart all, fail, complete."""

import uuid
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from ling_operator.api import ATTEMPT_LABEL, METRICS_PORT_ANNOTATION
from ling_operator.pod_status import DIVERGED_EXIT_CODE, FINAL_EXIT_CODES
from ling_operator.processes import (
    LOOPBACK,
    LocalPod,
    Machine,
    Placement,
    free_port,
    free_port_offset,
    place_pod,
    start_pod,
)
from ling_operator.views import (
    JobSetView,
    Owner,
    PodView,
    parse_termination,
)
from ling_trainer.health_metrics import Signal

type Manifest = dict[str, Any]

_RESTART_EXITS = frozenset({42, 134, 143})  # no trainer is process 1 here: 139 is a crash
_STOPPED = 143


@dataclass(slots=True, kw_only=True)
class _Progress:
    """What survives a restart of this program."""

    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    suspended: bool = False
    terminal: str = ""
    failure_reason: str = ""
    failure: str = ""
    restarts: int = 0
    counted_restarts: int = 0
    running: bool = False


class LocalJobSet:
    """Carries out a JobSet manifest of one replicated Job on this machine.

    advance() moves it on; between two calls its pods stand as they were seen last, so that a
    decision is made on every end before anything is started anew.
    """

    def __init__(self, manifest: Manifest, machine: Machine, progress: _Progress) -> None:
        self.manifest = manifest
        self.pods: list[LocalPod] = []
        self._machine = machine
        self._progress = progress
        self._deleting = False

    @classmethod
    def create(cls, manifest: Manifest, machine: Machine) -> Self:
        """Make a new one; its pods start at the first advance()."""
        suspended = bool(manifest["spec"].get("suspend", False))
        return cls(manifest, machine, _Progress(suspended=suspended))

    @classmethod
    def load(cls, saved: Manifest, machine: Machine) -> Self:
        """Take up one that an earlier process left.

        Pods that ran then are gone now, told to checkpoint when that process died. What they
        wrote as their last words still counts: they may have diverged with nobody watching.
        """
        jobset = cls(saved["manifest"], machine, _Progress(**saved["progress"]))
        if jobset._progress.running:
            jobset.pods = jobset._place_all(port_offset=0, coordinator="")
            for pod in jobset.pods:
                words = parse_termination(pod.last_words())
                diverged = words is not None and words.reason in list(Signal)
                pod.exit_code = DIVERGED_EXIT_CODE if diverged else _STOPPED
        return jobset

    def dump(self) -> Manifest:
        """Return what load() takes."""
        return {"manifest": self.manifest, "progress": asdict(self._progress)}

    @property
    def uid(self) -> str:
        """Identity; a JobSet made anew has another."""
        return self._progress.uid

    @property
    def live(self) -> bool:
        """Tell whether a process may still be writing."""
        return any(pod.live for pod in self.pods)

    @property
    def deleted(self) -> bool:
        """Tell whether it and its pods are gone."""
        return self._deleting and not self.live

    def set_suspend(self, suspend: bool) -> None:
        """Pause, or go on."""
        self._progress.suspended = suspend

    def delete(self) -> None:
        """Stop every pod, then be gone."""
        self._deleting = True

    def advance(self) -> None:
        """Notice what ended, and do the next thing that follows from it."""
        for pod in self.pods:
            pod.poll()
        progress = self._progress
        if self._deleting or progress.suspended or progress.terminal:
            self._stop_all()
            progress.running = self.live
        elif not progress.running:
            self._start_all()
        elif any(pod.exit_code for pod in self.pods):
            self._stop_all()
            if not self.live:
                self._fail()
        elif not self.live:
            progress.terminal, progress.running = "Completed", False

    def view(self) -> JobSetView:
        """Show the JobSet as a cluster would."""
        metadata, progress = self.manifest["metadata"], self._progress
        owner = metadata["ownerReferences"][0]
        return JobSetView(
            name=metadata["name"],
            uid=progress.uid,
            owner=Owner(
                api_version=owner["apiVersion"],
                kind=owner["kind"],
                name=owner["name"],
                uid=owner["uid"],
            ),
            attempt=int(metadata["labels"][ATTEMPT_LABEL]),
            suspended=progress.suspended,
            terminal=progress.terminal,
            failure_reason=progress.failure_reason,
            failure=progress.failure,
            restarts=progress.restarts,
            restarting=False,
            deleting=self._deleting,
        )

    def pod_views(self) -> tuple[PodView, ...]:
        """Show the pods, ended ones included, until others take their place."""
        return tuple(pod.view() for pod in self.pods)

    def _stop_all(self) -> None:
        for pod in self.pods:
            pod.stop()

    @property
    def _job(self) -> Manifest:
        job: Manifest = self.manifest["spec"]["replicatedJobs"][0]
        return job

    @property
    def _template(self) -> Manifest:
        template: Manifest = self._job["template"]["spec"]["template"]
        return template

    @property
    def _count(self) -> int:
        return int(self._job["template"]["spec"]["parallelism"])

    def _start_all(self) -> None:
        base = int(self._template["metadata"]["annotations"][METRICS_PORT_ANNOTATION])
        offset = free_port_offset(base, self._count)
        self.pods = self._place_all(port_offset=offset, coordinator=f"{LOOPBACK}:{free_port()}")
        for pod in self.pods:
            start_pod(pod, self._template, self._machine)
        self._progress.running = True

    def _place_all(self, *, port_offset: int, coordinator: str) -> list[LocalPod]:
        return [
            place_pod(
                self._template,
                Placement(
                    job=self._job["name"],
                    job_set_uid=self.uid,
                    index=index,
                    restart=self._progress.restarts,
                    port_offset=port_offset,
                    coordinator=coordinator,
                ),
                self._machine,
            )
            for index in range(self._count)
        ]

    def _fail(self) -> None:
        """Decide between a restart and the end, as the JobSet's failure policy would."""
        progress = self._progress
        progress.running = False
        codes = [pod.exit_code or 0 for pod in self.pods]
        own = [pod.exit_code or 0 for pod in self.pods if pod.asked_to_stop is None]
        first = next((code for code in codes if code in FINAL_EXIT_CODES), None)
        if first is not None:
            self._end("FailJobSetFailurePolicyAction", f"a process ended with exit code {first}")
            return
        failed = [code for code in own or codes if code]
        if not all(code in _RESTART_EXITS for code in failed):
            progress.counted_restarts += 1
        limit = int(self.manifest["spec"]["failurePolicy"]["maxRestarts"])
        if progress.counted_restarts > limit:
            self._end("ReachedMaxRestarts", f"a process ended with exit code {failed[0]}")
            return
        progress.restarts += 1

    def _end(self, reason: str, message: str) -> None:
        progress = self._progress
        progress.terminal, progress.failure_reason, progress.failure = "Failed", reason, message
