"""The client against servers, names and tokens that are slow, gone or changed meanwhile."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from ling_operator.connection import Connection, NoClusterError
from ling_operator.rest import ApiError, RestClient

type Answer = Callable[[web.Request], Any]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncGenerator[int]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def connection(port: int, host: str = "127.0.0.1", token: Any = lambda: None) -> Connection:
    return Connection(server=f"http://{host}:{port}", tls=None, authorization=token)


@pytest.mark.asyncio
async def test_a_change_whose_connection_took_longer_than_the_right_to_lead_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leads, seen = True, list[str]()
    loop = asyncio.get_running_loop()
    resolve = loop.getaddrinfo

    async def slow(host: Any, port: Any, **hints: Any) -> Any:
        nonlocal leads
        leads = False  # the name server took its time
        return await resolve("127.0.0.1", port, **{**hints, "family": socket.AF_INET})

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.method)
        return web.json_response({})

    monkeypatch.setattr(loop, "getaddrinfo", slow)
    async with serving(answer) as port:
        api = connection(port, host="api.example.com")
        async with RestClient(api, may_write=lambda: leads) as client:
            with pytest.raises(ApiError, match="does not lead"):
                await client.merge_patch("/x", {})
            assert await client.get("/x") == {}
    assert seen == ["GET"]


@pytest.mark.asyncio
async def test_a_change_is_not_sent_a_second_time_by_a_replica_that_leads_no_more() -> None:
    """A PUT on a connection that breaks is repeated by aiohttp itself."""
    leads, seen = True, list[str]()

    async def answer(request: web.Request) -> web.Response:
        nonlocal leads
        seen.append(request.method)
        if request.method == "PUT":
            leads = False
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({})

    async with (
        serving(answer) as port,
        RestClient(connection(port), may_write=lambda: leads) as client,
    ):
        await client.get("/x")
        with pytest.raises(ApiError, match="does not lead"):
            await client.put("/x", {})
    assert seen == ["GET", "PUT"]


@pytest.mark.asyncio
async def test_a_token_that_is_refused_is_read_again_for_the_next_request() -> None:
    tokens = iter(["old", "new", "never"])

    async def answer(request: web.Request) -> web.Response:
        good = request.headers["Authorization"] == "new"
        return web.json_response({}, status=200 if good else 401)

    async with (
        serving(answer) as port,
        RestClient(connection(port, token=lambda: next(tokens))) as client,
    ):
        with pytest.raises(ApiError, match="401"):
            await client.get("/x")
        assert await client.get("/x") == {}
        assert await client.get("/x") == {}


@pytest.mark.asyncio
async def test_requests_that_begin_together_ask_for_one_token() -> None:
    asked = list[int]()

    def token() -> str:
        asked.append(1)
        return "t"

    async def answer(_request: web.Request) -> web.Response:
        return web.json_response({})

    async with serving(answer) as port, RestClient(connection(port, token=token)) as client:
        await asyncio.gather(*(client.get("/x") for _ in range(8)))
    assert len(asked) == 1


@pytest.mark.asyncio
async def test_credentials_that_cannot_be_had_are_no_answer_and_no_crash() -> None:
    def token() -> str:
        raise NoClusterError("no credentials: the file is gone")

    async with RestClient(connection(9, token=token)) as client:
        with pytest.raises(ApiError, match="the file is gone") as refused:
            await client.get("/x")
    assert refused.value.status is None


@pytest.mark.asyncio
async def test_many_open_streams_leave_a_connection_for_a_request() -> None:
    """As with a hundred hosts' logs, or the watches of many namespaces."""
    opened, end = list[int](), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path != "/log":
            return web.json_response({})
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x")
        opened.append(1)
        await end.wait()
        return response

    async def read(client: RestClient) -> None:
        async for _ in client.stream("/log"):
            pass

    async with serving(answer) as port, RestClient(connection(port)) as client:
        reading = [asyncio.create_task(read(client)) for _ in range(100)]
        async with asyncio.timeout(30):
            while len(opened) < 100:
                await asyncio.sleep(0.05)
            assert await client.get("/x") == {}
        end.set()
        await asyncio.gather(*reading)
