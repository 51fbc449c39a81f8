"""One run of a container as an asyncio subprocess, through the launcher `container.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lingcluster import container
from lingcluster.container import ContainerSpec

POD_VARIABLE = "LING_CLUSTER_POD"


@dataclass(frozen=True)
class OsProcess:
    """A process of this machine, told apart from a later one of the same id by its start."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> OsProcess:
        """Return process `pid` as it is now (start 0 when it is gone already)."""
        return cls(pid, _start_ticks(pid) or 0)

    def is_alive(self) -> bool:
        """Tell whether it still runs; a zombie does not."""
        return _start_ticks(self.pid) == self.start_ticks


def _start_ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = text.rpartition(")")[2].split()
    return None if state in ("Z", "X") else int(rest[18])


class StartError(Exception):
    """The container's program could not be started."""


class ContainerProcess:
    """A started container; `wait` returns its exit code.

    Attributes:
      process: the program, process 1 of the container.
      mount_points: files and folders of the machine that were made to mount on.
    """

    def __init__(self, launcher: asyncio.subprocess.Process) -> None:
        self._launcher = launcher
        self._ended: asyncio.Future[int] | None = None
        self.process = OsProcess(0, 0)
        self.mount_points: list[Path] = []

    @classmethod
    async def start(
        cls, spec: ContainerSpec, *, log: Path, environment: dict[str, str]
    ) -> ContainerProcess:
        """Start the program.

        Args:
          spec: what to run.
          log: file the program's output is appended to.
          environment: the launcher's own; the program sees only the specification's.

        Raises:
          StartError: there is no such program, or its mounts failed.
        """
        with log.open("ab") as output:
            launcher = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                container.__file__,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        started = cls(launcher)
        try:
            await started._send_and_await_start(spec)
        except asyncio.CancelledError:
            launcher.kill()  # and by that the program, if there is one
            raise
        return started

    async def wait(self) -> int:
        """Return the exit code, 128 + n for signal n, once all its processes are gone."""
        if self._ended is None:
            self._ended = asyncio.ensure_future(self._wait())
        return await asyncio.shield(self._ended)

    async def _send_and_await_start(self, spec: ContainerSpec) -> None:
        assert self._launcher.stdin is not None
        self._launcher.stdin.write(json.dumps(spec).encode())
        self._launcher.stdin.close()
        while True:
            message = await self._next_message()
            if "made" in message:
                self.mount_points.append(Path(message["made"]))
            elif "pid" in message:
                self.process = OsProcess.of(message["pid"])
                return
            else:
                await self._launcher.wait()
                raise StartError(message.get("error", "the launcher ended; see the log"))

    async def _wait(self) -> int:
        message = await self._next_message()
        await self._launcher.wait()
        return message.get("exit", 137)  # no message: the launcher itself was killed

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to process 1 of the container; one that has ended is left alone."""
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    async def _next_message(self) -> dict[str, Any]:
        assert self._launcher.stdout is not None
        line = await self._launcher.stdout.readline()
        return json.loads(line) if line else {}
