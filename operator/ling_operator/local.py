"""A run on this machine with no cluster: the same reconcile, with pods as processes."""

import asyncio
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ling_operator.admission import admit
from ling_operator.api import ENDED, CpuHosts, Phase, TrainingRun, dump
from ling_operator.display import Display
from ling_operator.local_jobset import LocalJobSet
from ling_operator.plan import (
    CreateJobSet,
    DeleteJobSet,
    LogSource,
    LogTail,
    Observed,
    Plan,
    SetSuspend,
    SetWorkloadActive,
)
from ling_operator.pod_logs import tail_of_file
from ling_operator.processes import Machine
from ling_operator.progress import scrape_target
from ling_operator.reconcile import reconcile
from ling_operator.rundir import JOBSET, OBJECT, RunDirectory
from ling_operator.runnable import run_settings
from ling_operator.scrape import ScrapeFailure, ScrapeSession, ScrapeTarget, scrape
from ling_operator.verdict import HealthSample
from ling_trainer.config import RunConfig
from ling_trainer.schema import ConfigError
from ling_trainer.settings import resolve

TICK_SECONDS = 0.2
LONGEST_SCRAPE_INTERVAL = 1.0  # a page from this machine costs nothing, and people are watching


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a local run came to rest.

    Attributes:
      run: the object with its last status.
      steps: how many were asked for.
      log: output of the first process that failed in this attempt; None if none did.
    """

    run: TrainingRun
    directory: Path
    steps: int
    log: Path | None


class LocalCluster:
    """observe() and execute() over one run's directory and processes."""

    def __init__(self, directory: RunDirectory, run: TrainingRun, machine: Machine) -> None:
        self.run = run
        self.sample: HealthSample | None = None
        self._directory = directory
        self._machine = machine
        self._problem: str | None = None
        self._log: LogTail | None = None
        saved = directory.load(JOBSET)
        self._jobset = LocalJobSet.load(saved, machine) if saved is not None else None

    @property
    def live(self) -> bool:
        """Tell whether a process of the run still is there."""
        return self._jobset is not None and self._jobset.live

    @property
    def failed_log(self) -> Path | None:
        """Return the output of the first process that failed."""
        pods = self._jobset.pods if self._jobset is not None else []
        return next((pod.log for pod in pods if pod.exit_code), None)

    async def observe(self, namespace: str, name: str) -> Observed | None:
        """Return what a cluster would show of the run; None if it is another one's."""
        metadata = self.run.metadata
        if (namespace, name) != (metadata.namespace, metadata.name):
            return None
        jobset = self._jobset
        return Observed(
            run=_unqueued(self.run),
            jobset=jobset.view() if jobset is not None else None,
            pods=jobset.pod_views() if jobset is not None else (),
            jobs=(name,) if jobset is not None and jobset.live else (),
            sample=self.sample,
            scrape_problem=self._problem,
            log=self._log,
            now=datetime.now(UTC),
        )

    async def execute(self, observed: Observed, plan: Plan) -> None:
        """Save the status, then act. Events have no reader here.

        Raises:
          ConfigError: a pod cannot be started on this machine.
        """
        if plan.status != observed.run.status:
            self.run = self.run.model_copy(update={"status": plan.status})
            self._directory.save(OBJECT, dump(self.run))
        for action in plan.actions:
            match action:
                case CreateJobSet(manifest):
                    self._jobset = LocalJobSet.create(manifest, self._machine)
                case SetSuspend(uid, suspend, _):
                    if self._jobset is not None and self._jobset.uid == uid:
                        self._jobset.set_suspend(suspend)
                case DeleteJobSet(uid, _):
                    if self._jobset is not None and self._jobset.uid == uid:
                        self._jobset.delete()
                case SetWorkloadActive():
                    pass  # nothing is queued here

    def read_log(self, source: LogSource) -> None:
        """Read the end of a process's output."""
        pods = self._jobset.pods if self._jobset is not None else []
        log = next((pod.log for pod in pods if pod.uid == source.uid), None)
        self._log = tail_of_file(source, log)

    def advance(self) -> None:
        """Let the JobSet do its next thing, and save it."""
        if self._jobset is None:
            return
        before = self._jobset.dump()
        self._jobset.advance()
        if self._jobset.deleted:
            self._jobset = None
            self._directory.save(JOBSET, None)
        elif self._jobset.dump() != before or self._directory.load(JOBSET) is None:
            self._directory.save(JOBSET, self._jobset.dump())

    def suspend(self) -> None:
        """Pause as spec.suspend does, without writing it down: the next start goes on."""
        spec = self.run.spec.model_copy(update={"suspend": True})
        self.run = self.run.model_copy(update={"spec": spec})

    def kill(self) -> None:
        """End every process at once."""
        for pod in self._jobset.pods if self._jobset is not None else []:
            pod.kill()

    async def scrape(self) -> None:
        """Read process 0's metrics at the run's interval, for ever."""
        interval = float(self.run.spec.health.scrape_interval_seconds)
        async with ScrapeSession() as session:
            while True:
                pods = self._jobset.pod_views() if self._jobset is not None else ()
                pod = scrape_target(self.run, pods)
                if pod is not None and pod.ip is not None:
                    target = ScrapeTarget(
                        ip=pod.ip, port=pod.metrics_port, pod_uid=pod.uid, host_network=False
                    )
                    self._record(await scrape(session, target))
                await asyncio.sleep(min(interval, LONGEST_SCRAPE_INTERVAL))

    def _record(self, result: HealthSample | ScrapeFailure) -> None:
        if isinstance(result, HealthSample):
            self.sample, self._problem = result, None
        else:
            self._problem = result.message


