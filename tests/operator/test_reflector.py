"""The reflector against a server that pages, expires, falls silent and goes away.

What a real API server does is tested with one under tests/cluster.
"""

import asyncio

import pytest

from ling_operator import reflector as reflector_module
from ling_operator import rest
from ling_operator.connection import Connection
from ling_operator.reflector import FIRST_BACKOFF_SECONDS, Reflector
from ling_operator.rest import ApiError, RestClient
from thing_server import PATH, Thing, ThingServer, reflecting
from waiting import until


def names(reflector: Reflector[Thing]) -> set[str]:
    return {name for _, name in reflector.objects}


@pytest.mark.asyncio
async def test_a_list_is_read_in_pages_and_the_watch_goes_on_from_it() -> None:
    server = ThingServer()
    server.page = 3
    for i in range(8):
        server.set(f"t{i}")
    async with reflecting(server) as (reflector, changes):
        await until(lambda: bool(server.watches))
        assert names(reflector) == {f"t{i}" for i in range(8)}
        assert [q.get("continue") for q in server.list_queries] == [None, "3", "6"]
        assert {q["limit"] for q in server.list_queries} == {"500"}
        assert server.watches[0]["resourceVersion"] == "108"
        assert server.watches[0]["allowWatchBookmarks"] == "true"
        assert 240 <= int(server.watches[0]["timeoutSeconds"]) <= 300
        assert {q["labelSelector"] for q in server.list_queries + server.watches} == {"app=x"}
        server.set("t9", spec=1)
        server.delete("t0")
        await until(lambda: names(reflector) == {f"t{i}" for i in (1, 2, 3, 4, 5, 6, 7, 9)})
        assert reflector.relists == 1
        assert changes[-1].deleted
        assert changes[-1].key == ("ns", "t0")


@pytest.mark.asyncio
async def test_only_the_view_of_an_object_is_kept() -> None:
    server = ThingServer()
    server.set("listed", status="long", spec="short")
    async with reflecting(server) as (reflector, _):
        await until(lambda: bool(server.watches))
        server.set("watched", status="long", spec="short")
        await until(lambda: len(reflector.objects) == 2)
        for item in reflector.objects.values():
            assert set(item) == {"metadata", "spec"}


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["gone", "expired"])
async def test_an_expired_watch_lists_again_and_reports_what_was_deleted_meanwhile(
    how: str,
) -> None:
    server = ThingServer()
    server.set("stays")
    server.set("goes")
    async with reflecting(server) as (reflector, changes):
        await until(lambda: bool(server.watches))
        server.watch_answer = how
        server.bookmark()  # wakes the open watch, which then ends
        await until(lambda: len(server.watches) > 1)
        server.objects.pop("goes")  # no watch was there to see it
        server.history.clear()
        server.watch_answer = "normal"
        await until(lambda: names(reflector) == {"stays"})
        assert reflector.relists >= 2
        gone = [c.key for c in changes if c.deleted]
        assert gone == [("ns", "goes")]


@pytest.mark.asyncio
async def test_a_list_whose_continuation_expires_starts_again() -> None:
    server = ThingServer()
    server.page = 2
    server.expire_continue_once = True
    for i in range(5):
        server.set(f"t{i}")
    async with reflecting(server) as (reflector, _):
        await until(reflector.synced.is_set)
        assert names(reflector) == {f"t{i}" for i in range(5)}


@pytest.mark.asyncio
async def test_a_silent_connection_is_given_up_and_listed_anew() -> None:
    server = ThingServer()
    server.set("a")
    server.watch_answer = "silent"
    async with reflecting(server, idle=0.3) as (reflector, _):
        await until(lambda: bool(server.watches))
        server.objects["b"] = {"metadata": {"name": "b", "namespace": "ns"}}
        server.watch_answer = "normal"
        await until(lambda: names(reflector) == {"a", "b"}, seconds=5)
        assert reflector.relists == 2


@pytest.mark.asyncio
async def test_bookmarks_move_the_version_and_keep_the_cache_young() -> None:
    server = ThingServer()
    async with reflecting(server, watch_seconds=(1, 1)) as (reflector, changes):
        await until(lambda: bool(server.watches))
        await asyncio.sleep(0.3)
        assert reflector.last_event_age > 0.25
        server.bookmark()
        await until(lambda: reflector.last_event_age < 0.2)
        server.watch_answer = "closed"  # end the stream cleanly
        server.bookmark()
        await until(lambda: len(server.watches) > 1)
        assert int(server.watches[1]["resourceVersion"]) > 100
        assert reflector.relists == 1, "a clean end is no reason to list"
        assert changes == []


@pytest.mark.asyncio
async def test_a_server_that_restarts_is_found_again_with_no_change_lost() -> None:
    server = ThingServer()
    server.set("before")
    async with reflecting(server) as (reflector, _):
        await until(lambda: bool(server.watches))
        await server.stop()
        server.set("during")
        await asyncio.sleep(0.5)
        await server.start()
        await until(lambda: names(reflector) == {"before", "during"})


