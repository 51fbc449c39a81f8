"""Leader election: one holder at a time, whatever is frozen, slow or killed."""

import asyncio
import copy
from typing import Any, cast

import pytest

from ling_operator.caches import Caches
from ling_operator.connection import Connection
from ling_operator.lease import LEASE_SECONDS, RENEW_SECONDS, LeaderLease, LostLeaseError
from ling_operator.rest import ApiError, RestClient
from ling_operator.telemetry import Telemetry
from ling_operator.workqueue import WorkQueue


class Leases:
    """The API server's part: one object, optimistic concurrency, and no answer when broken."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.broken = False
        self.forbidden = False
        self.writes: list[str] = []

    async def get(self, path: str) -> dict[str, Any]:
        self._answer()
        if self.lease is None:
            raise ApiError(status=404, reason="NotFound", message=path)
        return copy.deepcopy(self.lease)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._answer()
        if self.lease is not None:
            raise ApiError(status=409, reason="AlreadyExists", message=path)
        return self._store(body)

    async def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._answer()
        if body["metadata"]["resourceVersion"] != str(self.version):
            raise ApiError(status=409, reason="Conflict", message=path)
        return self._store(body)

    def _answer(self) -> None:
        if self.forbidden:
            said = "cannot get resource leases"
            raise ApiError(status=403, reason="Forbidden", message=said)
        if self.broken:
            raise ApiError(status=None, reason="", message="no answer")

    def _store(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        self.writes.append(body["spec"]["holderIdentity"])
        return self.lease


class Replicas:
    """Some replicas, one clock, and tries in the order that a test asks for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.api = Leases()

    def replica(self, identity: str) -> LeaderLease:
        client = cast("RestClient", self.api)
        return LeaderLease(
            client, namespace="n", name="l", identity=identity, clock=lambda: self.now
        )

    async def tries(self, replica: LeaderLease) -> bool:
        """Let a replica try once, as its loop does; return whether it leads."""
        loop = asyncio.create_task(replica.run())
        for _ in range(50):  # turns of the event loop, of which a try takes a few
            await asyncio.sleep(0)
        loop.cancel()
        (result,) = await asyncio.gather(loop, return_exceptions=True)
        if isinstance(result, LostLeaseError):
            raise result
        return replica.leading


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


@pytest.mark.asyncio
async def test_the_first_takes_it_and_the_second_waits(replicas: Replicas) -> None:
    first, second = replicas.replica("a"), replicas.replica("b")
    assert await replicas.tries(first)
    assert not await replicas.tries(second)
    for _ in range(10):
        replicas.now += 2
        assert await replicas.tries(first)
        assert not await replicas.tries(second)
    assert not second.acquired.is_set()


@pytest.mark.asyncio
async def test_a_standby_takes_over_after_the_whole_duration_by_its_own_clock(
    replicas: Replicas,
) -> None:
    first, second = replicas.replica("a"), replicas.replica("b")
    await replicas.tries(first)
    await replicas.tries(second)
    replicas.now += LEASE_SECONDS
    assert not await replicas.tries(second)
    replicas.now += 0.1
    assert await replicas.tries(second)
    lease = replicas.api.lease
    assert lease is not None
    assert lease["spec"]["leaseTransitions"] == 1


@pytest.mark.asyncio
async def test_the_holder_stops_writing_before_anybody_else_may_start(replicas: Replicas) -> None:
    first, second = replicas.replica("a"), replicas.replica("b")
    await replicas.tries(first)
    await replicas.tries(second)
    while not await replicas.tries(second):
        both = first.leading and second.leading
        assert not both
        replicas.now += 0.5
    assert not first.leading
    assert RENEW_SECONDS < LEASE_SECONDS


