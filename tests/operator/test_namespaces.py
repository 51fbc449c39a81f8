"""Several namespaces watched at once: read as one, and none waits for another.

A server that holds a list back, or refuses it, stands in for what a real API server cannot be made
to do on demand; the real one is under tests/cluster.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import generate_latest

from api_stub import followed, served
from ling_operator import reflector
from ling_operator.app import _parse
from ling_operator.caches import Caches
from ling_operator.rest import RestClient
from ling_operator.telemetry import Telemetry
from ling_operator.workqueue import WorkQueue
from waiting import until

KINDS = ("trainingruns", "jobsets", "jobs", "pods", "workloads")
KUEUE = "kueue.x-k8s.io/v1beta2"

type Key = tuple[str, str]


@dataclass
class ApiStub:
    """Lists runs by namespace; a collection can be held back, refused, or have its watch ended.

    Attributes:
      held: ends of paths whose lists wait for `release`.
      refused: ends of paths that are forbidden.
      watches: paths of open watches.
    """

    runs: dict[str, list[dict[str, Any]]]
    held: set[str] = field(default_factory=set[str])
    refused: set[str] = field(default_factory=set[str])
    release: asyncio.Event = field(default_factory=asyncio.Event)
    watches: Counter[str] = field(default_factory=Counter[str])
    streams: dict[str, asyncio.Queue[dict[str, Any]]] = field(default_factory=dict)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        where = "/".join(request.path.split("/")[-2:])
        if request.path == "/apis/kueue.x-k8s.io":
            return web.json_response({"preferredVersion": {"groupVersion": KUEUE}})
        if where in self.refused:
            body = {"reason": "Forbidden", "message": f"cannot list {where}"}
            return web.json_response(body, status=403)
        if request.method != "GET":
            return web.json_response({})
        if request.query.get("watch") == "true":
            return await self._watch(request)
        if where in self.held:
            await self.release.wait()
        namespace, kind = where.split("/")
        items = self.runs.get(namespace, []) if kind == "trainingruns" else []
        return web.json_response({"metadata": {"resourceVersion": "10"}, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        self.watches[request.path] += 1
        stream = self.streams.setdefault(request.path, asyncio.Queue())
        try:
            while True:
                await response.write(json.dumps(await stream.get()).encode() + b"\n")
        finally:
            self.watches[request.path] -= 1


@dataclass
class World:
    api: ApiStub
    client: RestClient
    caches: Caches
    telemetry: Telemetry
    woken: list[Key]


@asynccontextmanager
async def watching(api: ApiStub, namespaces: Sequence[str]) -> AsyncGenerator[World]:
    async with served(api.answer) as client:
        woken: list[Key] = []
        caches = Caches(client, namespaces=namespaces, wake=woken.append)
        queue: WorkQueue[Key] = WorkQueue()
        async with followed(caches):
            yield World(api, client, caches, Telemetry(queue, caches), woken)


def run_in(scene: Any, namespace: str, name: str) -> dict[str, Any]:
    manifest: dict[str, Any] = scene.manifest(name)
    manifest["metadata"] |= {"namespace": namespace, "resourceVersion": "5"}
    return manifest


@pytest.fixture
def api(scene: Any) -> ApiStub:
    """A server with one run in each of the namespaces a and b."""
    return ApiStub({each: [run_in(scene, each, "ling2")] for each in ("a", "b")})


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [each for each in KINDS if each != "trainingruns"])
async def test_a_run_is_not_known_until_all_of_its_namespace_is_listed_and_then_wakes_once(
    kind: str, api: ApiStub
) -> None:
    api.held = {f"b/{kind}"}
    async with watching(api, ["a", "b"]) as w:
        await until(lambda: len(w.caches.runs.objects) == 2)
        await asyncio.wait_for(w.caches.synced(), 30)
        assert w.woken == [("a", "ling2")]
        assert w.caches.run(("a", "ling2")) is not None
        assert w.caches.run(("b", "ling2")) is None
        api.release.set()
        await until(lambda: w.caches.run(("b", "ling2")) is not None)
        assert w.woken == [("a", "ling2"), ("b", "ling2")]


@pytest.mark.asyncio
@pytest.mark.parametrize("namespaces", [[], ["b"]], ids=["all", "one"])
async def test_with_one_watch_a_kind_nothing_begins_before_the_last_of_them_is_listed(
    namespaces: list[str], api: ApiStub
) -> None:
    api.held = {"b/pods", "v1/pods"}
    async with watching(api, namespaces) as w:
        others = [each for each in w.caches.reflectors if each.kind != "pods"]
        begun = asyncio.create_task(w.caches.synced())
        await until(lambda: all(each.synced.is_set() for each in others))
        await asyncio.sleep(0)
        assert not begun.done()
        api.release.set()
        await asyncio.wait_for(begun, 30)


@pytest.mark.asyncio
async def test_what_is_refused_in_one_namespace_is_named_and_held_against_no_run_elsewhere(
    api: ApiStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflector, "_REFUSAL_SECONDS", 0.0)
    api.refused = {"b/pods"}
    async with watching(api, ["a", "b"]) as w:
        await until(lambda: w.caches.run(("a", "ling2")) is not None)
        await until(lambda: w.caches.refusal("b") is not None)
        assert w.caches.refusal("a") is None
        assert w.caches.refusal("b") == "403 Forbidden: cannot list b/pods"
        said = "not listed yet: pods in b (403 Forbidden: cannot list b/pods)"
        await until(lambda: w.telemetry.not_ready() == said)
        assert w.telemetry.not_alive() is None
        page = generate_latest(w.telemetry.registry).decode()
        refused = {
            line
            for line in page.splitlines()
            if line.startswith("ling_operator_watch_refused{") and line.endswith(" 1.0")
        }
        assert refused == {'ling_operator_watch_refused{kind="pods",watched_namespace="b"} 1.0'}
        api.refused.clear()
        await until(lambda: w.telemetry.not_ready() is None)
        assert w.caches.run(("b", "ling2")) is not None


@pytest.mark.asyncio
async def test_objects_of_several_namespaces_are_read_as_one_and_change_apart(
    scene: Any, api: ApiStub
) -> None:
    async with watching(api, ["a", "b"]) as w:
        runs, path = w.caches.runs, "/apis/ling.primatrix.io/v1alpha1/namespaces/a/trainingruns"
        await until(lambda: w.telemetry.not_ready() is None)
        both = {("a", "ling2"), ("b", "ling2")}
        assert set(runs.objects) == runs.objects.keys() == both
        assert runs.objects.keys() - {("a", "ling2")} == {("b", "ling2")}
        assert ("c", "ling2") not in runs.objects
        await until(lambda: path in api.streams)
        gone = run_in(scene, "a", "ling2")
        api.streams[path].put_nowait({"type": "DELETED", "object": gone})
        await until(lambda: set(runs.objects) == {("b", "ling2")})
        await until(lambda: w.woken.count(("a", "ling2")) == 2)
        lost = {"type": "ERROR", "object": {"code": 410, "message": "too old"}}
        api.streams[path].put_nowait(lost)  # it lists again, and the run is back
        await until(lambda: set(runs.objects) == both)
        assert w.woken.count(("b", "ling2")) == 1


@pytest.mark.asyncio
async def test_a_hundred_open_watches_leave_a_connection_for_a_write(api: ApiStub) -> None:
    names = [f"team-{i}" for i in range(20)]
    async with watching(api, names) as w:
        await until(lambda: sum(api.watches.values()) == len(names) * len(KINDS))
        await asyncio.wait_for(w.client.post("/api/v1/namespaces/team-0/events", {}), 20)


@pytest.mark.parametrize(
    ("flags", "watches"),
    [
        ([], [None]),
        (["--namespace=a"], ["a"]),
        (["--namespace=b", "--namespace", "a", "--namespace=b"], ["b", "a"]),
    ],
)
def test_the_flag_is_repeated_and_each_namespace_is_watched_once(
    flags: list[str], watches: list[str | None]
) -> None:
    client: Any = None
    caches = Caches(client, namespaces=_parse(flags).namespaces, wake=lambda _: None)
    made = [(each.namespace, each.kind) for each in caches.reflectors]
    assert made == [(namespace, kind) for namespace in watches for kind in KINDS]
