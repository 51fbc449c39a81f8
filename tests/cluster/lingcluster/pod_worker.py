"""The life of one pod: from being bound to a node until its object is gone."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from lingcluster.client import Manifest
from lingcluster.container_process import ContainerProcess, StartError
from lingcluster.container_setup import (
    Surroundings,
    container_spec,
    log_file,
    termination_message,
)
from lingcluster.pod_spec import ImageNotFoundError, NotSupportedError, PodAddresses
from lingcluster.pod_status import (
    ContainerRecord,
    Running,
    Terminated,
    Waiting,
    now,
    phase,
    pod_status,
)

_LONGEST_BACKOFF = 30.0


@dataclass
class PodWorker:
    """Runs one pod. `update` and `forget` tell it what the API server says.

    Attributes:
      pod: the newest manifest.
      addresses: the pod's.
      directory: for its logs, volumes and files.
      node: its surroundings.
      containers: name -> the running process.
      mount_points: what was made on this machine to mount on.
    """

    pod: Manifest
    addresses: PodAddresses
    directory: Path
    node: Surroundings
    containers: dict[str, ContainerProcess] = field(default_factory=dict[str, ContainerProcess])
    mount_points: list[Path] = field(default_factory=list[Path])

    def __post_init__(self) -> None:
        spec = self.pod["spec"]
        self._records = [ContainerRecord(c["name"], c["image"]) for c in spec["containers"]]
        self._init_records = [
            ContainerRecord(c["name"], c["image"], Waiting("PodInitializing"))
            for c in spec.get("initContainers", [])
        ]
        self._started_at = now()
        self._conditions: dict[str, Manifest] = {}
        self._publishing = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._gone = asyncio.Event()
        self._updated = asyncio.Event()

    def update(self, pod: Manifest) -> None:
        """Take over a newer manifest."""
        self.pod = pod
        if pod["metadata"].get("deletionTimestamp"):
            self._stopping.set()
        self._updated.set()

    def may_write(self, container: str) -> bool:
        """Tell whether a process of a container may still print something."""
        return container in self.containers

    def forget(self) -> None:
        """Take note that the object is gone: whatever still runs is killed at once."""
        self._gone.set()
        self._stopping.set()
        self._updated.set()

    async def run(self, *, on_end: Callable[[], Awaitable[None]]) -> None:
        """Live the pod's life; `on_end` is called when its last process is gone."""
        try:
            await self._first_of(asyncio.sleep(self.node.timing.start_delay), self._stopping)
            if not self._stopping.is_set() and await self._initialize():
                runs = zip(self.pod["spec"]["containers"], self._records, strict=True)
                await asyncio.gather(*(self._keep_running(c, record) for c, record in runs))
        finally:
            left = list(self.containers.values())  # only when this task was cancelled
            for process in left:
                process.signal(signal.SIGKILL)
            await asyncio.gather(*(process.wait() for process in left))
            await on_end()
        await self._end()

    async def _end(self) -> None:
        await self._first_of(asyncio.sleep(self.node.timing.stop_delay), self._gone)
        await self._publish(over=True)
        await self._stopping.wait()
        await self._first_of(asyncio.sleep(self.node.timing.final_delay), self._gone)
        # Grace 0 means that the API server needs no kubelet to remove the object.
        if not self._gone.is_set() and self._grace() > 0:
            await self.node.remove(self.pod)

    async def _initialize(self) -> bool:
        """Run the init containers one after another; tell whether all succeeded."""
        for container, record in zip(
            self.pod["spec"].get("initContainers", []), self._init_records, strict=True
        ):
            await self._keep_running(container, record, until_success=True)
            if not (isinstance(record.state, Terminated) and record.state.exit_code == 0):
                return False
        return True

    async def _keep_running(
        self, container: Manifest, record: ContainerRecord, *, until_success: bool = False
    ) -> None:
        backoff = self.node.timing.restart_backoff
        while True:
            await self._run_once(container, record)
            if self._stopping.is_set() or not isinstance(record.state, Terminated):
                return
            if not self._shall_restart(record.state, until_success=until_success):
                return
            record.last_termination = record.state
            record.state = Waiting("CrashLoopBackOff", f"back-off {backoff:.0f} s")
            record.restart_count += 1
            await self._publish()
            await self._first_of(asyncio.sleep(backoff), self._stopping)
            if self._stopping.is_set():
                record.state = record.last_termination
                return
            backoff = min(2 * backoff, _LONGEST_BACKOFF)

    def _shall_restart(self, ended: Terminated, *, until_success: bool) -> bool:
        policy = self.pod["spec"].get("restartPolicy", "Always")
        if policy == "Always" and not until_success:
            return True
        return policy != "Never" and ended.exit_code != 0

    async def _run_once(self, container: Manifest, record: ContainerRecord) -> None:
        started_at = now()
        container_id = f"process://{self.pod['metadata']['uid']}/{record.name}/"
        container_id += str(record.restart_count)
        try:
            process = await self._start(container)
        except ImageNotFoundError as error:
            await self._stay_waiting(record, Waiting("ImagePullBackOff", str(error)))
            return
        except NotSupportedError as error:
            waiting = Waiting("CreateContainerConfigError", f"not supported: {error}")
            await self._stay_waiting(record, waiting)
            return
        except StartError as error:
            record.state = Terminated(
                128, started_at, now(), str(error), container_id, reason="StartError"
            )
            return
        record.state = Running(started_at)
        await self._publish()
        code = await self._wait_or_stop(process)
        del self.containers[record.name]
        message = termination_message(container, self.directory, code)
        record.state = Terminated(code, started_at, now(), message, container_id)
        if self.containers and not self._stopping.is_set():
            await self._publish()  # the pod goes on with its other containers

    async def _start(self, container: Manifest) -> ContainerProcess:
        spec = container_spec(self.pod, container, self.node, self.addresses, self.directory)
        process = await ContainerProcess.start(
            spec,
            log=log_file(self.directory, container),
            environment=dict(self.node.launcher_environment),
        )
        self.containers[container["name"]] = process
        self.mount_points += process.mount_points
        self.node.started(self.pod, container["name"], process.process)
        return process

    async def _stay_waiting(self, record: ContainerRecord, state: Waiting) -> None:
        record.state = state
        await self._publish()
        await self._stopping.wait()

    async def _wait_or_stop(self, process: ContainerProcess) -> int:
        ended = asyncio.ensure_future(process.wait())
        await self._first_of(asyncio.shield(ended), self._stopping)
        if not ended.done():
            await self._stop(process, ended)
        return await ended

    async def _stop(self, process: ContainerProcess, ended: asyncio.Future[int]) -> None:
        if self._grace() > 0:
            process.signal(signal.SIGTERM)
        began = time.monotonic()
        while not ended.done():
            # A second delete may have shortened the grace, or the object may be gone.
            left = began + self._grace() - time.monotonic()
            if left <= 0:
                process.signal(signal.SIGKILL)
                return
            self._updated.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._first_of(asyncio.shield(ended), self._updated)

    def _grace(self) -> float:
        if self._gone.is_set():
            return 0.0
        metadata, spec = self.pod["metadata"], self.pod["spec"]
        own = spec.get("terminationGracePeriodSeconds", 30)
        return float(metadata.get("deletionGracePeriodSeconds", own))

    async def _publish(self, *, over: bool = False) -> None:
        async with self._publishing:
            if self._gone.is_set():
                return
            status = pod_status(
                phase(self._records, self._init_records, over=over),
                containers=self._records,
                init_containers=self._init_records,
                addresses=self.addresses,
                started_at=self._started_at,
                before=self._conditions,
            )
            self._conditions = {each["type"]: each for each in status["conditions"]}
            if not await self.node.patch_status(self.pod, status):
                self.forget()

    async def _first_of(self, work: Awaitable[object], event: asyncio.Event) -> None:
        """Return when `work` is done or `event` is set; what is not done is cancelled."""
        tasks = {asyncio.ensure_future(work), asyncio.ensure_future(event.wait())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
