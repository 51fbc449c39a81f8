"""A kubelet whose pods are local processes, and the levers by which a test disturbs them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lingcluster.client import Identity, wait_for
from lingcluster.container_process import POD_VARIABLE
from lingcluster.container_setup import Timing
from lingcluster.guardian import marked_processes
from lingcluster.log_server import LogState
from lingcluster.loopback import LoopbackBlock
from lingcluster.node_agent import NodeAgent, StartedProcess, remove_mount_points
from lingcluster.nodes import DEFAULT_POOLS, NodePool
from lingcluster.pod_spec import Image
from lingcluster.pod_worker import PodWorker
from lingcluster.port_proxy import PortState
from lingcluster.processes import Session

_ANSWER_TIMEOUT = 30.0


class ProcessKubelet:
    """Serves all nodes of `pools` from one thread of this process.

    A pod's containers run in namespaces of their own (see `container`), on the machine's files
    and network. Pods have addresses in the session's loopback block. A pod off hostNetwork has
    two: the one in the API, where its ports (`proxied_ports`, and those it declares) are served
    by proxies that a test can cut, and the one that its processes bind, find in the variable
    from status.podIP, and resolve their peers to.

    Not done: liveness probes, resource limits and service account tokens, which have no effect;
    other probes, lifecycle hooks, sidecar init containers, ConfigMaps, Secrets and other volumes
    than emptyDir and hostPath, which leave the pod Pending with the reason in its container's
    state.

    Args:
      identity: an administrator's.
      directory: for the pods' files.
      block: the session's addresses.
      session: owner of the processes.
      images: what container images stand for.
      pools: the nodes.
      proxied_ports: of every pod, whether declared or not.

    Attributes:
      timing: how slow it is; tests may change it.
    """

    def __init__(
        self,
        identity: Identity,
        directory: Path,
        block: LoopbackBlock,
        session: Session,
        *,
        images: Mapping[str, Image],
        pools: Sequence[NodePool] = DEFAULT_POOLS,
        proxied_ports: Sequence[int] = (),
    ) -> None:
        self.timing = Timing()
        self._make_agent: Callable[[], NodeAgent] = lambda: NodeAgent(
            identity,
            pools=pools,
            directory=directory,
            block=block,
            images=images,
            timing=self.timing,
            proxied_ports=proxied_ports,
            launcher_environment=session.environment(),
        )
        self._thread = threading.Thread(target=self._run, name="process kubelet", daemon=True)
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop
        self._agent: NodeAgent
        self._main: asyncio.Task[None]

    def start(self) -> None:
        """Register the nodes and follow the pods; return when both work.

        Raises:
          RuntimeError: the API server refused, or did not answer.
        """
        self._thread.start()
        if not self._ready.wait(_ANSWER_TIMEOUT) or self._failure is not None:
            raise RuntimeError("the process kubelet did not start") from self._failure

    def stop(self) -> None:
        """Kill every pod's processes, without a word to the API server."""
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(_ANSWER_TIMEOUT)
        remove_mount_points(self._agent.mount_points)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._agent = self._make_agent()
        self._main = asyncio.create_task(self._agent.run())
        ready = asyncio.create_task(self._agent.ready.wait())
        await asyncio.wait({self._main, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not self._main.done():
            self._ready.set()
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await self._main
        finally:
            await _close_connections()

    # Levers. Each names a pod by namespace and name and raises LookupError for one that does
    # not run.

    def freeze(self, namespace: str, name: str) -> None:
        """SIGSTOP to all of a pod's processes: alive, and silent."""
        stopped: set[int] = set()
        # Until none is new: a child may have been made between the look and the signal.
        while new := self._signal_all(namespace, name, signal.SIGSTOP, but=stopped):
            stopped |= new

    def thaw(self, namespace: str, name: str) -> None:
        """Undo `freeze`."""
        self._signal_all(namespace, name, signal.SIGCONT)

    def kill9(self, namespace: str, name: str) -> None:
        """SIGKILL to each container's process 1: the pod ends with exit code 137."""
        self.signal(namespace, name, signal.SIGKILL)

    def signal(self, namespace: str, name: str, number: signal.Signals) -> None:
        """Send a signal to each container's process 1."""
        for process in self._running(namespace, name).containers.values():
            process.signal(number)

    def set_port(
        self, namespace: str, name: str, state: PortState, *, port: int | None = None
    ) -> None:
        """Cut or open a pod's proxied ports for those who come by its address in the API.

        Args:
          namespace: the pod's.
          name: the pod's.
          state: open, refuse or hang.
          port: one of them; None for all.

        Raises:
          LookupError: the pod does not run, or the port is not proxied (hostNetwork).
        """
        uid = self._running(namespace, name).pod["metadata"]["uid"]

        async def change() -> None:
            proxies = self._agent.proxies[uid]
            for each in proxies.values() if port is None else [proxies[port]]:
                await each.set_state(state)

        self._call(change())

    def register_node(self, name: str) -> None:
        """Create a node's object again after a test deleted it; its processes ran on meanwhile."""
        self._call(self._agent.register(name))

    def set_logs(self, state: LogState) -> None:
        """Open the nodes' endpoint for logs, cut its connections, or let it fall silent."""
        self._agent.logs.state = state

    # What happened.

    def log(self, namespace: str, name: str, container: str | None = None) -> str:
        """Return what the newest pod of that name printed; containers one after another."""
        directory = self._agent.directories.get((namespace, name))
        if directory is None:
            return ""  # no node has it yet
        files = sorted(directory.glob(f"{container or '*'}.log"))
        return "".join(file.read_text(errors="replace") for file in files)

    def logs(self, namespace: str) -> str:
        """Return the output of all pods of a namespace, each under its name; for messages."""
        names = sorted(pod for space, pod in list(self._agent.directories) if space == namespace)
        return "\n".join(f"--- {name}\n{self.log(namespace, name)}" for name in names)

    def wait_for_words(self, namespace: str, names: Iterable[str], words: str = "") -> None:
        """Wait until each pod has printed these words, or anything.

        A pod is Running before its program has run a line. As process 1 of a container it does not
        notice a SIGTERM until it has a handler, so tests stop one that has spoken.

        Raises:
          TimeoutError: one has not.
        """
        for name in names:
            wait_for(
                f"{words or 'a word'!r} of {name}",
                lambda name=name: (said := self.log(namespace, name)) and words in said,
                timeout=120,
            )

    def started(self, namespace: str | None = None) -> list[StartedProcess]:
        """Return every process that was ever started, in a namespace or in all."""
        everything = list(self._agent.started)
        return [each for each in everything if namespace in (None, each.namespace)]

    def live_processes(self, namespace: str) -> list[int]:
        """Return the ids of live processes of a namespace's pods, their children included."""
        started = self.started(namespace)
        alive = {each.process.pid for each in started if each.process.is_alive()}
        for uid in {each.uid for each in started}:
            alive.update(marked_processes(POD_VARIABLE, uid))
        return sorted(alive)

    def _running(self, namespace: str, name: str) -> PodWorker:
        for worker in list(self._agent.workers.values()):
            metadata = worker.pod["metadata"]
            if (metadata["namespace"], metadata["name"]) == (namespace, name):
                if worker.containers:
                    return worker
                raise LookupError(f"pod {namespace}/{name} has no live process")
        raise LookupError(f"this kubelet runs no pod {namespace}/{name}")

    def _signal_all(
        self, namespace: str, name: str, number: signal.Signals, *, but: Iterable[int] = ()
    ) -> set[int]:
        uid = self._running(namespace, name).pod["metadata"]["uid"]
        found = set(marked_processes(POD_VARIABLE, uid)) - set(but)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return found

    def _call[T](self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_ANSWER_TIMEOUT)


async def _close_connections() -> None:
    """Close what cancelled requests left open, before the loop that could close it is gone.

    A connection on its way when its request is cancelled belongs to nobody; pytest would end a
    green session with an error about it.
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    loop: Any = asyncio.get_running_loop()
    for transport in list(loop._transports.values()):
        transport.abort()
    await asyncio.sleep(0.1)  # a transport closes its socket in the loop's next turn
