"""observe() and execute(): a run as the caches show it, and a plan carried out by the API server.

The only caller of the API server for anything but lists and watches.
"""

import logging
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from ling_operator.api import API_VERSION, GROUP, KIND, PLURAL, VERSION, TrainingRun, dump
from ling_operator.caches import JOBSET_GROUP, Caches, collection
from ling_operator.own_writes import OwnWrites
from ling_operator.plan import (
    STEADY_WRITE,
    Action,
    CreateJobSet,
    DeleteJobSet,
    Event,
    LogSource,
    LogTail,
    Observed,
    Plan,
    SetSuspend,
    SetWorkloadActive,
)
from ling_operator.pod_logs import LogReader
from ling_operator.reflector import Key
from ling_operator.rest import ApiError, JsonObject, RestClient
from ling_operator.run_view import view_run
from ling_operator.runnable import jobset_name
from ling_operator.scrape import ScrapeFailure
from ling_operator.verdict import HealthSample, Heartbeat
from ling_operator.views import view_jobset
from ling_trainer.schema import ConfigError

OLDEST_EVENT = timedelta(minutes=50)  # the API server keeps events for an hour
_NOTE_BYTES = 1024
_STEADY_WRITERS = 4
_SMOOTHING = 0.05
_REPORTER = f"{GROUP}/ling-operator"

_log = logging.getLogger(__name__)


