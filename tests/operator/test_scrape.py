"""Scrapes of a real HTTP server that answers well, badly, slowly, too much or not at all."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from aiohttp import web

from ling_operator.scrape import (
    MAX_PAGE_BYTES,
    ScrapeFailure,
    ScrapeSession,
    ScrapeTarget,
    scrape,
)
from ling_operator.verdict import HealthSample
from trainer_page import PAGE, target


@asynccontextmanager
async def serving(
    body: bytes, *, status: int = 200, delay: float = 0, endless: bool = False
) -> AsyncGenerator[int]:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for start in range(0, len(body), 65536):
            await asyncio.sleep(delay)
            await response.write(body[start : start + 65536])
        while endless:
            await response.write(b"#" * 65536)
        return response

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def scrape_of(port: int) -> HealthSample | ScrapeFailure:
    async with ScrapeSession() as session:
        return await scrape(session, target(port))


@pytest.mark.asyncio
async def test_a_page_becomes_a_sample_with_every_level_and_counter() -> None:
    async with serving(PAGE.encode()) as port:
        result = await scrape_of(port)
    assert isinstance(result, HealthSample)
    assert (result.pod_uid, result.page_pod_uid) == ("u1", "u1")
    assert (result.step, result.target_steps) == (12, 200)
    assert (result.loss, result.lm_loss, result.raw_grad_norm) == (3.25, 3.0, 1.5)
    assert (result.num_zeros, result.tokens_per_second) == (7, 2048.5)
    assert (result.last_finite_step, result.last_nonfinite_step) == (12, 3)
    assert result.last_finite_checkpoint == 10
    assert result.last_step_time == datetime(2026, 1, 1, tzinfo=UTC)
    assert result.consecutive_max == 1
    assert dict(result.nonfinite_steps) == {
        ("nan", "NonFiniteLoss"): 1,
        ("inf", "NonFiniteGradient"): 0,
    }
    assert not result.is_nan
    assert abs((result.time - datetime.now(UTC)).total_seconds()) < 60


@pytest.mark.asyncio
async def test_a_black_hole_costs_three_seconds_and_gives_no_sample() -> None:
    with socket.socket() as hole:  # accepts by its backlog, never answers
        hole.bind(("127.0.0.1", 0))
        hole.listen()
        started = time.monotonic()
        result = await scrape_of(hole.getsockname()[1])
    assert isinstance(result, ScrapeFailure)
    assert result.reason == "Timeout"
    assert 2.5 < time.monotonic() - started < 6


@pytest.mark.asyncio
async def test_a_trickle_is_cut_off_at_the_same_time() -> None:
    async with serving(b"x" * 65536 * 100, delay=1.0) as port:
        started = time.monotonic()
        result = await scrape_of(port)
        assert isinstance(result, ScrapeFailure)
        assert result.reason == "Timeout"
        assert time.monotonic() - started < 6


@pytest.mark.asyncio
async def test_a_page_without_end_is_refused_after_256_kib() -> None:
    async with serving(PAGE.encode(), endless=True) as port:
        result = await scrape_of(port)
    assert isinstance(result, ScrapeFailure)
    assert result.reason == "TooLarge"


@pytest.mark.asyncio
async def test_a_page_of_just_256_kib_is_read() -> None:
    page = PAGE.encode()
    padding = MAX_PAGE_BYTES - len(page)
    async with serving(page + b"#" * padding) as port:
        assert isinstance(await scrape_of(port), HealthSample)


@pytest.mark.asyncio
async def test_a_closed_port_and_an_error_page_give_their_reason() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = probe.getsockname()[1]
    result = await scrape_of(closed)
    assert isinstance(result, ScrapeFailure)
    assert result.reason == "Unreachable"
    async with serving(b"no", status=503) as port:
        result = await scrape_of(port)
    assert isinstance(result, ScrapeFailure)
    assert result.reason == "BadStatus"
    assert "503" in result.message


@pytest.mark.asyncio
async def test_a_redirect_is_not_followed() -> None:
    async with serving(b"", status=302) as port:
        result = await scrape_of(port)
    assert isinstance(result, ScrapeFailure)
    assert result.reason == "BadStatus"


@pytest.mark.asyncio
async def test_a_hundred_black_holes_do_not_delay_a_scrape_that_works() -> None:
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(128)
        async with serving(PAGE.encode()) as port, ScrapeSession() as session:
            blocked = [
                asyncio.create_task(scrape(session, target(hole.getsockname()[1])))
                for _ in range(100)
            ]
            await asyncio.sleep(0.1)
            started = time.monotonic()
            assert isinstance(await scrape(session, target(port)), HealthSample)
            assert time.monotonic() - started < 2.5, "behind a black hole it would take 3 s"
            for task in blocked:
                task.cancel()
            await asyncio.gather(*blocked, return_exceptions=True)


@pytest.mark.asyncio
async def test_targets_that_wait_for_their_turn_do_not_run_out_of_time() -> None:
    async with serving(PAGE.encode(), delay=0.7) as port, ScrapeSession() as session:
        session.places = asyncio.Semaphore(2)
        results = await asyncio.gather(*(scrape(session, target(port)) for _ in range(12)))
    assert all(isinstance(result, HealthSample) for result in results), results


@pytest.mark.parametrize("ip", ["", "bad host", "10.0.0.999", "[", "\x00", "a" * 300])
@pytest.mark.asyncio
async def test_an_address_that_is_none_gives_a_reason(ip: str) -> None:
    whose = ScrapeTarget(ip=ip, port=1, pod_uid="u1", host_network=False)
    async with ScrapeSession() as session:
        result = await scrape(session, whose)
    assert isinstance(result, ScrapeFailure)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\xff\xfe\x00\x01",
        b"HTTP/1.1 99999 \xff\r\n\r\n",
    ],
)
@pytest.mark.asyncio
async def test_an_answer_that_is_no_http_lets_no_exception_escape(answer: bytes) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with server:
        result = await scrape_of(server.sockets[0].getsockname()[1])
    assert isinstance(result, HealthSample | ScrapeFailure)


@pytest.mark.slow
def test_a_thousand_targets_cost_less_than_a_second_of_cpu(repository: Path) -> None:
    benchmark = repository / "benchmarks" / "scrape_thousand.py"
    done = subprocess.run(
        [sys.executable, str(benchmark), "--rounds", "5"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found = json.loads(done.stdout)
    assert found["targets"] == 1000
    # The least: what other processes of a busy machine add to CPU time is no cost of ours.
    assert found["scrape_cpu_seconds"]["kept_connections"]["least"] < 1
    assert found["scrape_cpu_seconds"]["new_connections"]["least"] < 1
    parse = found["parse_cpu_seconds"]
    assert parse["read_page"]["least"] * 3 < parse["prometheus_client"]["least"]


@pytest.mark.asyncio
@pytest.mark.parametrize("again_soon", [True, False])
async def test_a_connection_is_kept_only_for_a_page_that_is_read_again_soon(
    again_soon: bool,
) -> None:
    open_connections: set[asyncio.StreamWriter] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_connections.add(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(PAGE)}\r\n\r\n{PAGE}".encode())
        await reader.read()  # until the other side closes
        open_connections.remove(writer)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, ScrapeSession() as session:
        port = server.sockets[0].getsockname()[1]
        await scrape(session, target(port), again_soon=again_soon)
        await asyncio.sleep(0.1)
        async with asyncio.timeout(10):
            while len(open_connections) != int(again_soon):
                await asyncio.sleep(0.01)
