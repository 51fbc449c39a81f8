"""The operator's process: flags, probes, own metrics, faults of one object, ends."""

import asyncio
import json
import re
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ling_operator import telemetry
from ling_operator.app import main
from ling_operator.caches import Caches
from ling_operator.connection import Connection
from ling_operator.rest import RestClient
from ling_operator.telemetry import Telemetry
from ling_operator.workqueue import WorkQueue
from ports import free_ports

JOBSETS = "jobset.x-k8s.io"


class ApiStub:
    """An API server with TrainingRuns and no Kueue; some kinds can be missing or broken."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.missing = ""
        self.broken = ""
        self.statuses: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str]] = []
        self.streams: dict[str, asyncio.Queue[dict[str, Any]]] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        no_kueue = request.path.startswith("/apis/kueue.x-k8s.io")
        if no_kueue or (self.missing and self.missing in request.path):
            message = "the server could not find the requested resource"
            return web.json_response({"reason": "NotFound", "message": message}, status=404)
        if request.method != "GET":
            body = await request.json()
            if request.path.endswith("/status"):
                self.statuses.append(body)
                name = body["metadata"]["name"]
                (body["spec"],) = (r["spec"] for r in self.runs if r["metadata"]["name"] == name)
                body["metadata"]["resourceVersion"] = str(100 + len(self.statuses))
            return web.json_response(body)
        if request.query.get("watch") != "true":
            items = self.runs if request.path.endswith("/trainingruns") else []
            listed = {"metadata": {"resourceVersion": "10"}, "items": items}
            broken = bool(self.broken) and self.broken in request.path
            return web.json_response({} if broken else listed)
        response = web.StreamResponse()
        await response.prepare(request)
        stream = self.streams.setdefault(request.path, asyncio.Queue())
        while True:
            await response.write(json.dumps(await stream.get()).encode() + b"\n")


class Operator:
    """`ling-operator` as a process, and what it said."""

    def __init__(self, process: asyncio.subprocess.Process, metrics: int, probes: int) -> None:
        self.process = process
        self.metrics = metrics
        self.probes = probes

    async def get(self, port: int, path: str) -> tuple[int, str]:
        url = f"http://127.0.0.1:{port}{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status, await answer.text()

    async def ready(self) -> bool:
        try:
            return (await self.get(self.probes, "/readyz"))[0] == 200
        except aiohttp.ClientError:
            return False

    async def end(self) -> tuple[int, list[dict[str, Any]]]:
        """Wait for the end; return the code and the log's events."""
        _, error = await asyncio.wait_for(self.process.communicate(), 30)
        assert self.process.returncode is not None
        return self.process.returncode, [json.loads(line) for line in error.splitlines()]


@asynccontextmanager
async def operating(api: ApiStub, directory: Path) -> AsyncGenerator[Operator]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    kubeconfig = directory / "kubeconfig"
    kubeconfig.write_text(config_for(f"http://127.0.0.1:{runner.addresses[0][1]}"))
    metrics, probes = free_ports(2)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "ling_operator.app",
        f"--kubeconfig={kubeconfig}",
        "--namespace=team",
        f"--metrics-bind-address=127.0.0.1:{metrics}",
        f"--health-probe-bind-address=127.0.0.1:{probes}",
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Operator(process, metrics, probes)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        await runner.cleanup()


