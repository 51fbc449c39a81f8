"""The life of one pod: from being bound to a node until its object is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lingcluster import pod_spec
from lingcluster.client import Manifest
from lingcluster.container import ContainerSpec
from lingcluster.container_process import (
    POD_VARIABLE,
    ContainerProcess,
    OsProcess,
    StartError,
)
from lingcluster.pod_spec import Image, ImageNotFoundError, NotSupportedError, PodAddresses
from lingcluster.pod_status import (
    ContainerRecord,
    Running,
    Terminated,
    Waiting,
    now,
    phase,
    pod_status,
)

_MESSAGE_LIMIT = 4096
_LOG_MESSAGE_LIMIT = 2048
_LONGEST_BACKOFF = 30.0


@dataclass
class Timing:
    """How slow the kubelet is, in seconds; a test may change it at any time.

    Attributes:
      start_delay: from being bound to the first process.
      stop_delay: from the last process's end to the status that says so.
      final_delay: from a deleted pod's last status to the removal of its object. A real kubelet
        takes 1 to 2 s, in which controllers see the pod ended and still there.
      restart_backoff: before the first restart of a container; doubles.
    """

    start_delay: float = 0.1
    stop_delay: float = 0.0
    final_delay: float = 0.3
    restart_backoff: float = 1.0


@dataclass(frozen=True)
class Surroundings:
    """What a pod finds on its node.

    Attributes:
      images: container images by name.
      timing: how slow things are.
      base_environment: variables of every container.
      launcher_environment: the launcher's own variables, the session's mark among them.
      patch_status: writes fields of a pod's status; False when the pod is gone.
      remove: deletes a pod's object that has ended.
      started: called with each started process.
    """

    images: Mapping[str, Image]
    timing: Timing
    base_environment: Mapping[str, str]
    launcher_environment: Mapping[str, str]
    patch_status: Callable[[Manifest, Manifest], Awaitable[bool]]
    remove: Callable[[Manifest], Awaitable[None]]
    started: Callable[[Manifest, str, OsProcess], None]


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

    @property
    def hosts_file(self) -> Path:
        """The file that its containers see as /etc/hosts."""
        return self.directory / "hosts"

    @property
    def hostname(self) -> str:
        """The host name inside: on hostNetwork the node's."""
        spec = self.pod["spec"]
        if spec.get("hostNetwork"):
            return spec["nodeName"]
        return spec.get("hostname") or self.pod["metadata"]["name"]

    def update(self, pod: Manifest) -> None:
        """Take over a newer manifest."""
        self.pod = pod
        if pod["metadata"].get("deletionTimestamp"):
            self._stopping.set()
        self._updated.set()

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
        log = self.directory / f"{container['name']}.log"
        message_file = self.directory / f"{container['name']}.termination"
        message_file.write_bytes(b"")
        container_id = f"process://{self.pod['metadata']['uid']}/{record.name}/"
        container_id += str(record.restart_count)
        try:
            spec = self._container_spec(container, message_file)
            process = await ContainerProcess.start(
                spec, log=log, environment=dict(self.node.launcher_environment)
            )
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
        self.containers[record.name] = process
        self.mount_points += process.mount_points
        self.node.started(self.pod, record.name, process.process)
        record.state = Running(started_at)
        await self._publish()
        code = await self._wait_or_stop(process)
        del self.containers[record.name]
        message = _termination_message(container, message_file, log, code)
        record.state = Terminated(code, started_at, now(), message, container_id)

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

    def _container_spec(self, container: Manifest, message_file: Path) -> ContainerSpec:
        pod_spec.check_supported(self.pod)
        image = pod_spec.find_image(self.node.images, container["image"])
        environment = {
            "HOME": "/root",
            "HOSTNAME": self.hostname,
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            POD_VARIABLE: self.pod["metadata"]["uid"],
            **self.node.base_environment,
            **pod_spec.environment(self.pod, container, image, self.addresses),
        }
        work, devices = self.directory / "work", self.directory / f"{container['name']}.dev"
        for folder in (work, devices):
            folder.mkdir(exist_ok=True)
        volumes = pod_spec.mounts(self.pod, container, self.directory / "volumes")
        for source, _ in volumes:
            source.mkdir(parents=True, exist_ok=True)
        message_path = container.get("terminationMessagePath", "/dev/termination-log")
        mounts = [
            (self.hosts_file, Path("/etc/hosts")),
            (message_file, Path(message_path)),
            *volumes,
        ]
        return {
            "argv": pod_spec.arguments(container, image, environment),
            "environment": environment,
            "working_directory": container.get("workingDir") or str(work),
            "hostname": self.hostname,
            "device_directory": str(devices),
            "mounts": [
                {"source": str(source), "target": str(target)} for source, target in mounts
            ],
        }

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


def _termination_message(container: Manifest, message_file: Path, log: Path, code: int) -> str:
    message = _tail(message_file, _MESSAGE_LIMIT)
    policy = container.get("terminationMessagePolicy", "File")
    if not message and code != 0 and policy == "FallbackToLogsOnError":
        message = _tail(log, _LOG_MESSAGE_LIMIT)
    return message


def _tail(path: Path, limit: int) -> str:
    return path.read_bytes()[-limit:].decode(errors="replace")