async def run_local(
    manifest: Mapping[str, Any], *, environment: Mapping[str, str], display: Display
) -> Outcome:
    """Run a TrainingRun until it ends or is interrupted; run again, it goes on.

    Args:
      manifest: the object, valid.
      environment: variables that trainers inherit.
      display: shows progress.

    Raises:
      ConfigError: the object cannot be run here, or changes what may not change.
      HeldError: another process runs it.
    """
    wanted = TrainingRun.parse(manifest)
    config = _config(wanted)
    with RunDirectory(Path(str(config.base_output_directory), config.run_name)) as directory:
        stored = directory.load(OBJECT)
        run = admit(_fit(wanted), TrainingRun.parse(stored) if stored is not None else None)
        directory.save(OBJECT, dump(run))
        drop = frozenset({"JAX_PLATFORMS"}) if wanted.spec.tpu is not None else frozenset[str]()
        machine = Machine(
            environment=environment,
            logs=directory.logs,
            lock=directory.lock,
            drop_variables=drop,
        )
        cluster = LocalCluster(directory, run, machine)
        try:
            await _play(cluster, display)
        finally:
            cluster.kill()
        return Outcome(
            run=cluster.run,
            directory=directory.path,
            steps=config.steps,
            log=cluster.failed_log,
        )


def _config(run: TrainingRun) -> RunConfig:
    """Resolve the trainer's settings, and check that everything can be kept on this machine."""
    if run.spec.watch is not None:
        raise ConfigError("spec.watch: only a cluster has JobSets to watch; set cpu or tpu")
    if not run.spec.run:
        msg = "spec.run is empty; a local run needs the trainer's settings there"
        raise ConfigError(msg)
    config = resolve(run_settings(run))
    base = config.base_output_directory
    if base is None or "://" in base:
        msg = (
            f"spec.run.base_output_directory={base!r}: a local run keeps its object, logs and "
            "checkpoints there; set a directory, such as base_output_directory=runs"
        )
        raise ConfigError(msg)
    return config


def _fit(run: TrainingRun) -> TrainingRun:
    """Fit an object for TPU slices onto this machine: one process with what devices it has."""
    if run.spec.tpu is None:
        return run
    spec = run.spec.model_copy(update={"tpu": None, "cpu": CpuHosts(processes=1)})
    return run.model_copy(update={"spec": spec})


async def _play(cluster: LocalCluster, display: Display) -> None:
    """Observe, reconcile, execute, and let the processes move on, until the run is at rest."""
    _stop_on_signals(cluster, display)
    scraper = asyncio.create_task(cluster.scrape())
    metadata = cluster.run.metadata
    try:
        while True:
            observed = await cluster.observe(metadata.namespace, metadata.name)
            if observed is None or scraper.done():
                break
            plan = reconcile(observed)
            if plan.read_log is not None:
                cluster.read_log(plan.read_log)
                observed = await cluster.observe(metadata.namespace, metadata.name) or observed
                plan = reconcile(observed)
            await cluster.execute(observed, plan)
            display.show(cluster.run.status, _of_live_pod(cluster.sample, observed))
            if _at_rest(cluster, plan):
                return
            cluster.advance()
            await asyncio.sleep(TICK_SECONDS)
    finally:
        scraper.cancel()
        await asyncio.gather(scraper, return_exceptions=True)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    scraper.result()  # it ends only by an error


def _at_rest(cluster: LocalCluster, plan: Plan) -> bool:
    phase = plan.status.phase
    resting = phase in ENDED or (phase is Phase.SUSPENDED and cluster.run.spec.suspend)
    return resting and not cluster.live and not plan.actions


def _of_live_pod(sample: HealthSample | None, observed: Observed) -> HealthSample | None:
    """Return the sample unless it is of a process that a later one replaced."""
    uids = {pod.uid for pod in observed.pods}
    return sample if sample is not None and sample.pod_uid in uids else None


def _stop_on_signals(cluster: LocalCluster, display: Display) -> None:
    """Let the first signal pause the run, and the second end its processes."""
    presses = 0

    def stop() -> None:
        nonlocal presses
        presses += 1
        if presses == 1:
            display.say("Stopping: trainers write a checkpoint. Once more kills them.")
            cluster.suspend()
        else:
            cluster.kill()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)


def _unqueued(run: TrainingRun) -> TrainingRun:
    """Return the run as if it named no queue: one machine has none."""
    return run.model_copy(update={"spec": run.spec.model_copy(update={"queue": None})})