@pytest.mark.asyncio
async def test_a_server_with_too_much_to_do_is_not_asked_for_a_whole_list_besides() -> None:
    server = ThingServer()
    server.set("a")
    server.watch_answer = "busy"
    async with reflecting(server) as (reflector, changes):
        await until(lambda: len(server.watches) >= 3)
        server.set("b")
        server.watch_answer = "normal"
        await until(lambda: names(reflector) == {"a", "b"})
        assert server.lists == 1
        assert [change.key[1] for change in changes] == ["a", "b"]


@pytest.mark.asyncio
async def test_a_refused_list_is_retried_more_and_more_slowly_until_it_is_allowed() -> None:
    server = ThingServer()
    server.list_status = 403
    async with reflecting(server) as (reflector, _):
        await asyncio.sleep(2.0)
        assert 3 <= len(server.list_queries) <= 7
        assert not reflector.synced.is_set()
        assert reflector.last_event_age > 1.5
        assert reflector.last_activity_age < 1.7, "retrying is being alive"
        assert reflector.last_answer_age < 1.7, "and a refusal is an answer"
        server.list_status = 200
        await until(reflector.synced.is_set)


@pytest.mark.asyncio
async def test_a_refusal_that_lasts_is_reported_until_a_watch_opens_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reflector_module, "_REFUSAL_SECONDS", 0.5)
    server = ThingServer()
    async with reflecting(server) as (reflector, _):
        await until(lambda: bool(server.watches))
        assert reflector.refusal is reflector.problem is None
        server.watch_answer, server.list_status = "gone", 403
        server.bookmark()
        await until(lambda: reflector.problem is not None)
        await until(lambda: reflector.refusal is not None)
        assert "no list for you" in str(reflector.refusal)
        server.watch_answer, server.list_status = "normal", 200
        await until(lambda: reflector.refusal is None)
        assert reflector.problem is None


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", ["expired", "gone"])
async def test_lost_history_is_no_refusal(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector_module, "_REFUSAL_SECONDS", 0.0)
    server = ThingServer()
    server.watch_answer = fault
    async with reflecting(server) as (reflector, _):
        await until(lambda: len(server.watches) >= 3)
        assert reflector.refusal is None


def test_at_the_default_settings_a_dead_watch_is_replaced_within_90_seconds() -> None:
    assert rest.READ_IDLE_SECONDS > 61, "the API server sends a bookmark after 60 s of silence"
    again = FIRST_BACKOFF_SECONDS + rest.CONNECT_SECONDS
    assert rest.READ_IDLE_SECONDS + again < 90
    # A request on a connection that died with the watch's ends before the watch is given up, so
    # that the list cannot be sent on it: idle ones are closed after 15 s.
    assert rest.REQUEST_SECONDS < rest.READ_IDLE_SECONDS


@pytest.mark.asyncio
async def test_a_kind_that_is_not_installed_is_an_empty_cache_until_it_is() -> None:
    server = ThingServer()
    server.set("a")
    server.list_status = 404
    async with reflecting(server) as (reflector, changes):
        await until(reflector.synced.is_set)
        assert dict(reflector.objects) == {}
        server.list_status = 200
        await until(lambda: names(reflector) == {"a"})
        server.list_status = 404
        server.watch_answer = "expired"
        server.bookmark()
        await until(lambda: len(server.list_queries) > 4)
        assert names(reflector) == {"a"}, "a 404 is no deletion of what was there"
        assert not any(change.deleted for change in changes)


@pytest.mark.asyncio
async def test_an_object_larger_than_the_readers_buffer_arrives() -> None:
    server = ThingServer()
    async with reflecting(server) as (reflector, _):
        await until(lambda: bool(server.watches))
        server.set("big", spec="x" * 1_500_000)
        await until(lambda: ("ns", "big") in reflector.objects)
        assert len(reflector.objects["ns", "big"]["spec"]) == 1_500_000


@pytest.mark.asyncio
async def test_an_error_carries_the_servers_reason_and_message() -> None:
    server = ThingServer()
    server.list_status = 403
    await server.start()
    connection = Connection(
        server=f"http://127.0.0.1:{server.port}", tls=None, authorization=lambda: None
    )
    async with RestClient(connection) as client:
        with pytest.raises(ApiError, match="403 Forbidden: no list for you") as caught:
            await client.get(PATH, limit="1")
        assert caught.value.status == 403
        with pytest.raises(ValueError, match="not JSON compliant"):
            await client.post(PATH, {"loss": float("nan")})
    await server.stop()
    async with RestClient(connection) as client:
        with pytest.raises(ApiError) as refused:
            await client.get(PATH)
        assert refused.value.status is None
