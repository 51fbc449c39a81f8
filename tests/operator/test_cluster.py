"""observe() and execute() at the level of HTTP: what is sent, in which order, after which answer.

A recording server stands in only for what a real API server cannot be made to show on demand;
the real one is under tests/cluster.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web

from ling_operator.api import METRICS_PORT_ANNOTATION, ConditionType, Phase, TrainingRunStatus
from ling_operator.caches import Caches
from ling_operator.cluster import Cluster
from ling_operator.conditions import find
from ling_operator.connection import Connection
from ling_operator.controller import Controller
from ling_operator.jobset import build_jobset
from ling_operator.plan import (
    CreateJobSet,
    DeleteJobSet,
    Event,
    Plan,
    SetSuspend,
    SetWorkloadActive,
)
from ling_operator.reconcile import reconcile
from ling_operator.rest import ApiError, RestClient
from ling_operator.scrape import ScrapeSession
from ling_operator.telemetry import Telemetry
from ling_operator.views import (
    COMPLETION_INDEX_LABEL,
    JOB_INDEX_LABEL,
    JOB_SET_NAME_LABEL,
    JOB_SET_UID_LABEL,
    RESTART_ATTEMPT_LABEL,
    TRAINER_CONTAINER,
)
from ling_operator.workqueue import WorkQueue

RUNS = "/apis/ling.primatrix.io/v1alpha1/namespaces/team/trainingruns"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets"
KUEUE = "kueue.x-k8s.io/v1beta9"
WORKLOADS = f"/apis/{KUEUE}/namespaces/team/workloads"
EVENTS = "/apis/events.k8s.io/v1/namespaces/team/events"
PODS = "/api/v1/namespaces/team/pods"
KEY = ("team", "ling2")


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
async def world(scene: Any, *, watching: bool = False, **lists: Any) -> AsyncGenerator[World]:
    api = ApiStub()
    paths = {"runs": RUNS, "jobsets": JOBSETS, "pods": PODS, "workloads": WORKLOADS}
    api.lists = {paths[kind]: items for kind, items in lists.items()}
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = f"http://127.0.0.1:{runner.addresses[0][1]}"
    connection = Connection(server=server, tls=None, authorization=lambda: None)
    tasks: list[asyncio.Task[None]] = []
    async with RestClient(connection) as client:
        woken: list[tuple[str, str]] = []
        caches = Caches(client, namespaces=["team"], wake=woken.append)
        if watching:
            tasks = [asyncio.create_task(r.run()) for r in caches.reflectors]
            await asyncio.wait_for(caches.synced(), 10)
        try:
            yield World(api, Cluster(client, caches, now=lambda: scene.now), caches, woken)
        finally:
            assert not any(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await runner.cleanup()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


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


def event(scene: Any, reason: str = "Halted", **changes: Any) -> Event:
    told = Event(type="Warning", reason=reason, message="It is.", attempt=1, time=scene.now)
    return replace(told, **changes)


CREATE = CreateJobSet({"metadata": {"name": "ling2", "uid": "js-1"}, "spec": {}})
CHANGED = TrainingRunStatus(phase=Phase.STARTING, attempt=1)


@pytest.mark.asyncio
async def test_the_status_is_written_first_then_the_action_then_the_events(scene: Any) -> None:
    async with world(scene) as w:
        plan = Plan(status=CHANGED, actions=(CREATE,), events=(event(scene), event(scene, "B")))
        run = scene.run().model_copy(
            update={"metadata": scene.run().metadata.model_copy(update={"resource_version": "7"})}
        )
        await w.cluster.execute(scene.observed(run), plan)
        sent = [(request.method, request.path) for request in w.api.writes]
        assert sent == [
            ("PUT", f"{RUNS}/ling2/status"),
            ("POST", JOBSETS),
            ("POST", EVENTS),
            ("POST", EVENTS),
        ]
        body = w.api.writes[0].body
        assert body["metadata"]["resourceVersion"] == "7"
        assert body["metadata"]["uid"] == run.metadata.uid
        assert body["status"]["phase"] == "Starting"
        assert "spec" not in body


@pytest.mark.asyncio
async def test_progress_of_many_runs_is_written_more_seldom_while_the_server_is_slow(
    scene: Any,
) -> None:
    async with world(scene, watching=True, runs=[stored_run(scene)]) as w:
        seen = await w.cluster.observe("team", "ling2")
        assert seen is not None
        assert seen.steady_write == timedelta(seconds=10)
        view = w.caches.runs.objects["team", "ling2"]
        w.caches.runs.each["team"]._objects.update({("team", str(i)): view for i in range(10_000)})
        w.api.delay = 0.2
        await w.cluster.execute(seen, Plan(status=CHANGED))
        slow = await w.cluster.observe("team", "ling2")
        assert slow is not None
        assert slow.steady_write > timedelta(seconds=20)


@pytest.mark.asyncio
async def test_nothing_is_done_after_a_status_write_that_was_out_of_date(scene: Any) -> None:
    async with world(scene) as w:
        w.api.refuse("PUT", f"{RUNS}/ling2/status", 409, "Conflict")
        plan = Plan(status=CHANGED, actions=(CREATE,), events=(event(scene),))
        with pytest.raises(ApiError) as caught:
            await w.cluster.execute(scene.observed(scene.run()), plan)
        assert caught.value.is_conflict
        assert len(w.api.writes) == 1


@pytest.mark.asyncio
async def test_a_status_that_did_not_change_is_written_only_before_a_create(scene: Any) -> None:
    async with world(scene) as w:
        run = scene.run()
        suspend = SetSuspend("js-1", True, "Halted")
        await w.cluster.execute(scene.observed(run), Plan(status=run.status, actions=(suspend,)))
        assert [request.method for request in w.api.writes] == ["PATCH"]
        await w.cluster.execute(scene.observed(run), Plan(status=run.status, actions=(CREATE,)))
        assert [request.method for request in w.api.writes] == ["PATCH", "PUT", "POST"]


@pytest.mark.asyncio
async def test_suspend_patches_one_field_of_the_jobset_of_that_uid_and_delete_names_it_too(
    scene: Any,
) -> None:
    async with world(scene) as w:
        run = scene.run()
        for action in (SetSuspend("js-1", True, "Halted"), DeleteJobSet("js-1", "attempt 2")):
            await w.cluster.execute(
                scene.observed(run), Plan(status=run.status, actions=(action,))
            )
        patch, delete = w.api.writes
        assert (patch.path, patch.content_type) == (
            f"{JOBSETS}/ling2",
            "application/merge-patch+json",
        )
        assert patch.body == {"metadata": {"uid": "js-1"}, "spec": {"suspend": True}}
        assert (delete.method, delete.path) == ("DELETE", f"{JOBSETS}/ling2")
        assert delete.body["preconditions"] == {"uid": "js-1"}
        assert delete.body["propagationPolicy"] == "Foreground"


def stored_workload(name: str, jobset_uid: str, **spec: Any) -> dict[str, Any]:
    owner = {"kind": "JobSet", "name": "ling2", "uid": jobset_uid}
    metadata = {"namespace": "team", "name": name, "uid": f"uid-{name}", "resourceVersion": "9"}
    return {"metadata": {**metadata, "ownerReferences": [owner]}, "spec": spec}


@pytest.mark.asyncio
async def test_a_workload_is_found_by_its_jobsets_uid_and_patched_in_the_preferred_version(
    scene: Any,
) -> None:
    jobset = build_jobset(scene.run(), attempt=1, restore_before_step=None)
    jobset["metadata"] |= {"uid": "js-2", "resourceVersion": "8"}
    lists = {
        "runs": [stored_run(scene)],
        "jobsets": [jobset],
        "workloads": [stored_workload("old", "js-1"), stored_workload("new", "js-2", active=True)],
    }
    async with world(scene, watching=True, **lists) as w:
        observed = await w.cluster.observe("team", "ling2")
        assert observed is not None
        assert observed.workload is not None
        assert (observed.workload.name, observed.workload.active) == ("new", True)
        w.woken.clear()
        w.api.send(WORKLOADS, "MODIFIED", stored_workload("new", "js-2", active=False))
        await until(lambda: ("team", "ling2") in w.woken)
        action = SetWorkloadActive("new", "uid-new", False, "Halted")
        plan = Plan(status=observed.run.status, actions=(action,))
        await w.cluster.execute(observed, plan)
        (patch,) = w.api.writes
        assert (patch.method, patch.path) == ("PATCH", f"{WORKLOADS}/new")
        assert patch.body == {"metadata": {"uid": "uid-new"}, "spec": {"active": False}}
        w.api.send(WORKLOADS, "DELETED", stored_workload("new", "js-2"))
        await until(lambda: w.caches.workload(("team", "ling2"), "js-2") is None)


@pytest.mark.asyncio
async def test_a_jobset_that_is_gone_is_no_failure_of_suspend_or_delete(scene: Any) -> None:
    async with world(scene) as w:
        run = scene.run()
        for method, action in (
            ("PATCH", SetSuspend("js-1", True, "Halted")),
            ("DELETE", DeleteJobSet("js-1", "attempt 2")),
        ):
            w.api.refuse(method, f"{JOBSETS}/ling2", 404, "NotFound")
            plan = Plan(status=run.status, actions=(action,), events=(event(scene, method),))
            await w.cluster.execute(scene.observed(run), plan)
        assert sum(request.path == EVENTS for request in w.api.writes) == 2


@pytest.mark.asyncio
async def test_an_event_is_posted_until_the_server_has_it_and_never_when_it_is_old(
    scene: Any,
) -> None:
    async with world(scene) as w:
        run = scene.run()
        long_note = "x" * 1023 + "\u00e9\u00e9"
        plan = Plan(status=run.status, events=(event(scene, message=long_note),))
        w.api.refuse("POST", EVENTS, 500, "InternalError")
        with pytest.raises(ApiError):
            await w.cluster.execute(scene.observed(run), plan)
        w.api.refuse("POST", EVENTS, 409, "AlreadyExists")
        await w.cluster.execute(scene.observed(run), plan)
        await w.cluster.execute(scene.observed(run), plan)
        assert len(w.api.writes) == 2, "the server has it; it is not posted again"
        names = {request.body["metadata"]["name"] for request in w.api.writes}
        assert names == {plan.events[0].name(run)}
        body = w.api.writes[0].body
        assert len(body["note"].encode()) <= 1024
        assert body["regarding"]["uid"] == run.metadata.uid
        assert body["eventTime"] == "2026-11-30T09:00:00.000000Z"

        old = event(scene, "Old", time=scene.now - timedelta(minutes=51))
        await w.cluster.execute(scene.observed(run), Plan(status=run.status, events=(old,)))
        assert len(w.api.writes) == 2


@pytest.mark.asyncio
async def test_a_refused_create_is_observed_for_its_attempt_and_forgotten_after_a_success(
    scene: Any,
) -> None:
    async with world(scene, watching=True, runs=[stored_run(scene)]) as w:
        w.api.refuse("POST", JOBSETS, 422, "Invalid", "spec.x: no")
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        plan = Plan(status=observed.run.status, actions=(CREATE,), events=(event(scene),))
        with pytest.raises(ApiError):
            await w.cluster.execute(observed, plan)
        told = sum(request.path == EVENTS for request in w.api.writes)
        assert told == 1, "what the status says is told although the action was refused"
        again = await w.cluster.observe(*KEY)
        assert again is not None
        assert again.create_error == "spec.x: no"
        w.api.refusals.clear()
        await w.cluster.execute(again, plan)
        after = await w.cluster.observe(*KEY)
        assert after is not None
        assert after.create_error is None


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "path"), [("PATCH", f"{JOBSETS}/ling2"), ("POST", EVENTS)], ids=["patch", "event"]
)
async def test_a_missing_right_is_observed_until_the_server_accepts(
    method: str, path: str, scene: Any
) -> None:
    async with world(scene, watching=True, runs=[stored_run(scene)]) as w:
        said = "jobsets is forbidden: cannot patch"
        w.api.refuse(method, path, 403, "Forbidden", said)
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        assert observed.refusal is None
        plan = Plan(
            status=observed.run.status,
            actions=(SetSuspend("js-1", True, "Halted"),),
            events=(event(scene),),
        )
        with pytest.raises(ApiError):
            await w.cluster.execute(observed, plan)
        assert [request.method for request in w.api.writes] == ["PATCH", "POST"]
        again = await w.cluster.observe(*KEY)
        assert again is not None
        assert said in str(again.refusal)
        refused = find(reconcile(again).status.conditions, ConditionType.PERMITTED)
        assert refused is not None
        assert (refused.status, said in refused.message) == ("False", True)
        w.api.refusals.clear()
        await w.cluster.execute(again, plan)
        after = await w.cluster.observe(*KEY)
        assert after is not None
        assert after.refusal is None


@pytest.mark.asyncio
async def test_what_we_wrote_is_observed_before_the_watch_brings_it(scene: Any) -> None:
    async with world(scene, watching=True, runs=[stored_run(scene)]) as w:
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        assert observed.jobset is None
        await w.cluster.execute(observed, Plan(status=CHANGED, actions=(CREATE,)))
        after = await w.cluster.observe(*KEY)
        assert after is not None
        assert after.run.status.phase is Phase.STARTING
        assert after.run.metadata.resource_version == "101"
        assert after.jobset is not None
        assert after.jobset.name == "ling2"

        # A newer version from the watch replaces our own, even one that says less.
        newer = stored_run(scene, phase="Pending")
        newer["metadata"]["resourceVersion"] = "200"
        w.api.send(RUNS, "MODIFIED", newer)
        await until(lambda: w.caches.run(KEY).run.metadata.resource_version == "200")  # type: ignore[union-attr]
        latest = await w.cluster.observe(*KEY)
        assert latest is not None
        assert latest.run.status.phase is Phase.PENDING


@pytest.mark.asyncio
async def test_while_the_watch_is_silent_each_status_write_follows_the_last_one(
    scene: Any,
) -> None:
    async with world(scene, watching=True, runs=[stored_run(scene)]) as w:
        first = await w.cluster.observe(*KEY)
        assert first is not None
        versions = [first.run.metadata.resource_version]
        for restarts in range(1, 41):
            observed = await w.cluster.observe(*KEY)
            assert observed is not None
            status = observed.run.status.model_copy(update={"restarts": restarts})
            await w.cluster.execute(observed, Plan(status=status))
            after = await w.cluster.observe(*KEY)
            assert after is not None
            assert after.run.status.restarts == restarts
            versions.append(after.run.metadata.resource_version)
        sent = [request.body["metadata"]["resourceVersion"] for request in w.api.writes]
        assert sent == versions[:-1]
        late = stored_run(scene)
        late["metadata"]["resourceVersion"] = "999"
        w.api.send(RUNS, "MODIFIED", late)
        await until(lambda: w.caches.runs.objects[KEY].version == "999")
        newest = await w.cluster.observe(*KEY)
        assert newest is not None
        assert newest.run.metadata.resource_version == "999", "somebody else has written"


@pytest.mark.asyncio
async def test_a_deleted_pod_is_remembered_if_its_end_is_evidence(scene: Any) -> None:
    pods = [pod("diverged"), pod("paused"), pod("taken"), pod("running", phase="Running")]
    taken = {"conditions": [{"type": "DisruptionTarget", "status": "True"}]}
    async with world(scene, watching=True, runs=[stored_run(scene)], pods=pods) as w:
        w.api.send(PODS, "DELETED", pod("diverged", phase="Failed", **ended(90)))
        w.api.send(PODS, "DELETED", pod("paused", phase="Failed", **ended(143)))
        w.api.send(PODS, "DELETED", pod("taken", phase="Failed", **ended(143), **taken))
        await until(lambda: len(w.caches.pods.objects) == 1)
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        seen = {p.name: (p.gone, p.exit_code, p.live) for p in observed.pods}
        assert seen == {
            "running": (False, None, True),
            "diverged": (True, 90, False),
            "taken": (True, 143, False),
        }


@pytest.mark.asyncio
async def test_memory_of_gone_pods_is_bounded_and_keeps_the_diverged_one(scene: Any) -> None:
    async with world(scene, watching=True, runs=[stored_run(scene)]) as w:
        w.api.send(PODS, "DELETED", pod("diverged", phase="Failed", **ended(90)))
        for i in range(200):
            w.api.send(PODS, "DELETED", pod(f"crashed-{i}", phase="Failed", **ended(1)))
        w.api.send(PODS, "ADDED", pod("last", phase="Running"))
        await until(lambda: len(w.caches.pods.objects) == 1)
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        assert len(observed.pods) <= 65
        assert "diverged" in {p.name for p in observed.pods}


def watching_run(name: str, **status: Any) -> dict[str, Any]:
    metadata = {"namespace": "team", "name": name, "uid": f"uid-{name}", "resourceVersion": "7"}
    return {"metadata": metadata, "spec": {"watch": {"jobSet": "ling2"}}, "status": status}


@pytest.mark.asyncio
async def test_what_belongs_to_a_watched_jobset_is_seen_by_the_runs_that_watch_it(
    scene: Any,
) -> None:
    jobset = build_jobset(scene.run(), attempt=1, restore_before_step=None)
    jobset["metadata"] |= {"uid": "js-1", "resourceVersion": "8"}
    lists = {
        "runs": [watching_run("b"), watching_run("a")],
        "jobsets": [jobset],
        "workloads": [stored_workload("wl", "js-1", active=True)],
        "pods": [pod("p", phase="Running")],
    }
    async with world(scene, watching=True, **lists) as w:
        first, second = [await w.cluster.observe("team", name) for name in "ab"]
        assert first is not None
        assert second is not None
        for observed in (first, second):
            assert observed.jobset is not None
            assert observed.jobset.uid == "js-1"
            assert observed.workload is not None
            assert [p.name for p in observed.pods] == ["p"]
        assert (first.other_watcher, second.other_watcher) == (None, "a")
        w.woken.clear()
        w.api.send(PODS, "DELETED", pod("p", phase="Failed", **ended(90)))
        await until(lambda: w.woken == [("team", "a"), ("team", "b")])
        # Who has watched this very JobSet before keeps it, whatever its name is.
        kept = {"attempt": 1, "jobSetUID": "js-1", "attempts": [
            {"attempt": 1, "jobSetUID": "js-1", "startTime": "2026-11-30T09:00:00Z"},
        ]}  # fmt: skip
        w.api.send(RUNS, "MODIFIED", watching_run("b", **kept))
        await until(lambda: len(w.woken) == 3)
        first, second = [await w.cluster.observe("team", name) for name in "ab"]
        assert first is not None
        assert second is not None
        assert (first.other_watcher, second.other_watcher) == ("b", None)
        assert [p.exit_code for p in second.pods] == [90]
        w.api.send(RUNS, "DELETED", watching_run("b"))
        await until(lambda: w.caches.run(("team", "b")) is None)
        first = await w.cluster.observe("team", "a")
        assert first is not None
        assert first.other_watcher is None
        await w.cluster.execute(
            first, Plan(status=first.run.status, actions=(SetSuspend("js-1", True, "x"),))
        )
        assert w.api.writes[-1].path == f"{JOBSETS}/ling2"
        w.api.send(RUNS, "DELETED", watching_run("a"))
        await until(lambda: w.caches.run(("team", "a")) is None)
        w.woken.clear()
        w.api.send(PODS, "ADDED", pod("q", phase="Running"))
        await until(lambda: len(w.caches.pods.objects) == 1)
        assert w.woken == []
        assert w.caches.pods_of(KEY) == w.caches.pods_of(("team", "ling2"))


@pytest.mark.asyncio
async def test_a_deleted_run_is_observed_as_none_and_everything_about_it_is_dropped(
    scene: Any,
) -> None:
    async with world(scene, watching=True, runs=[stored_run(scene)]) as w:
        w.cluster.record(KEY, scene.sample(3))
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        assert observed.sample is not None
        w.api.send(PODS, "DELETED", pod("diverged", phase="Failed", **ended(90)))
        w.api.send(RUNS, "DELETED", stored_run(scene))
        await until(lambda: w.caches.run(KEY) is None)
        assert await w.cluster.observe(*KEY) is None
        w.api.send(RUNS, "ADDED", stored_run(scene))
        await until(lambda: w.caches.run(KEY) is not None)
        anew = await w.cluster.observe(*KEY)
        assert anew is not None
        assert anew.sample is None
        assert anew.pods == ()


@pytest.mark.asyncio
async def test_a_spec_that_cannot_be_read_is_observed_with_what_is_wrong(scene: Any) -> None:
    run = stored_run(scene, phase="Halted")
    run["spec"]["future"] = True
    async with world(scene, watching=True, runs=[run]) as w:
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        assert observed.spec_error is not None
        assert "spec.future" in observed.spec_error
        assert observed.run.status.phase is Phase.HALTED, "what was decided is still known"


@pytest.mark.asyncio
async def test_any_change_of_what_belongs_to_a_run_wakes_the_run(scene: Any) -> None:
    async with world(scene, watching=True, runs=[stored_run(scene)]) as w:
        assert w.woken == [KEY]
        w.api.send(PODS, "ADDED", pod("p", phase="Running"))
        w.api.send(JOBSETS, "ADDED", {"metadata": {**pod("ling2")["metadata"]}})
        job = {"metadata": {**pod("ling2-slice-job-0")["metadata"]}}
        w.api.send("/apis/batch/v1/namespaces/team/jobs", "ADDED", job)
        await until(lambda: len(w.woken) == 4)
        assert set(w.woken) == {KEY}
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        assert observed.jobs == ("ling2-slice-job-0",)
        assert observed.jobset is not None


@pytest.mark.asyncio
async def test_of_a_spec_that_cannot_be_read_suspend_and_health_still_count(scene: Any) -> None:
    run = stored_run(scene, attempt=3)
    health = {"zeroLoss": {"action": "Ignore"}}
    run["spec"] |= {"elastic": True, "attempt": 4, "suspend": True, "health": health}
    async with world(scene, watching=True, runs=[run]) as w:
        observed = await w.cluster.observe(*KEY)
        assert observed is not None
        spec = observed.run.spec
        assert (spec.attempt, spec.suspend) == (3, True)
        assert spec.health.zero_loss.action == "Ignore"


@asynccontextmanager
async def trainers(page: str, asked: list[str] | None = None) -> AsyncGenerator[int]:
    """A port that answers as every host's metrics page does, and notes that it was asked."""

    async def answer(request: web.Request) -> web.Response:
        if asked is not None:
            asked.append(request.path)
        return web.Response(text=page)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


