"""The kubelet's endpoint for containers' output, which the API server proxies to pods/log."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aiohttp import web

from lingcluster.certificates import CertificateAuthority

PORT = 10260  # not 10250, which a real kubelet on this machine may have
_POLL_SECONDS = 0.1
_CHUNK = 65536

type LogState = Literal["open", "refuse", "hang"]


@dataclass(frozen=True)
class ContainerLog:
    """Where a container's output is.

    Attributes:
      path: the file; it is made when the container starts.
      grows: asks whether a process may still write to it.
    """

    path: Path
    grows: Callable[[], bool]


class LogServer:
    """Serves /containerLogs of every node by HTTPS, with a certificate that nobody verifies.

    Of the query it knows follow, tailLines and limitBytes; timestamps and since are ignored, and
    there is no log of a container before its restart.

    Attributes:
      state: open; refuse (connections are cut); hang (never answered).
    """

    def __init__(
        self, find: Callable[[str, str, str], ContainerLog | None], directory: Path
    ) -> None:
        self.state: LogState = "open"
        self._find = find
        self._directory = directory
        self._runner: web.AppRunner | None = None

    async def start(self, addresses: Sequence[str]) -> None:
        """Listen on the nodes' addresses."""
        self._directory.mkdir(parents=True, exist_ok=True)
        pair = CertificateAuthority(self._directory).serving(self._directory, address=addresses[0])
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(pair.certificate, pair.key)
        app = web.Application()
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._answer)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await self._runner.setup()
        for address in addresses:
            await web.TCPSite(self._runner, address, PORT, ssl_context=context).start()

    async def stop(self) -> None:
        """Cut every connection."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.state == "hang":
            await asyncio.sleep(3600)
        if self.state == "refuse" and request.transport is not None:
            request.transport.abort()
        match = request.match_info
        log = self._find(match["namespace"], match["pod"], match["container"])
        if log is None or not log.path.exists():
            name = f"container {match['container']} in pod {match['pod']}"
            raise web.HTTPBadRequest(text=f"{name} is waiting to start: ContainerCreating")
        if request.query.get("previous") == "true":
            raise web.HTTPBadRequest(text="previous terminated container not found")
        response = web.StreamResponse()
        response.content_type = "text/plain"
        await response.prepare(request)
        await self._send(request, response, log)
        return response

    async def _send(
        self, request: web.Request, response: web.StreamResponse, log: ContainerLog
    ) -> None:
        limit = int(request.query.get("limitBytes", 2**62))
        with log.path.open("rb") as file:
            file.seek(_offset(file.read(), request.query.get("tailLines")))
            while True:
                grows = log.grows()  # before the read: what is written after it is seen next time
                while limit > 0 and (chunk := file.read(min(_CHUNK, limit))):
                    limit -= len(chunk)
                    await response.write(chunk)
                if limit <= 0 or not grows or request.query.get("follow") != "true":
                    return
                await asyncio.sleep(_POLL_SECONDS)


def _offset(content: bytes, lines: str | None) -> int:
    """Return where the last so many lines begin."""
    if lines is None:
        return 0
    kept = content.splitlines(keepends=True)
    count = min(int(lines), len(kept))
    return len(content) - sum(len(line) for line in kept[len(kept) - count :])