def config_for(server: str) -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "users": [{"name": "c", "user": {"token": "t"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        }
    )


async def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while True:
            result = condition()
            if await result if asyncio.iscoroutine(result) else result:
                return
            await asyncio.sleep(0.05)


def run(scene: Any, name: str, **status: Any) -> dict[str, Any]:
    manifest: dict[str, Any] = scene.manifest(name)
    manifest["metadata"] |= {"uid": f"uid-{name}", "resourceVersion": "5"}
    return {**manifest, "status": status} if status else manifest


def created_condition(body: dict[str, Any]) -> dict[str, Any]:
    conditions = body["status"]["conditions"]
    return next(c for c in conditions if c["type"] == "Created")


@pytest.mark.asyncio
async def test_without_the_jobset_crd_it_runs_and_says_so_in_the_object(
    scene: Any, tmp_path: Path
) -> None:
    api = ApiStub()
    api.missing = JOBSETS
    api.runs = [run(scene, "early")]
    async with operating(api, tmp_path) as operator:
        await until(operator.ready)
        await until(
            lambda: any(created_condition(b)["reason"] == "CreateFailed" for b in api.statuses)
        )
        assert (
            "is the JobSet controller installed?" in created_condition(api.statuses[-1])["message"]
        )
        api.missing = ""
        api.requests.clear()  # those that were answered with 404
        await until(
            lambda: ("GET", f"/apis/{JOBSETS}/v1alpha2/namespaces/team/jobsets") in api.requests
        )
        assert (await operator.get(operator.probes, "/healthz")) == (200, "ok")
        operator.process.send_signal(signal.SIGTERM)
        code, log = await operator.end()
    assert code == 0
    assert {event["event"] for event in log} >= {"started", "caches synced", "stopped by a signal"}
    assert all({"time", "level", "logger"} <= event.keys() for event in log)


@pytest.mark.asyncio
async def test_a_task_that_dies_ends_the_process_and_is_named(tmp_path: Path) -> None:
    api = ApiStub()
    api.broken = "/pods"  # a list without items: nothing that an API server would send
    async with operating(api, tmp_path) as operator:
        code, log = await operator.end()
    assert code == 1
    last = log[-1]
    assert last["task"] == "watch pods in team"
    assert "KeyError" in last["trace"]


@pytest.mark.asyncio
async def test_an_object_that_cannot_be_decided_on_does_not_stop_the_others(
    scene: Any, tmp_path: Path
) -> None:
    api = ApiStub()
    api.runs = [run(scene, "newer", phase="Dancing"), run(scene, "plain")]
    async with operating(api, tmp_path) as operator:
        await until(operator.ready)
        page = ""

        async def both_passed() -> bool:
            nonlocal page
            _, page = await operator.get(operator.metrics, "/metrics")
            failed = re.search(r'ling_operator_reconcile_total\{result="error"\} [1-9]', page)
            return failed is not None and 'ling_run_phase{phase="Pending",run="plain"' in page

        await until(both_passed)
        operator.process.send_signal(signal.SIGTERM)
        code, log = await operator.end()
    assert code == 0
    assert {body["metadata"]["name"] for body in api.statuses} == {"plain"}
    failed = [event for event in log if event["event"] == "pass failed"]
    assert {event["run"] for event in failed} == {"team/newer"}
    assert 'ling_run_phase{phase="Pending",run="plain",run_namespace="team"} 1.0' in page
    assert 'run="newer"' not in page


@pytest.mark.asyncio
async def test_series_of_a_run_come_from_its_status_and_go_with_its_object(
    scene: Any, tmp_path: Path
) -> None:
    api = ApiStub()
    halt = {"reason": "NonFiniteLoss", "time": "2026-11-30T09:00:00Z", "step": 7}
    halted = {"type": "Halted", "status": "True", "reason": "NonFiniteLoss"}
    halted["lastTransitionTime"] = "2026-11-30T09:00:00Z"
    attempts = [{"attempt": 1, "startTime": "2026-11-30T08:00:00Z"}]
    sick = run(
        scene,
        "sick",
        phase="Halted",
        attempt=1,
        restarts=2,
        halt=halt,
        conditions=[halted],
        lastFiniteCheckpoint=6,
        attempts=attempts,
    )
    told = {"reason": "LossSpike", "since": "2026-11-30T08:00:00Z"}
    health = {"alerts": [told | {"lastTime": "2026-11-30T08:59:00Z"}]}
    ailing = run(scene, "ailing", phase="Running", attempt=1, health=health, attempts=attempts)
    sick["status"]["health"] = health
    api.runs = [sick, ailing]
    async with operating(api, tmp_path) as operator:
        await until(operator.ready)
        _, page = await operator.get(operator.metrics, "/metrics")
        alerts = re.findall(r"^ling_run_alert\{.*", page, flags=re.MULTILINE)
        assert alerts == [
            'ling_run_alert{reason="LossSpike",run="ailing",run_namespace="team"} 1.0'
        ]
        labels = 'run="sick",run_namespace="team"'
        assert f"ling_run_halted{{{labels}}} 1.0" in page
        stamp = re.search(
            rf'ling_run_halted_timestamp_seconds\{{reason="NonFiniteLoss",{labels}\}} (\S+)', page
        )
        assert stamp is not None
        assert float(stamp[1]) == datetime(2026, 11, 30, 9, tzinfo=UTC).timestamp()
        began = re.search(rf"ling_run_attempt_start_timestamp_seconds\{{{labels}\}} (\S+)", page)
        assert began is not None
        assert float(began[1]) == datetime(2026, 11, 30, 8, tzinfo=UTC).timestamp()
        assert f"ling_run_attempt{{{labels}}} 1.0" in page
        assert f"ling_run_restarts{{{labels}}} 2.0" in page
        assert 'ling_operator_watch_age_seconds{kind="pods",watched_namespace="team"}' in page
        assert 'ling_operator_watch_refused{kind="pods",watched_namespace="team"} 0.0' in page
        assert f"ling_run_permitted{{{labels}}} 1.0" in page
        assert f"ling_run_last_finite_checkpoint_step{{{labels}}} 6.0" in page
        assert 'ling_run_last_finite_checkpoint_step{run="ailing"' not in page
        path = "/apis/ling.primatrix.io/v1alpha1/namespaces/team/trainingruns"
        await until(lambda: path in api.streams)
        api.streams[path].put_nowait({"type": "DELETED", "object": sick})

        async def gone() -> bool:
            return 'run="sick"' not in (await operator.get(operator.metrics, "/metrics"))[1]

        await until(gone)


@pytest.mark.asyncio
async def test_it_is_not_alive_while_a_pass_never_ends_or_a_watch_stops_trying(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nowhere = Connection(server="http://127.0.0.1:1", tls=None, authorization=lambda: None)
    async with RestClient(nowhere) as client:
        queue: WorkQueue[tuple[str, str]] = WorkQueue()
        caches = Caches(client, namespaces=[], wake=queue.add)
        watched = Telemetry(queue, caches)
        watched.workers_started()
        queue.add(("team", "stuck"))
        await queue.get()
        assert watched.not_alive() is None
        monkeypatch.setattr(telemetry, "LONGEST_SILENCE_SECONDS", 2.0)
        time.sleep(2.1)
        assert "watch of" in str(watched.not_alive())
        tasks = [asyncio.create_task(reflector.run()) for reflector in caches.reflectors]
        await asyncio.sleep(0.15)
        assert watched.not_alive() == "the workers do nothing", "an unreachable server is no fault"
        queue.done(("team", "stuck"))
        assert watched.not_alive() is None
        standby = Telemetry(queue, caches, leading=lambda: False)
        monkeypatch.setattr(telemetry, "LONGEST_DEAFNESS_SECONDS", 0.2)
        for each in (watched, standby):
            assert "no list, event, bookmark or refusal of trainingruns" in str(each.not_alive())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--metrics-bind-address=8080"], "'8080' is no address"),
        (["--health-probe-bind-address=:99999"], "':99999' is no address"),
        (["--workers=0"], "'0' is no positive number"),
        (["--log-level=loud"], "invalid choice: 'loud'"),
        (["--namespace=a,b"], "'a,b' is no namespace; write --namespace once for each"),
        (["--namespace="], "'' is no namespace"),
    ],
)
def test_a_wrong_flag_ends_with_2_and_says_which(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