def host(index: int, port: int) -> dict[str, Any]:
    """A running pod of JobSet js-1 whose metrics are at this port of this machine."""
    running = {"name": TRAINER_CONTAINER, "state": {"running": {}}}
    raw = pod(f"p{index}", phase="Running", podIP="127.0.0.1", containerStatuses=[running])
    raw["metadata"]["labels"] |= {
        JOB_SET_UID_LABEL: "js-1",
        JOB_INDEX_LABEL: "0",
        COMPLETION_INDEX_LABEL: str(index),
    }
    raw["metadata"]["annotations"] = {METRICS_PORT_ANNOTATION: str(port)}
    return {**raw, "spec": {"nodeName": f"node-{index}"}}


@pytest.mark.asyncio
async def test_the_heartbeats_of_all_hosts_are_read_besides_process_0s_page(scene: Any) -> None:
    page = "ling_step 12\nling_heartbeat_timestamp_seconds 1.7672256e+09\n"
    run = stored_run(scene, attempt=1, jobSetUID="js-1", phase="Running")
    async with trainers(page) as port:
        pods = [host(index, port) for index in range(3)]
        async with world(scene, watching=True, runs=[run], pods=pods) as w:
            queue = WorkQueue[tuple[str, str]]()
            controller = Controller(queue, w.caches, w.cluster, Telemetry(queue, w.caches))
            async with ScrapeSession() as session:
                scraping = asyncio.create_task(controller.scrape(session))
                await until(lambda: len(w.cluster.heartbeats(KEY)) == 3)
                scraping.cancel()
                await asyncio.gather(scraping, return_exceptions=True)
            observed = await w.cluster.observe(*KEY)
            assert observed is not None
            beats = {beat.host: beat.time for beat in observed.heartbeats}
            assert beats == dict.fromkeys(
                ("node-0", "node-1", "node-2"), datetime(2026, 1, 1, tzinfo=UTC)
            )
            w.api.send(PODS, "DELETED", host(2, port))
            await until(lambda: len(w.cluster.heartbeats(KEY)) == 2)


@pytest.mark.asyncio
async def test_an_interval_that_is_shortened_counts_from_now_on(scene: Any) -> None:
    run = stored_run(scene, attempt=1, jobSetUID="js-1", phase="Running")
    run["spec"]["health"] = {"scrapeIntervalSeconds": 3600}
    asked: list[str] = []
    async with (
        trainers("ling_step 12\n", asked) as port,
        world(scene, watching=True, runs=[run], pods=[host(0, port)]) as w,
        ScrapeSession() as session,
    ):
        queue = WorkQueue[tuple[str, str]]()
        controller = Controller(queue, w.caches, w.cluster, Telemetry(queue, w.caches))
        scraping = asyncio.create_task(controller.scrape(session))
        await until(lambda: asked)
        run["spec"]["health"] = {"scrapeIntervalSeconds": 1}
        run["metadata"]["resourceVersion"] = "9"
        w.api.send(RUNS, "MODIFIED", run)
        await until(lambda: len(asked) >= 3)
        scraping.cancel()
        await asyncio.gather(scraping, return_exceptions=True)
