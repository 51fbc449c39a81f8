"""A server of the list and watch protocol, with faults that a test switches on."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from ling_operator.connection import Connection
from ling_operator.reflector import Change, Reflector
from ling_operator.rest import RestClient

PATH = "/apis/example.com/v1/things"

type Thing = dict[str, Any]


class ThingServer:
    """Serves one kind, with faults that a test switches on."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.version = 100
        self.history: list[tuple[int, dict[str, Any]]] = []
        self.lists = 0
        self.watches: list[dict[str, str]] = []
        self.list_queries: list[dict[str, str]] = []
        self.page = 500
        self.list_status = 200
        self.watch_answer = "normal"  # normal, gone or busy (HTTP), expired (in-stream), silent
        self.expire_continue_once = False
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._wake = asyncio.Event()

    def set(self, name: str, **fields: object) -> None:
        kind = "MODIFIED" if name in self.objects else "ADDED"
        self.version += 1
        metadata = {
            "name": name,
            "namespace": "ns",
            "resourceVersion": str(self.version),
        }
        self.objects[name] = {"metadata": metadata, **fields}
        self._record(kind, self.objects[name])

    def delete(self, name: str) -> None:
        self.version += 1
        gone = self.objects.pop(name)
        gone["metadata"]["resourceVersion"] = str(self.version)
        self._record("DELETED", gone)

    def bookmark(self) -> None:
        self.version += 1
        self._record("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})

    def _record(self, kind: str, thing: dict[str, Any]) -> None:
        event = json.loads(json.dumps({"type": kind, "object": thing}))
        self.history.append((self.version, event))
        self._wake.set()
        self._wake = asyncio.Event()

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get(PATH, self._get)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        if query.get("watch") == "true":
            self.watches.append(query)
            return await self._watch(request)
        self.list_queries.append(query)
        return self._list(query)

    def _list(self, query: dict[str, str]) -> web.Response:
        if self.list_status != 200:
            body = {"kind": "Status", "reason": "Forbidden", "message": "no list for you"}
            return web.json_response(body, status=self.list_status)
        start = int(query.get("continue", "0"))
        if start and self.expire_continue_once:
            self.expire_continue_once = False
            body = {"kind": "Status", "reason": "Expired", "message": "continue is too old"}
            return web.json_response(body, status=410)
        limit = min(self.page, int(query["limit"]))
        names = sorted(self.objects)
        metadata: dict[str, str] = {"resourceVersion": str(self.version)}
        if start + limit < len(names):
            metadata["continue"] = str(start + limit)
        else:
            self.lists += 1
        items = [self.objects[name] for name in names[start : start + limit]]
        return web.json_response({"metadata": metadata, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        if self.watch_answer == "gone":
            body = {"kind": "Status", "reason": "Expired", "message": "too old"}
            return web.json_response(body, status=410)
        if self.watch_answer == "busy":
            return web.json_response({"reason": "TooManyRequests"}, status=429)
        response = web.StreamResponse()
        await response.prepare(request)
        if self.watch_answer == "silent":
            await asyncio.sleep(60)
        if self.watch_answer == "expired":
            status = {"code": 410, "reason": "Expired", "message": "too old resource version"}
            await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
            return response
        seen = int(request.query["resourceVersion"])
        while self.watch_answer == "normal":
            for version, event in self.history:
                if version > seen:
                    data = json.dumps(event).encode() + b"\n"
                    # Two writes: a client must not take a chunk for a line.
                    await response.write(data[:7])
                    await response.write(data[7:])
                    seen = version
            await self._wake.wait()
        return response


@asynccontextmanager
async def reflecting(
    server: ThingServer, *, idle: float = 5.0, watch_seconds: tuple[float, float] = (240, 300)
) -> AsyncGenerator[tuple[Reflector[Thing], list[Change[Thing]]]]:
    changes: list[Change[Thing]] = []
    await server.start()
    connection = Connection(
        server=f"http://127.0.0.1:{server.port}", tls=None, authorization=lambda: "Bearer t"
    )
    async with RestClient(connection, read_idle_seconds=idle) as client:
        reflector = Reflector(
            client,
            PATH,
            kind="things",
            namespace="ns",
            view=lambda item: {k: v for k, v in item.items() if k != "status"},
            on_change=changes.append,
            label_selector="app=x",
            watch_seconds=watch_seconds,
        )
        task = asyncio.create_task(reflector.run())
        try:
            yield reflector, changes
        finally:
            assert not task.done(), task.exception()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.stop()