class Cluster:
    """Reads from caches and writes to the API server, one run at a time."""

    def __init__(
        self,
        client: RestClient,
        caches: Caches,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client = client
        self._caches = caches
        self._now = now
        self._put_seconds = 0.0
        self._instance = socket.gethostname()
        self._own = OwnWrites()
        self._refused: dict[Key, tuple[int, str]] = {}
        self._denied: dict[Key, str] = {}
        self._samples: dict[Key, HealthSample] = {}
        self._problems: dict[Key, str] = {}
        self._heartbeats: dict[Key, dict[tuple[str, int], Heartbeat]] = {}
        self._told: dict[Key, set[str]] = {}
        self._log_reader = LogReader(client)
        self._logs: dict[Key, LogTail] = {}

    def record(self, key: Key, result: HealthSample | ScrapeFailure) -> None:
        """Take the outcome of a scrape: the next observation has it."""
        if isinstance(result, HealthSample):
            self._samples[key] = result
            self._problems.pop(key, None)
        else:
            self._problems[key] = result.message

    def record_heartbeat(self, key: Key, beat: Heartbeat) -> None:
        """Take a host's heartbeat."""
        if self._caches.run(key) is not None:  # or nobody would forget it
            self._heartbeats.setdefault(key, {})[beat.pod_uid, beat.container] = beat

    def heartbeats(self, key: Key) -> tuple[Heartbeat, ...]:
        """Return the heartbeats of a run's hosts; those of pods that are gone are dropped."""
        uids = {pod.uid for pod in self._caches.pods_of(key)}
        kept = {k: b for k, b in self._heartbeats.get(key, {}).items() if k[0] in uids}
        self._heartbeats[key] = kept
        return tuple(kept.values())

    async def read_log(self, key: Key, source: LogSource) -> None:
        """Read what a plan asks for, or why it cannot be read: the next observation has it."""
        self._logs[key] = await self._log_reader.tail(key[0], source)

    async def observe(self, namespace: str, name: str) -> Observed | None:
        """Return all that a decision about a run rests on; None if none is to be made.

        Raises:
          ConfigError: its status cannot be read, so nothing may be decided.
        """
        key = namespace, name
        view = self._own.newest_run(key, self._caches.run(key))
        if view is None:
            self._forget(key)
            return None
        run = view.run
        if run is None:
            raise ConfigError(view.problem)
        attempt, message = self._refused.get(key, (0, None))
        jobset = self._own.newest_jobset(key, self._caches.jobset(key))
        return Observed(
            run=run,
            spec_error=view.problem,
            jobset=jobset,
            workload=(
                self._own.newest_workload(key, self._caches.workload(key, jobset.uid))
                if jobset is not None
                else None
            ),
            other_watcher=(
                self._caches.other_watcher(key, jobset.uid) if jobset is not None else None
            ),
            pods=self._caches.pods_of(key),
            jobs=self._caches.jobs_of(key),
            sample=self._samples.get(key),
            heartbeats=self.heartbeats(key),
            scrape_problem=self._problems.get(key),
            create_error=message if attempt == run.spec.attempt else None,
            refusal=self.refusal(key),
            log=self._logs.get(key),
            steady_write=self._steady_write(),
            now=self._now(),
        )

    async def execute(self, observed: Observed, plan: Plan) -> None:
        """Write the intent, then act, then tell.

        Raises:
          ApiError: the first refusal, after everything was tried; or no answer, or a conflict,
            which means that the observation is out of date: what came after it was not tried.
        """
        key = observed.run.metadata.namespace, observed.run.metadata.name
        creates = any(isinstance(action, CreateJobSet) for action in plan.actions)
        if creates or plan.status != observed.run.status:
            await self._write_status(key, observed, plan)
            self._logs.pop(key, None)
        # Older ones are not planned any more: alerts that come and go must not pile up.
        self._told[key] = self._told.get(key, set()) & {e.name(observed.run) for e in plan.events}
        answers = [await self._try(key, observed, e) for e in (*plan.actions, *plan.events)]
        refusals = [answer for answer in answers if answer is not None]
        self._denied.pop(key, None)
        if refusals:
            if not creates:  # Created says it then
                self._denied[key] = str(refusals[0])
            raise refusals[0]

    async def _try(self, key: Key, observed: Observed, each: Action | Event) -> ApiError | None:
        """Act or tell; return a refusal, which is no reason not to tell what is in the status."""
        try:
            if isinstance(each, Event):
                await self._tell(key, observed.run, each)
            else:
                await self._act(key, observed.run, each)
        except ApiError as error:
            if not error.is_refusal:
                raise
            return error
        return None

    def refusal(self, key: Key) -> str | None:
        """Return what the API server refuses of what a run needs, creating its JobSet apart."""
        return self._denied.get(key) or self._caches.refusal(key[0])

    async def _write_status(self, key: Key, observed: Observed, plan: Plan) -> None:
        """PUT the status; a stale resourceVersion, or another object, is refused with 409."""
        metadata = observed.run.metadata
        body: JsonObject = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {
                "namespace": metadata.namespace,
                "name": metadata.name,
                "uid": metadata.uid,
                "resourceVersion": metadata.resource_version,
            },
            "status": dump(plan.status),
        }
        path = f"{_runs(metadata.namespace)}/{metadata.name}/status"
        began = time.monotonic()
        after = view_run(await self._client.put(path, body))
        self._put_seconds += _SMOOTHING * (time.monotonic() - began - self._put_seconds)
        self._own.wrote_status(key, replaced=metadata.resource_version, after=after)

    def _steady_write(self) -> timedelta:
        """Return how often progress is written: a slow API server gets fewer of such writes.

        All runs' together keep at most _STEADY_WRITERS workers, so that there are others for
        what is urgent.
        """
        seconds = len(self._caches.runs.objects) * self._put_seconds / _STEADY_WRITERS
        return max(STEADY_WRITE, timedelta(seconds=seconds))

    async def _act(self, key: Key, run: TrainingRun, action: Action) -> None:
        jobsets = collection(JOBSET_GROUP, "jobsets", run.metadata.namespace)
        path = f"{jobsets}/{jobset_name(run)}"
        log = {"run": "/".join(key), "action": type(action).__name__}
        try:
            match action:
                case CreateJobSet(manifest):
                    await self._create(key, run, jobsets, manifest)
                case SetSuspend(uid, suspend, _):
                    body = {"metadata": {"uid": uid}, "spec": {"suspend": suspend}}
                    after = await self._client.merge_patch(path, body)
                    self._own.patched(key, uid, version=_version(after), value=suspend)
                case SetWorkloadActive(name, uid, active, _):
                    body = {"metadata": {"uid": uid}, "spec": {"active": active}}
                    of_kueue = collection(self._caches.kueue_version, "workloads", key[0])
                    after = await self._client.merge_patch(f"{of_kueue}/{name}", body)
                    self._own.patched(key, uid, version=_version(after), value=active)
                case DeleteJobSet(uid, _):
                    await self._client.delete(path, uid=uid, propagation="Foreground")
        except ApiError as error:
            if error.is_not_found and not isinstance(action, CreateJobSet):
                return  # gone already, which the watch will show
            raise
        _log.info("acted", extra=log | {"reason": getattr(action, "reason", "")})

    async def _create(self, key: Key, run: TrainingRun, path: str, manifest: JsonObject) -> None:
        try:
            created = await self._client.post(path, manifest)
        except ApiError as error:
            if error.status is not None and not error.is_conflict:
                hint = "; is the JobSet controller installed?" if error.is_not_found else ""
                self._refused[key] = run.spec.attempt, error.message + hint
            raise
        self._refused.pop(key, None)
        self._own.created_jobset(key, view_jobset(created))

    async def _tell(self, key: Key, run: TrainingRun, event: Event) -> None:
        """Post an event unless the API server has it; its name is the transition's."""
        name = event.name(run)
        told = self._told.setdefault(key, set())
        if name in told or self._now() - event.time > OLDEST_EVENT:
            return
        path = collection("events.k8s.io/v1", "events", run.metadata.namespace)
        try:
            await self._client.post(path, self._event(run, event))
        except ApiError as error:
            if not error.is_conflict:
                raise
        told.add(name)

    def _event(self, run: TrainingRun, event: Event) -> JsonObject:
        metadata = run.metadata
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"namespace": metadata.namespace, "name": event.name(run)},
            "eventTime": event.time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "type": event.type,
            "reason": event.reason,
            "action": event.reason,
            "note": event.message.encode()[:_NOTE_BYTES].decode(errors="ignore"),
            "reportingController": _REPORTER,
            "reportingInstance": self._instance,
            "regarding": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "namespace": metadata.namespace,
                "name": metadata.name,
                "uid": metadata.uid,
            },
        }

    def _forget(self, key: Key) -> None:
        """Drop what is remembered of a run that is gone."""
        memories: tuple[dict[Key, Any], ...] = (
            self._refused,
            self._denied,
            self._samples,
            self._problems,
            self._heartbeats,
            self._told,
            self._logs,
        )
        for memory in memories:
            memory.pop(key, None)
        self._own.forget(key)


def _version(item: JsonObject) -> str:
    return str(item.get("metadata", {}).get("resourceVersion", ""))


def _runs(namespace: str) -> str:
    return collection(f"{GROUP}/{VERSION}", PLURAL, namespace)
