"""What the API server last said about runs, JobSets, Jobs and pods, found by the run's key.

Pods, Jobs and Workloads are found by the name of their JobSet, which is the run's own name, or
the one that spec.watch gives: JobSets that others launched have no label of ours.
"""

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ling_operator.api import GROUP, PLURAL, VERSION
from ling_operator.progress import heartbeat_targets, metrics_port_of, scrape_target
from ling_operator.reflector import Change, Key, Reflector
from ling_operator.reflectors import Path, Reflectors
from ling_operator.rest import JsonObject, RestClient
from ling_operator.run_view import RunView, view_run
from ling_operator.scrape_jobs import ScrapeJob, build_scrape_job
from ling_operator.views import JOB_SET_NAME_LABEL, JobSetView, PodView, view_jobset, view_pod
from ling_operator.watch_index import WatchIndex
from ling_operator.workload import KUEUE_GROUP, WorkloadView, view_workload

JOBSET_GROUP = "jobset.x-k8s.io/v1alpha2"
_GONE_PODS_KEPT = 64
_ORDINARY_EXITS = frozenset({None, 0, 143})


def collection(group_version: str, plural: str, namespace: str | None) -> str:
    """Return the path of a kind's objects: of a namespace, or of all for None."""
    root = "/api/v1" if group_version == "v1" else f"/apis/{group_version}"
    return f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"


