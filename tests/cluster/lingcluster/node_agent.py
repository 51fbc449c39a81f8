"""The asynchronous half of the process kubelet: nodes registered, pods followed and run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from lingcluster.client import Identity, Manifest
from lingcluster.container_process import OsProcess
from lingcluster.container_setup import Surroundings, Timing, hostname, hosts_file
from lingcluster.hosts import HostsEntry, HostsFiles
from lingcluster.log_server import ContainerLog, LogServer
from lingcluster.loopback import LoopbackBlock
from lingcluster.node_api import NodeApi
from lingcluster.nodes import NodePool
from lingcluster.pod_spec import Image, PodAddresses, declared_ports
from lingcluster.pod_worker import PodWorker
from lingcluster.port_proxy import PortProxy

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartedProcess:
    """A process that was started for a pod."""

    namespace: str
    pod: str
    uid: str
    container: str
    process: OsProcess


class NodeAgent:
    """Runs in one event loop; `run` returns when cancelled.

    Attributes:
      workers: uid -> worker of each pod whose object exists and that this agent runs or ran.
      proxies: uid -> its ports' proxies, until its last process ended.
      directories: (namespace, pod) -> where the newest pod of that name has its files.
      started: every process ever started.
      ready: set when the nodes are there and the pods were listed.
      logs: serves the containers' output.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        pools: Sequence[NodePool],
        directory: Path,
        block: LoopbackBlock,
        images: Mapping[str, Image],
        timing: Timing,
        proxied_ports: Sequence[int],
        launcher_environment: Mapping[str, str],
    ) -> None:
        self._api = NodeApi(identity)
        self._pools = {name: pool for pool in pools for name in pool.node_names()}
        self._node_addresses = {name: block.node(i) for i, name in enumerate(self._pools)}
        self._directory = directory
        self._block = block
        self._proxied_ports = proxied_ports
        self._hosts = HostsFiles()
        self._pod_count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        host, _, port = identity.server.removeprefix("https://").rpartition(":")
        self._surroundings = Surroundings(
            images=images,
            timing=timing,
            base_environment={
                **launcher_environment,
                "KUBERNETES_SERVICE_HOST": host,
                "KUBERNETES_SERVICE_PORT": port,
            },
            launcher_environment=launcher_environment,
            patch_status=self._api.patch_status,
            remove=self._api.remove,
            started=self._record,
        )
        self.workers: dict[str, PodWorker] = {}
        self.proxies: dict[str, dict[int, PortProxy]] = {}
        self.directories: dict[tuple[str, str], Path] = {}
        self.started: list[StartedProcess] = []
        self.mount_points: list[Path] = []
        self.ready = asyncio.Event()
        self.logs = LogServer(self._container_log, directory / "kubelet")

    async def run(self) -> None:
        """Register the nodes, then follow the pods until cancelled."""
        async with self._api:
            try:
                await self.logs.start(list(self._node_addresses.values()))
                for name in self._pools:
                    await self.register(name)
                await self._follow_pods()
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                await self.logs.stop()

    async def register(self, name: str) -> None:
        """Create the object of a node of the pools."""
        await self._api.register(self._pools[name], name, address=self._node_addresses[name])

    def _container_log(self, namespace: str, pod: str, container: str) -> ContainerLog | None:
        for worker in self.workers.values():
            metadata = worker.pod["metadata"]
            if (metadata["namespace"], metadata["name"]) == (namespace, pod):
                path = worker.directory / f"{container}.log"
                return ContainerLog(path, functools.partial(worker.may_write, container))
        return None

    async def _follow_pods(self) -> None:
        while True:
            try:
                pods, version = await self._api.list_pods()
                self._take_listing(pods)
                self.ready.set()
                async for kind, pod in self._api.watch_pods(version):
                    self._take(kind, pod)
            except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as error:
                _log.warning("pods: %s; listing again", error)
                await asyncio.sleep(0.2)

    def _take_listing(self, pods: Sequence[Manifest]) -> None:
        for pod in pods:
            self._take("ADDED", pod)
        listed = {pod["metadata"]["uid"] for pod in pods}
        for uid in self.workers.keys() - listed:
            self._forget(uid)

    def _take(self, kind: str, pod: Manifest) -> None:
        uid = pod["metadata"]["uid"]
        if kind == "DELETED":
            self._forget(uid)
        elif uid in self.workers:
            self.workers[uid].update(pod)
        elif (
            pod["spec"].get("nodeName") in self._pools
            and pod.get("status", {}).get("phase") == "Pending"
        ):
            self._start(pod)

    def _forget(self, uid: str) -> None:
        if (worker := self.workers.pop(uid, None)) is not None:
            worker.forget()

    def _start(self, pod: Manifest) -> None:
        metadata, spec = pod["metadata"], pod["spec"]
        uid, namespace = metadata["uid"], metadata["namespace"]
        directory = self._directory / namespace / f"{metadata['name']}_{uid[:8]}"
        directory.mkdir(parents=True)
        self.directories[namespace, metadata["name"]] = directory
        addresses = self._addresses(spec)
        worker = PodWorker(pod, addresses, directory, self._surroundings)
        entry = HostsEntry(
            namespace,
            addresses.process,
            hostname(pod),
            spec.get("hostname", "") if spec.get("subdomain") else "",
            spec.get("subdomain", ""),
            hosts_file(directory),
        )
        self._hosts.add(uid, entry)
        self.workers[uid] = worker
        worker.update(pod)
        task = asyncio.create_task(self._run(worker), name=f"pod {namespace}/{metadata['name']}")
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _addresses(self, spec: Mapping[str, Any]) -> PodAddresses:
        node = self._node_addresses[spec["nodeName"]]
        if spec.get("hostNetwork"):
            return PodAddresses(public=node, process=node, node=node)
        index = self._pod_count
        self._pod_count += 1
        return PodAddresses(self._block.pod(index), self._block.pod_process(index), node)

    async def _run(self, worker: PodWorker) -> None:
        uid, addresses = worker.pod["metadata"]["uid"], worker.addresses
        proxies: dict[int, PortProxy] = {}
        if addresses.public != addresses.process:
            for port in {*self._proxied_ports, *declared_ports(worker.pod)}:
                proxies[port] = PortProxy(addresses.public, addresses.process, port)
                await proxies[port].set_state("open")
        self.proxies[uid] = proxies

        async def on_end() -> None:
            self.mount_points += worker.mount_points
            self._hosts.remove(uid)
            for proxy in self.proxies.pop(uid).values():
                await proxy.close()

        await worker.run(on_end=on_end)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s: the worker failed", task.get_name(), exc_info=error)

    def _record(self, pod: Manifest, container: str, process: OsProcess) -> None:
        metadata = pod["metadata"]
        self.started.append(
            StartedProcess(
                metadata["namespace"], metadata["name"], metadata["uid"], container, process
            )
        )


def remove_mount_points(paths: Sequence[Path]) -> None:
    """Remove what was made to mount on, innermost first; what is in use or filled stays."""
    for path in sorted(set(paths), key=lambda each: len(each.parts), reverse=True):
        with contextlib.suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()
