"""A proxy between one client and the API server: it sees each request, and can harm either.

It ends TLS with the API server's own certificate, whose address it shares. What the client asks
for reaches the API server with the client's own credentials.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import aiohttp
from aiohttp import web

from lingcluster.certificates import KeyPair
from lingcluster.client import Identity, Manifest

type Moment = Literal["before", "after"]
"""Before the API server gets a request, or after its answer and before the client has it."""

_HOP_HEADERS = frozenset({"host", "connection", "transfer-encoding", "content-length"})
_START_SECONDS = 10.0
_CLOSING_SECONDS = 0.1  # a closed transport lets go of its socket a turn of the loop later


class Dropped(Exception):  # noqa: N818 - it is no error of the proxy's
    """Raised by a gate: the connection ends, and this request with it."""


@dataclass
class Exchange:
    """One request, and as much of its answer as there is yet.

    Attributes:
      method: GET, POST, PUT, PATCH or DELETE.
      path: without the query.
      query: a gate may change it.
      body: of the request, decoded; None without one.
      started: seconds since the epoch.
      status: of the answer; 0 before it.
    """

    method: str
    path: str
    query: dict[str, str]
    body: Manifest | None = None
    started: float = field(default_factory=time.time)
    status: int = 0

    @property
    def writes(self) -> bool:
        """Whether it changes something."""
        return self.method != "GET"

    @property
    def watches(self) -> bool:
        """Whether it is a watch."""
        return self.query.get("watch") == "true"

    @property
    def resource(self) -> str:
        """The plural, with the subresource after a slash, such as trainingruns/status."""
        words = self.path.strip("/").split("/")
        words = words[2:] if words[0] == "api" else words[3:]
        if words[:1] == ["namespaces"] and len(words) > 2:
            words = words[2:]
        return "/".join([*words[:1], *words[2:3]])


type Gate = Callable[[Exchange, Moment], None]
"""Sees each exchange at both moments, in a thread of its own; it may block, or raise Dropped."""


def open_gate(exchange: Exchange, moment: Moment) -> None:
    """Let everything pass."""
    del exchange, moment


class ApiProxy:
    """Forwards one address and port to an API server, from a thread; use as a context manager.

    Args:
      identity: whom the client acts as, and where the API server is.
      address: to listen at; `tls` must be valid for it.
      port: to listen at.
      tls: certificate and key to show the client.
      gate: sees each exchange.

    Attributes:
      identity: for the client: by way of the proxy.
      exchanges: those that came, in order.
      watch_errors: the objects of ERROR events that watches ended with.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        address: str,
        port: int,
        tls: KeyPair,
        gate: Gate = open_gate,
    ) -> None:
        self.identity = replace(identity, server=f"https://{address}:{port}")
        self.exchanges: list[Exchange] = []
        self.watch_errors: list[Manifest] = []
        self.gate: Gate = gate
        self._server = identity.server
        self._address, self._port = address, port
        self._upstream = ssl.create_default_context(cafile=str(identity.certificate_authority))
        self._downstream = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._downstream.load_cert_chain(tls.certificate, tls.key)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._watches: dict[asyncio.Task[None], str] = {}
        self._transports: set[asyncio.BaseTransport] = set()
        self._holes: set[asyncio.BaseTransport] = set()
        self._refusing = False

    def __enter__(self) -> ApiProxy:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_SECONDS)
        self._loop.close()

    def writes(self) -> list[Exchange]:
        """Return the exchanges that change something."""
        return [each for each in self.exchanges if each.writes]

    def refuse(self, refusing: bool) -> None:
        """Cut every connection and accept none, or accept them again."""
        self._refusing = refusing
        if refusing:
            self._loop.call_soon_threadsafe(self._cut)

    def swallow(self) -> None:
        """Make a black hole of every connection open now: nothing passes, and none is closed.

        What the client opens from now on works.
        """
        self._loop.call_soon_threadsafe(lambda: self._holes.update(self._transports))

    def end_watches(self, resource: str) -> None:
        """Break the open watches of a resource, as an API server that leaves does."""

        def cancel() -> None:
            for task, watched in self._watches.items():
                if watched == resource:
                    task.cancel()

        self._loop.call_soon_threadsafe(cancel)

    def _call(self, coroutine: object) -> None:
        assert asyncio.iscoroutine(coroutine)
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_START_SECONDS)

    async def _start(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, ssl=self._upstream)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(),
            auto_decompress=False,
        )
        # A client that dies takes its requests with it, watches above all.
        server = web.Server(self._handle, handler_cancellation=True)
        runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, self._address, self._port, ssl_context=self._downstream)
        await site.start()
        self._runner = runner

    async def _stop(self) -> None:
        self._cut()
        await self._runner.cleanup()
        await self._session.close()
        await asyncio.sleep(_CLOSING_SECONDS)

    def _cut(self) -> None:
        for transport in self._transports:
            _ended(transport)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        self._transports.add(transport)
        if self._refusing:
            return _ended(transport)
        if transport in self._holes:
            await asyncio.Event().wait()
        raw = await request.read()
        exchange = Exchange(
            request.method, request.path, dict(request.query), json.loads(raw) if raw else None
        )
        self.exchanges.append(exchange)
        try:
            return await self._forward(request, transport, exchange, raw)
        except (Dropped, aiohttp.ClientError):
            return _ended(transport)

    async def _forward(
        self,
        request: web.BaseRequest,
        transport: asyncio.BaseTransport,
        exchange: Exchange,
        raw: bytes,
    ) -> web.StreamResponse:
        await asyncio.to_thread(self.gate, exchange, "before")
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_HEADERS}
        async with self._session.request(
            exchange.method,
            self._server + exchange.path,
            params=exchange.query,
            headers=headers,
            data=raw or None,
        ) as answer:
            exchange.status = answer.status
            if exchange.watches and answer.status == 200:
                return await self._relay_watch(request, transport, exchange, answer)
            body = await answer.read()
            await asyncio.to_thread(self.gate, exchange, "after")
            if transport in self._holes:
                await asyncio.Event().wait()
            return web.Response(
                body=body, status=answer.status, headers={"Content-Type": "application/json"}
            )

    async def _relay_watch(
        self,
        request: web.BaseRequest,
        transport: asyncio.BaseTransport,
        exchange: Exchange,
        answer: aiohttp.ClientResponse,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self._watches[task] = exchange.resource
        try:
            async for line in _lines(answer):
                if transport in self._holes:
                    await asyncio.Event().wait()
                if b'"type":"ERROR"' in line[:40]:
                    self.watch_errors.append(json.loads(line)["object"])
                await response.write(line)
        except asyncio.CancelledError:
            _ended(transport)
            raise
        finally:
            self._watches.pop(task, None)
        return response


def _ended(transport: asyncio.BaseTransport) -> web.StreamResponse:
    """Reset a connection; return an answer that will not be sent."""
    assert isinstance(transport, asyncio.Transport)
    transport.abort()
    return web.Response()


async def _lines(answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    """Yield whole lines; aiohttp's own reader refuses long ones."""
    rest = b""
    with contextlib.suppress(aiohttp.ClientPayloadError):
        async for chunk in answer.content.iter_any():
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield line + b"\n"
