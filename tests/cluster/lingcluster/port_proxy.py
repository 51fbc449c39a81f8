"""One TCP port of a pod, reachable through a proxy that a test can cut."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

type PortState = Literal["open", "refuse", "hang"]


class PortProxy:
    """Forwards `public`:`port` to `private`:`port`.

    States: open; refuse (no listener: connection refused); hang (connections are accepted and
    never answered, as behind a firewall that drops packets; open ones fall silent).
    """

    def __init__(self, public: str, private: str, port: int) -> None:
        self.public, self.private, self.port = public, private, port
        self._state: PortState = "refuse"
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()

    async def set_state(self, state: PortState) -> None:
        """Change the state; connections open until now are cut, or go silent for hang."""
        if state == self._state:
            return
        self._state = state
        if state == "hang":
            self._flowing.clear()
        else:
            self._cut_connections()
            self._flowing.set()
        if state == "refuse":
            await self._stop_listening()
        elif self._server is None:
            self._server = await asyncio.start_server(self._serve, self.public, self.port)

    async def close(self) -> None:
        """Cut everything and stop listening."""
        await self.set_state("refuse")
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _cut_connections(self) -> None:
        for task in self._connections:
            task.cancel()

    async def _stop_listening(self) -> None:
        if self._server is None:
            return
        server, self._server = self._server, None
        # A connection accepted in this very turn would find its server closed and be leaked: an
        # unraisable warning, which fails whatever test runs at the time.
        for listening in server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._forward(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # cut, or nobody listens behind: the caller sees its connection closed
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flowing.wait()
        behind_reader, behind_writer = await asyncio.open_connection(self.private, self.port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, behind_writer))
                group.create_task(self._pump(behind_reader, writer))
        except* OSError:
            pass
        finally:
            behind_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        await self._flowing.wait()
        with contextlib.suppress(OSError):
            writer.write_eof()
