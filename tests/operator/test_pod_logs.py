"""Reading the end of a log: quickly, or not at all."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from ling_operator import pod_logs
from ling_operator.connection import Connection
from ling_operator.plan import LogSource, LogTail
from ling_operator.pod_logs import LogReader, tail_of_file
from ling_operator.rest import RestClient

SOURCE = LogSource("pod", "uid", "jax-tpu")

type Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def reader(answer: Answer) -> AsyncGenerator[LogReader]:
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/team/pods/pod/log", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = f"http://127.0.0.1:{runner.addresses[0][1]}"
    connection = Connection(server=server, tls=None, authorization=lambda: None)
    try:
        async with RestClient(connection) as client:
            yield LogReader(client)
    finally:
        await runner.cleanup()


def tail(answer: Answer) -> LogTail:
    async def read() -> LogTail:
        async with reader(answer) as logs:
            return await logs.tail("team", SOURCE)

    return asyncio.run(read())


def test_the_last_lines_are_asked_for_and_made_printable() -> None:
    asked: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(dict(request.query))
        return web.Response(body=b"\x1b[1mstep 1\x1b[0m\n\n\xff step 2\n")

    assert tail(answer) == LogTail("uid", ("step 1", "\ufffd step 2"))
    assert asked == [{"container": "jax-tpu", "tailLines": "20", "limitBytes": "327680"}]


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        (403, "User op cannot get pods/log; grant get on pods/log"),
        (404, "User op cannot get pods/log"),
        (500, "User op cannot get pods/log"),
    ],
)
def test_a_refusal_is_the_reason_why_there_is_no_log(status: int, problem: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        body = {"kind": "Status", "message": "User op cannot get pods/log"}
        return web.json_response(body, status=status)

    assert tail(answer) == LogTail("uid", problem=problem)


def test_an_empty_log_and_a_cut_connection_are_said() -> None:
    async def empty(_: web.Request) -> web.Response:
        return web.Response(text="\n \n")

    async def cut(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    assert tail(empty) == LogTail("uid", problem="it printed nothing")
    assert "disconnected" in (tail(cut).problem or "").lower()


def test_after_a_silence_others_are_given_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_logs, "TAIL_SECONDS", 0.2)
    monkeypatch.setattr(pod_logs, "_HURRIED_SECONDS", 0.05)
    monkeypatch.setattr(pod_logs, "_HURRY_SECONDS", 30.0)

    async def silence(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    async def read() -> list[LogTail]:
        async with reader(silence) as logs:
            first = [await logs.tail("team", SOURCE) for _ in range(2)]
            monkeypatch.setattr(logs, "_hurry_until", 0.0)
            return [*first, await logs.tail("team", SOURCE)]

    problems = [each.problem for each in asyncio.run(read())]
    assert problems == [f"no answer within {s} s" for s in ("0.2", "0.05", "0.2")]


def test_a_file_s_end_is_read_and_a_missing_one_is_said(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"first\n" + b"x" * 100_000 + b"\nlast\n")
    kept = tail_of_file(SOURCE, path).lines
    assert kept[-1] == "last"
    assert "first" not in kept
    assert "No such file" in (tail_of_file(SOURCE, tmp_path / "none").problem or "")
    assert tail_of_file(SOURCE, None).problem == "pod has no log here"