class Caches:
    """The watched kinds. Any change of a run, or of what belongs to it, calls wake(key).

    Args:
      namespaces: to watch; none for all. One that cannot be listed, for want of a right, keeps
        none of the others waiting.

    Attributes:
      runs: TrainingRuns, parsed once a change.
      jobsets: all JobSets of the namespaces watched, others' too: a name may be taken.
      jobs: the JobSet's name of each Job of a JobSet.
      pods: pods of JobSets, others' too.
      kueue_version: group and version of Workloads; empty while Kueue was not found.
      workloads: Kueue's Workloads; none where Kueue is not installed.
      reflectors: of each namespace all five, to be run and asked for their age.
    """

    def __init__(
        self, client: RestClient, *, namespaces: Sequence[str], wake: Callable[[Key], None]
    ) -> None:
        self._wake_worker = wake
        self._synced = asyncio.Event()
        self._index = WatchIndex()
        self._pods: dict[Key, dict[str, PodView]] = {}
        self._gone: dict[Key, dict[str, PodView]] = {}
        self._jobs: dict[Key, set[str]] = {}
        self._workloads: dict[Key, dict[str, WorkloadView]] = {}
        self.kueue_version = ""

        def watch[T](
            kind: str,
            path: Callable[[str | None], Path],
            view: Callable[[JsonObject], T],
            on_change: Callable[[Change[T]], None],
            label_selector: str | None = None,
        ) -> Reflectors[T]:
            return Reflectors(
                client,
                namespaces,
                path,
                kind=kind,
                view=view,
                on_change=on_change,
                on_synced=self._kind_synced,
                label_selector=label_selector,
            )

        runs = functools.partial(collection, f"{GROUP}/{VERSION}", PLURAL)
        jobsets = functools.partial(collection, JOBSET_GROUP, "jobsets")
        jobs = functools.partial(collection, "batch/v1", "jobs")
        pods = functools.partial(collection, "v1", "pods")
        self.runs = watch(PLURAL, runs, view_run, self._run_changed)
        self.jobsets = watch("jobsets", jobsets, view_jobset, self._jobset_changed)
        self.jobs = watch("jobs", jobs, _jobset_name, self._job_changed, JOB_SET_NAME_LABEL)
        self.pods = watch("pods", pods, view_pod, self._pod_changed, JOB_SET_NAME_LABEL)
        self.workloads = watch(
            "workloads",
            lambda namespace: functools.partial(self._find_workloads, client, namespace),
            view_workload,
            self._workload_changed,
        )
        kinds = (self.runs, self.jobsets, self.jobs, self.pods, self.workloads)
        self._reflectors: dict[str | None, tuple[Reflector[Any], ...]] = {
            namespace: tuple(kind.each[namespace] for kind in kinds)
            for namespace in self.runs.each
        }
        self.reflectors = tuple(each for of in self._reflectors.values() for each in of)

    async def synced(self) -> None:
        """Wait until every kind of one namespace has been listed: see run for the others'."""
        await self._synced.wait()

    def refusal(self, namespace: str) -> str | None:
        """What the API server says to the first kind that may not be listed or watched there."""
        refusals = (each.refusal for each in self._reflectors_of(namespace))
        return next((said for said in refusals if said is not None), None)

    def run(self, key: Key) -> RunView | None:
        """Return a TrainingRun; None while deciding would miss something not listed yet."""
        return self.runs.objects.get(key) if self._is_listed(key[0]) else None

    def jobset_key(self, key: Key) -> Key:
        """Return namespace and name of a run's JobSet: of its own name, or the one it watches."""
        return self._index.jobset_of(key)

    def jobset(self, key: Key) -> JobSetView | None:
        """Return the JobSet of the name that a run's has, whoever owns it."""
        return self.jobsets.objects.get(self.jobset_key(key))

    def other_watcher(self, key: Key, jobset_uid: str) -> str | None:
        """Return the name of another run that watches a run's JobSet; None if that may itself."""
        return self._index.other_watcher(key, jobset_uid, self.runs.objects)

    def workload(self, key: Key, jobset_uid: str) -> WorkloadView | None:
        """Return the Workload of exactly this JobSet, not of an earlier one of its name."""
        return self._workloads.get(self.jobset_key(key), {}).get(jobset_uid)

    def pods_of(self, key: Key) -> tuple[PodView, ...]:
        """Return a run's pods, and those gone that ended in a way that matters."""
        of = self.jobset_key(key)
        return (*self._pods.get(of, {}).values(), *self._gone.get(of, {}).values())

    def jobs_of(self, key: Key) -> tuple[str, ...]:
        """Return the names of a run's Jobs."""
        return tuple(sorted(self._jobs.get(self.jobset_key(key), ())))

    def scrape_seconds(self, key: Key) -> float:
        """Return the interval of a run's scrapes; 0 without such a run."""
        view = self.runs.objects.get(key)
        run = view.run if view is not None else None
        return float(run.spec.health.scrape_interval_seconds) if run is not None else 0.0

    def scrape_job(self, key: Key) -> ScrapeJob | None:
        """Say where to read a run's metrics; None unless its process 0 runs and has an address."""
        view, pods = self.run(key), self._pods.get(self.jobset_key(key))
        if view is None or view.run is None or not pods:
            return None
        pod = scrape_target(view.run, tuple(pods.values()))
        if pod is None:
            return None
        port = metrics_port_of(view.run, pod)
        return build_scrape_job(key, pod, interval_seconds=self.scrape_seconds(key), port=port)

    def heartbeat_jobs(self, key: Key, interval_seconds: float) -> tuple[ScrapeJob, ...]:
        """Say where to read the heartbeats of a run's hosts; none for a run of one process."""
        view, pods = self.run(key), self._pods.get(self.jobset_key(key))
        if view is None or view.run is None or not pods:
            return ()
        targets = heartbeat_targets(view.run, tuple(pods.values()))
        jobs = (
            build_scrape_job(
                key,
                pod,
                interval_seconds=interval_seconds,
                port=metrics_port_of(view.run, pod),
                container=container,
            )
            for pod in targets
            for container in range(pod.containers)
        )
        found = tuple(job for job in jobs if job is not None)
        return found if len(found) > 1 else ()

    async def _find_workloads(self, client: RestClient, namespace: str | None) -> str:
        """Return where Workloads are, in the version that the API server prefers.

        Versions come and go with Kueue's releases, and one that is not the preferred one may
        refuse what another wrote.

        Raises:
          ApiError: Kueue is not installed (404), or no answer.
        """
        group = await client.get(f"/apis/{KUEUE_GROUP}")
        self.kueue_version = str(group["preferredVersion"]["groupVersion"])
        return collection(self.kueue_version, "workloads", namespace)

    def _reflectors_of(self, namespace: str | None) -> tuple[Reflector[Any], ...]:
        return self._reflectors[None if None in self._reflectors else namespace]

    def _is_listed(self, namespace: str | None) -> bool:
        return all(each.synced.is_set() for each in self._reflectors_of(namespace))

    def _kind_synced(self, namespace: str | None) -> None:
        """Begin with a namespace's runs when the last of its kinds has been listed."""
        if self._is_listed(namespace):
            self._synced.set()
            for key in self.runs.each[namespace].objects:
                self._wake(key)

    def _wake(self, key: Key) -> None:
        if self._is_listed(key[0]):
            self._wake_worker(key)

    def _run_changed(self, change: Change[RunView]) -> None:
        of = self.jobset_key(change.key)
        self._index.note(change.key, None if change.deleted else change.object.run)
        if not self._runs_of(of):
            self._gone.pop(of, None)
        self._wake(change.key)

    def _runs_of(self, jobset: Key) -> tuple[Key, ...]:
        return self._index.runs_of(jobset, self.runs.objects)

    def _wake_runs_of(self, jobset: Key) -> None:
        for key in self._runs_of(jobset):
            self._wake(key)

    def _jobset_changed(self, change: Change[JobSetView]) -> None:
        self._wake_runs_of(change.key)

    def _job_changed(self, change: Change[str]) -> None:
        key = change.key[0], change.object
        names = self._jobs.setdefault(key, set())
        if change.deleted:
            names.discard(change.key[1])
        else:
            names.add(change.key[1])
        if not names:
            del self._jobs[key]
        self._wake_runs_of(key)

    def _workload_changed(self, change: Change[WorkloadView]) -> None:
        workload = change.object
        key = change.key[0], workload.owner
        of_name = self._workloads.setdefault(key, {})
        if change.deleted:
            of_name.pop(workload.owner_uid, None)
        elif workload.owner_uid:
            of_name[workload.owner_uid] = workload
        if not of_name:
            del self._workloads[key]
        self._wake_runs_of(key)

    def _pod_changed(self, change: Change[PodView]) -> None:
        pod = change.object
        key = change.key[0], pod.job_set
        pods = self._pods.setdefault(key, {})
        if change.deleted:
            pods.pop(pod.uid, None)
            self._remember(key, pod)
        else:
            pods[pod.uid] = pod
        if not pods:
            del self._pods[key]
        self._wake_runs_of(key)

    def _remember(self, key: Key, pod: PodView) -> None:
        """Keep what a deleted pod tells: of divergence it may be the only evidence.

        And of a restart's cause: its peers may notice minutes later that it was taken away.
        """
        telling = pod.disrupted or pod.exit_code not in _ORDINARY_EXITS
        if not telling or not self._runs_of(key):
            return
        gone = self._gone.setdefault(key, {})
        gone[pod.uid] = replace(pod, gone=True)
        if len(gone) > _GONE_PODS_KEPT:
            least = next((u for u, p in gone.items() if not p.diverged), pod.uid)
            del gone[least]


def _jobset_name(item: JsonObject) -> str:
    return str(item["metadata"]["labels"][JOB_SET_NAME_LABEL])
