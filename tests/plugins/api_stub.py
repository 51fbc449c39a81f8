"""An API server that shows what a real one cannot be made to show on demand.

The real one is under tests/cluster.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from ling_operator.api import Phase, TrainingRunStatus
from ling_operator.caches import Caches
from ling_operator.cluster import Cluster
from ling_operator.connection import Connection
from ling_operator.plan import CreateJobSet
from ling_operator.rest import RestClient
from ling_operator.views import (
    JOB_SET_NAME_LABEL,
    RESTART_ATTEMPT_LABEL,
    TRAINER_CONTAINER,
)

RUNS = "/apis/ling.primatrix.io/v1alpha1/namespaces/team/trainingruns"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets"
KUEUE = "kueue.x-k8s.io/v1beta9"
WORKLOADS = f"/apis/{KUEUE}/namespaces/team/workloads"
EVENTS = "/apis/events.k8s.io/v1/namespaces/team/events"
PODS = "/api/v1/namespaces/team/pods"
KEY = ("team", "ling2")
CREATE = CreateJobSet({"metadata": {"name": "ling2", "uid": "js-1"}, "spec": {}})
CHANGED = TrainingRunStatus(phase=Phase.STARTING, attempt=1)


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    content_type: str
    body: Any


class ApiStub:
    """Lists what it was given, streams what it is told to, records and answers every write."""

    def __init__(self) -> None:
        self.lists: dict[str, list[dict[str, Any]]] = {}
        self.refusals: dict[tuple[str, str], tuple[int, str, str]] = {}
        self.writes: list[Request] = []
        self.streams: dict[str, asyncio.Queue[dict[str, Any]]] = {}
        self.version = 100
        self.delay = 0.0

    def refuse(self, method: str, path: str, status: int, reason: str, message: str = "") -> None:
        self.refusals[method, path] = status, reason, message

    def send(self, path: str, kind: str, item: dict[str, Any]) -> None:
        self.streams.setdefault(path, asyncio.Queue()).put_nowait({"type": kind, "object": item})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return await self._read(request)
        text = await request.text()
        await asyncio.sleep(self.delay)
        body: dict[str, Any] = json.loads(text)
        self.writes.append(Request(request.method, request.path, request.content_type, body))
        refusal = self.refusals.get((request.method, request.path))
        if refusal is not None:
            status, reason, message = refusal
            return web.json_response({"reason": reason, "message": message}, status=status)
        self.version += 1
        metadata = {"uid": f"uid-{self.version}", **body.get("metadata", {})}
        metadata["resourceVersion"] = str(self.version)
        spec = {"image": "trainer:1", "cpu": {"processes": 2}}
        return web.json_response({"spec": spec, **body, "metadata": metadata})

    async def _read(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/apis/kueue.x-k8s.io":
            return web.json_response({"preferredVersion": {"groupVersion": KUEUE}})
        if request.query.get("watch") != "true":
            items = self.lists.get(request.path, [])
            version = {"resourceVersion": str(self.version)}
            return web.json_response({"metadata": version, "items": items})
        response = web.StreamResponse()
        await response.prepare(request)
        stream = self.streams.setdefault(request.path, asyncio.Queue())
        while True:
            await response.write(json.dumps(await stream.get()).encode() + b"\n")


@dataclass
class World:
    api: ApiStub
    cluster: Cluster
    caches: Caches
    woken: list[tuple[str, str]]


@asynccontextmanager
async def served(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncGenerator[RestClient]:
    """Serve a stub's answers; yield a client of it."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = f"http://127.0.0.1:{runner.addresses[0][1]}"
    connection = Connection(server=server, tls=None, authorization=lambda: None)
    async with RestClient(connection) as client:
        try:
            yield client
        finally:
            await runner.cleanup()


@asynccontextmanager
async def followed(caches: Caches) -> AsyncGenerator[None]:
    """Run every reflector; none may have ended by itself."""
    tasks = [asyncio.create_task(each.run()) for each in caches.reflectors]
    try:
        yield
    finally:
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def world(scene: Any, *, watching: bool = False, **lists: Any) -> AsyncGenerator[World]:
    api = ApiStub()
    paths = {"runs": RUNS, "jobsets": JOBSETS, "pods": PODS, "workloads": WORKLOADS}
    api.lists = {paths[kind]: items for kind, items in lists.items()}
    async with served(api.answer) as client:
        woken: list[tuple[str, str]] = []
        caches = Caches(client, namespaces=["team"], wake=woken.append)
        async with followed(caches) if watching else nullcontext():
            if watching:
                await asyncio.wait_for(caches.synced(), 10)
            yield World(api, Cluster(client, caches, now=lambda: scene.now), caches, woken)


def stored_run(scene: Any, **status: Any) -> dict[str, Any]:
    manifest: dict[str, Any] = scene.manifest()
    manifest["metadata"]["resourceVersion"] = "7"
    return {**manifest, "status": status}


def pod(name: str, **status: Any) -> dict[str, Any]:
    labels = {JOB_SET_NAME_LABEL: "ling2", RESTART_ATTEMPT_LABEL: "0"}
    metadata = {"namespace": "team", "name": name, "uid": f"uid-{name}", "labels": labels}
    return {"metadata": {**metadata, "resourceVersion": "8"}, "spec": {}, "status": status}


def ended(code: int) -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "message": ""}}
    return {"containerStatuses": [{"name": TRAINER_CONTAINER, "state": state}]}


def stored_workload(name: str, jobset_uid: str, **spec: Any) -> dict[str, Any]:
    owner = {"kind": "JobSet", "name": "ling2", "uid": jobset_uid}
    metadata = {"namespace": "team", "name": name, "uid": f"uid-{name}", "resourceVersion": "9"}
    return {"metadata": {**metadata, "ownerReferences": [owner]}, "spec": spec}
