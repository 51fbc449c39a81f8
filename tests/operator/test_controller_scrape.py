"""The controller scrapes every host of a run, as often as its spec says."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web

from api_stub import (
    KEY,
    PODS,
    RUNS,
    pod,
    stored_run,
    world,
)
from ling_operator.api import METRICS_PORT_ANNOTATION
from ling_operator.controller import Controller
from ling_operator.scrape import ScrapeSession
from ling_operator.telemetry import Telemetry
from ling_operator.views import (
    COMPLETION_INDEX_LABEL,
    JOB_INDEX_LABEL,
    JOB_SET_UID_LABEL,
    TRAINER_CONTAINER,
)
from ling_operator.workqueue import WorkQueue
from waiting import until


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
