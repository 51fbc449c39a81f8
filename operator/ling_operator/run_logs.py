"""A run's output as people read it: one process or all, to the end or as it grows."""

import asyncio
import codecs
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from ling_operator import remote
from ling_operator.api import ENDED
from ling_operator.listing import last_evidence
from ling_operator.pod_logs import log_path
from ling_operator.remote import NothingThereError
from ling_operator.rest import ApiError, JsonObject, RestClient
from ling_operator.views import TRAINER_CONTAINER, PodView, view_pod

_LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 60.0  # an API server that is restarted is back by then

type Write = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Target:
    """Whose output to read.

    Attributes:
      processes: their numbers, counted over all slices; None for all.
      tail: of each only the last so many lines; None for everything.
    """

    namespace: str
    name: str
    processes: tuple[int, ...] | None
    tail: int | None


async def show(client: RestClient, target: Target, write: Write, note: Write) -> None:
    """Write what the processes of the newest restart have printed.

    Of a stopped run whose pods are gone the lines that its status has kept are written.

    Raises:
      NothingThereError: the run has no such process.
    """
    run = await remote.get(client, target.namespace, target.name)
    pods = _newest(await remote.pods_of(client, run))
    kept = (last_evidence(run) or {}).get("log")
    if kept and not pods and target.processes in {None, (0,)}:
        note("its pods are gone; these are the last lines of process 0, from its status")
        for line in kept[-(target.tail or len(kept)) :]:
            write(f"{line}\n")
        return
    for process in _wanted(target, pods):
        pod = pods[process]
        prefix = _prefix(target, process)
        query = {} if target.tail is None else {"tailLines": str(target.tail)}
        path = log_path(target.namespace, pod.name)
        text = await client.text(path, container=pod.container, **query)
        for line in text.splitlines(keepends=True):
            write(prefix + line)


async def follow(client: RestClient, target: Target, write: Write, note: Write) -> None:
    """Write what the processes print until the run has ended, over restarts of their pods.

    After a connection that broke, up to a second of lines may come twice.

    Args:
      client: the API server's.
      target: whose.
      write: takes lines.
      note: takes what is said about them: a new pod, a connection that broke.

    Raises:
      NothingThereError: the run has no such process.
      ApiError: the API server refuses, or could not be reached for a minute.
    """
    run = await remote.get(client, target.namespace, target.name)
    pods = _newest(await remote.pods_of(client, run))
    if target.processes is None and not pods and _phase(run) not in ENDED:
        note("waiting for pods\n")
        while not pods and _phase(run) not in ENDED:
            await asyncio.sleep(_LOOK_SECONDS)
            run = await remote.get(client, target.namespace, target.name)
            pods = _newest(await remote.pods_of(client, run))
    wanted = _wanted(target, pods) if pods or target.processes is None else target.processes
    await asyncio.gather(*(_Follower(client, target, p, write, note).run() for p in wanted))


class _Follower:
    """Follows one process from pod to pod."""

    def __init__(
        self, client: RestClient, target: Target, process: int, write: Write, note: Write
    ) -> None:
        self._client = client
        self._target = target
        self._process = process
        self._prefix = _prefix(target, process)
        self._write = write
        self._note = note
        self._heard = time.monotonic()
        self._pod: PodView | None = None

    async def run(self) -> None:
        done: str | None = None
        trouble_since: float | None = None
        while True:
            try:
                run, pod = await self._look()
                if pod is not None and pod.uid != done and pod.phase != "Pending":
                    ended = await self._read(pod)
                    done = pod.uid if ended else None
                elif _phase(run) in ENDED and (pod is None or not pod.live):
                    return
                trouble_since = None
            except ApiError as error:
                since = trouble_since = trouble_since or time.monotonic()
                if not _passes(error) or time.monotonic() - since > _PATIENCE_SECONDS:
                    raise
            await asyncio.sleep(_LOOK_SECONDS)

    async def _look(self) -> tuple[JsonObject, PodView | None]:
        target = self._target
        try:
            run = await remote.get(self._client, target.namespace, target.name)
        except ApiError as error:
            if not error.is_not_found:
                raise
            msg = f"{target.namespace}/{target.name} is gone"
            raise NothingThereError(msg) from None
        pods = _newest(await remote.pods_of(self._client, run))
        return run, pods[self._process] if self._process < len(pods) else None

    async def _read(self, pod: PodView) -> bool:
        """Write a pod's output; return whether that was all of it."""
        known = self._pod is not None and self._pod.uid == pod.uid
        query: dict[str, str] = {}
        if known:  # the connection broke: what was printed since
            query["sinceSeconds"] = str(max(math.ceil(time.monotonic() - self._heard), 1))
        elif self._pod is None and self._target.tail is not None:
            query["tailLines"] = str(self._target.tail)
        if self._pod is not None and not known:
            self._note(f"{self._prefix}pod {pod.name}, restart {pod.restart_attempt}\n")
        self._pod, self._heard = pod, time.monotonic()
        lines = self._lines(pod, query)
        async for line in lines:
            self._write(self._prefix + line)
        _, now = await self._look()
        # A stream ends with its container, or because somebody on the way had enough of it.
        return now is None or now.uid != pod.uid or not now.live or not now.ready

    async def _lines(self, pod: PodView, query: dict[str, str]) -> AsyncIterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        rest = ""
        path = log_path(self._target.namespace, pod.name)
        stream = self._client.stream(path, container=pod.container, follow="true", **query)
        try:
            async for chunk in stream:
                self._heard = time.monotonic()
                *lines, rest = (rest + decoder.decode(chunk)).split("\n")
                for line in lines:
                    yield line + "\n"
        finally:
            if rest:
                self._write(self._prefix + rest + "\n")


def _passes(error: ApiError) -> bool:
    """Tell whether a refusal may be over in a moment: a pod that starts or goes, a restart."""
    return error.status is None or error.status in {400, 404} or error.status >= 500


def _newest(items: list[JsonObject]) -> list[PodView]:
    """Return the processes of the newest restart of the newest attempt, in their order.

    Each is its pod with its own container: a host of tpu7x may run two.
    """
    pods = [view_pod(item) for item in items]
    newest = max(map(_age, pods), default=None)
    ordered = sorted((pod for pod in pods if _age(pod) == newest), key=_place)
    return [process for pod in ordered for process in _processes(pod)]


def _processes(pod: PodView) -> list[PodView]:
    if pod.containers == 1:
        return [pod]
    names = (f"{TRAINER_CONTAINER}-{index + 1}" for index in range(pod.containers))
    return [replace(pod, container=name) for name in names]


def _wanted(target: Target, pods: list[PodView]) -> tuple[int, ...]:
    """Return the processes to show.

    Raises:
      NothingThereError: there is no such process.
    """
    whose = f"{target.namespace}/{target.name}"
    if not pods:
        msg = f"{whose} has no pods"
        raise NothingThereError(msg)
    wanted = target.processes if target.processes is not None else tuple(range(len(pods)))
    for process in wanted:
        if process >= len(pods):
            msg = f"{whose} has {len(pods)} processes; there is no process {process}"
            raise NothingThereError(msg)
    return wanted


def _prefix(target: Target, process: int) -> str:
    return f"[{process}] " if target.processes is None else ""


def _phase(run: JsonObject) -> str:
    status: JsonObject = run.get("status") or {}
    return str(status.get("phase", ""))


def _place(pod: PodView) -> tuple[int, int]:
    return pod.job_index, pod.completion_index


def _age(pod: PodView) -> tuple[int, int]:
    return pod.attempt, pod.restart_attempt
