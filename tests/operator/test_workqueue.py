"""The work queue: no key twice, none lost, none in two hands."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ling_operator.workqueue import WorkQueue

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "add urgently", "get", "done"]), st.integers(0, 3)),
    max_size=60,
)


@given(OPERATIONS)
@settings(max_examples=200, deadline=None)
def test_a_key_is_never_in_two_hands_and_no_add_is_lost(operations: list[tuple[str, int]]) -> None:
    async def play() -> None:
        queue: WorkQueue[int] = WorkQueue()
        held: list[int] = []
        owed: set[int] = set()  # keys added since they were last taken
        urgent: set[int] = set()  # those of them that go first
        for operation, key in operations:
            if operation.startswith("add"):
                queue.add(key, urgent=operation == "add urgently")
                owed.add(key)
                if operation == "add urgently":
                    urgent.add(key)
            elif operation == "get" and len(queue):
                taken = await queue.get()
                assert taken not in held
                assert taken in urgent or not urgent - set(held)
                urgent.discard(taken)
                held.append(taken)
                owed.remove(taken)
            elif operation == "done" and key in held:
                held.remove(key)
                queue.done(key)
            assert len(queue) == len(owed - set(held))
            assert queue.in_progress == len(held)
        for key in held:
            queue.done(key)
        rest = {await queue.get() for _ in range(len(queue))}
        assert rest == owed

    asyncio.run(play())


@pytest.mark.asyncio
async def test_a_key_that_is_taken_is_not_queued_again_by_a_delay_from_before() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("a", 0.1)
    queue.add("a")
    queue.done(await queue.get())
    await asyncio.sleep(0.2)
    assert len(queue) == 0
    queue.add_after("a", 0.1)
    await asyncio.sleep(0.2)
    assert len(queue) == 1


@pytest.mark.asyncio
async def test_what_a_key_waited_counts_from_its_first_add_also_while_a_worker_has_it() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    await queue.get()
    assert queue.waited_seconds("a") < 5
    queue.add("a")
    await asyncio.sleep(0.2)
    queue.add("a")
    queue.done("a")
    await queue.get()
    assert 0.2 <= queue.waited_seconds("a") < 5


@pytest.mark.asyncio
async def test_a_key_added_while_a_worker_has_it_is_taken_once_more_after_done() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    key = await queue.get()
    queue.add("a")
    queue.add("a")
    assert len(queue) == 0
    queue.done(key)
    assert len(queue) == 1
    assert await queue.get() == "a"
    queue.done("a")
    assert len(queue) == 0


@pytest.mark.asyncio
async def test_failures_double_the_delay_up_to_the_cap_and_success_resets_it() -> None:
    queue: WorkQueue[str] = WorkQueue()
    delays = [queue.add_failed("a") for _ in range(1100)]
    assert delays[:9] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]
    assert set(delays[9:]) == {300.0}
    assert queue.add_failed("b") == 1.0, "one key's failures do not delay another"
    queue.forget_failures("a")
    assert queue.add_failed("a") == 1.0
    queue.close()


@pytest.mark.asyncio
async def test_of_several_delays_of_one_key_the_earliest_counts_and_the_key_comes_once() -> None:
    queue: WorkQueue[str] = WorkQueue()
    loop = asyncio.get_running_loop()
    started = loop.time()
    for seconds in (60.0, 0.05, 30.0):
        queue.add_after("a", seconds)
    assert await asyncio.wait_for(queue.get(), 5) == "a"
    assert 0.04 < loop.time() - started < 5
    queue.done("a")
    await asyncio.sleep(0.1)
    assert len(queue) == 0
    queue.close()


@pytest.mark.asyncio
async def test_sixteen_workers_over_fifty_hot_keys_never_overlap_on_one() -> None:
    queue: WorkQueue[int] = WorkQueue()
    busy: set[int] = set()
    passes = dict.fromkeys(range(50), 0)

    async def work() -> None:
        while True:
            key = await queue.get()
            assert key not in busy
            busy.add(key)
            await asyncio.sleep(0)
            busy.remove(key)
            passes[key] += 1
            queue.done(key)

    workers = [asyncio.create_task(work()) for _ in range(16)]
    rng = random.Random(0)
    for _ in range(2000):
        queue.add(rng.randrange(50))
        if rng.random() < 0.3:
            await asyncio.sleep(0)
    while len(queue) or queue.in_progress:
        assert not any(worker.done() for worker in workers)
        await asyncio.sleep(0)
    for worker in workers:
        worker.cancel()
    results = await asyncio.gather(*workers, return_exceptions=True)
    assert {type(r) for r in results} == {asyncio.CancelledError}
    assert min(passes.values()) > 0