@pytest.mark.asyncio
async def test_a_frozen_holder_finds_that_it_leads_no_more_and_ends(replicas: Replicas) -> None:
    first, second = replicas.replica("a"), replicas.replica("b")
    await replicas.tries(first)
    await replicas.tries(second)
    replicas.now += 20
    assert not first.leading, "before it has asked anybody"
    assert await replicas.tries(second)
    with pytest.raises(LostLeaseError, match="not renewed for 7 s"):
        await replicas.tries(first)
    assert replicas.api.writes == ["a", "b"]


@pytest.mark.asyncio
async def test_a_lease_that_another_has_got_in_between_ends_the_right_to_write_at_once(
    replicas: Replicas,
) -> None:
    first, second = replicas.replica("a"), replicas.replica("b")
    await replicas.tries(first)
    replicas.api.lease = None  # somebody deleted it
    assert await replicas.tries(second)
    with pytest.raises(LostLeaseError, match="another's now"):
        await replicas.tries(first)
    assert not first.leading


@pytest.mark.asyncio
async def test_of_two_that_try_at_once_one_gets_it(replicas: Replicas) -> None:
    """Both read the expired Lease before either writes."""
    await replicas.tries(replicas.replica("a"))
    others = [replicas.replica("b"), replicas.replica("c")]
    for other in others:
        await replicas.tries(other)
    replicas.now += LEASE_SECONDS + 1
    read = replicas.api.get

    async def slow(path: str) -> dict[str, Any]:
        lease = await read(path)
        await asyncio.sleep(0)
        return lease

    replicas.api.get = slow
    led = await asyncio.gather(*(replicas.tries(other) for other in others))
    assert sorted(led) == [False, True]


@pytest.mark.asyncio
async def test_a_short_outage_of_the_api_server_costs_nothing_and_a_long_one_the_lease(
    replicas: Replicas,
) -> None:
    first = replicas.replica("a")
    await replicas.tries(first)
    replicas.api.broken = True
    replicas.now += RENEW_SECONDS - 1
    assert await replicas.tries(first)
    replicas.now += 1
    with pytest.raises(LostLeaseError):
        await replicas.tries(first)


@pytest.mark.asyncio
async def test_a_replica_that_may_not_have_the_lease_stands_by_and_is_not_ready(
    replicas: Replicas,
) -> None:
    standby = replicas.replica("a")
    replicas.api.forbidden = True
    assert not await replicas.tries(standby)
    said = "403 Forbidden: cannot get resource leases"
    assert standby.refusal == said
    nowhere = Connection(server="http://127.0.0.1:9", tls=None, authorization=lambda: None)
    async with RestClient(nowhere) as client:
        queue: WorkQueue[tuple[str, str]] = WorkQueue()
        caches = Caches(client, namespaces=[], wake=queue.add)
        telemetry = Telemetry(queue, caches, lease_refusal=lambda: standby.refusal)
        for reflector in caches.reflectors:
            reflector.synced.set()
        assert telemetry.not_ready() == f"refused: the Lease ({said})"
        replicas.api.forbidden = False
        assert await replicas.tries(standby)
        assert telemetry.not_ready() is None


@pytest.mark.asyncio
async def test_a_released_lease_is_taken_at_once(replicas: Replicas) -> None:
    first, second = replicas.replica("a"), replicas.replica("b")
    await replicas.tries(first)
    await replicas.tries(second)
    await first.release()
    assert not first.leading
    assert await replicas.tries(second)
    await first.release()
    assert second.leading, "a second release does not take it from the new holder"


@pytest.mark.asyncio
async def test_a_client_that_may_not_write_sends_no_change() -> None:
    server = "http://127.0.0.1:9"
    connection = Connection(server=server, tls=None, authorization=lambda: None)
    async with RestClient(connection, may_write=lambda: False) as client:
        for send in (
            client.post("/x", {}),
            client.put("/x", {}),
            client.merge_patch("/x", {}),
            client.delete("/x", uid="u", propagation="Foreground"),
        ):
            with pytest.raises(ApiError, match="does not lead"):
                await send
