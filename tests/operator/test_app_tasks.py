"""Any task of the operator that ends ends the process, and the log says which it was."""

import argparse
import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
from aiohttp import web

from ling_operator import app
from ling_operator.connection import Connection
from ling_operator.controller import Controller
from ling_operator.lease import LeaderLease
from ling_operator.reflector import Reflector

WATCHES = ["trainingruns", "jobsets", "jobs", "pods", "workloads"]
LATER = {"worker 0": "work", "scraper": "scrape", "resync": "resync"}
TASKS = [*(f"watch {kind}" for kind in WATCHES), "lease", *LATER]

type End = Literal["returns", "raises"]


@asynccontextmanager
async def api_server() -> AsyncGenerator[str]:
    """Serve empty lists, watches that never say anything, and one Lease."""
    lease: dict[str, Any] = {}

    async def answer(request: web.Request) -> web.StreamResponse:
        if "/leases" in request.path:
            if request.method != "GET":
                lease.update(await request.json())
                lease["metadata"] = {"resourceVersion": str(len(str(lease)))}
            return web.json_response(lease, status=200 if lease else 404)
        if request.path == "/apis/kueue.x-k8s.io":
            version = {"groupVersion": "kueue.x-k8s.io/v1beta2"}
            return web.json_response({"preferredVersion": version})
        if request.query.get("watch") == "true":
            response = web.StreamResponse()
            await response.prepare(request)
            await asyncio.Event().wait()
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def ending(end: End) -> Callable[..., Coroutine[Any, Any, None]]:
    async def task(*_: object) -> None:
        await asyncio.sleep(0.2)
        if end == "raises":
            msg = "it broke"
            raise RuntimeError(msg)

    return task


def break_task(monkeypatch: pytest.MonkeyPatch, name: str, end: End) -> None:
    """Make one task end soon after it started."""
    broken = ending(end)
    if name == "lease":
        monkeypatch.setattr(LeaderLease, "run", broken)
    elif name in LATER:
        monkeypatch.setattr(Controller, LATER[name], broken)
    else:
        whole = Reflector[Any].run
        kind = name.removeprefix("watch ")

        async def run(reflector: Reflector[Any]) -> None:
            await (broken() if reflector.kind == kind else whole(reflector))

        monkeypatch.setattr(Reflector, "run", run)


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["returns", "raises"])
@pytest.mark.parametrize("name", TASKS)
async def test_a_task_that_ends_ends_the_process_with_1_and_its_name(
    name: str, end: End, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_task(monkeypatch, name, end)
    caplog.set_level(logging.INFO, logger="ling_operator.app")
    flags = ["--metrics-bind-address=0", "--health-probe-bind-address=0", "--workers=1"]
    options: argparse.Namespace = app._parse([*flags, "--leader-elect"])
    async with api_server() as server, asyncio.timeout(20):
        connection = Connection(server=server, tls=None, authorization=lambda: None)
        code = await app.operate(options, connection)
    assert code == 1
    fatal = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert [record.__dict__["task"] for record in fatal] == [name]
    assert [bool(record.exc_info and record.exc_info[1]) for record in fatal] == [end == "raises"]


def test_every_task_that_the_operator_makes_is_in_this_file() -> None:
    source = (app.__file__ or "").removesuffix("c")
    with open(source, encoding="utf-8") as file:
        text = file.read()
    names = [
        line.split('"')[-2] for line in text.splitlines() if "_named(" in line and '"' in line
    ]
    known = {"watch {r.name}", "lease", "worker {i}", "scraper", "resync"}
    assert set(names) == known | {"first lists and the Lease"}
