"""Scrapes of a real HTTP server that answers well, badly, slowly, too much or not at all."""

import asyncio
import math
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from ling_operator.scrape import (
    MAX_PAGE_BYTES,
    ScrapeFailure,
    ScrapeTarget,
    read_page,
    scrape,
    scrape_session,
)
from ling_operator.verdict import HealthSample

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RUN = 'run="r",run_namespace="ns"'
PAGE = f"""\
# HELP ling_step Last finished step; the first is 1.
# TYPE ling_step gauge
ling_step{{{RUN}}} 12.0
ling_target_steps{{{RUN}}} 200.0
ling_learning_loss{{{RUN}}} 3.25
ling_learning_lm_loss{{{RUN}}} 3.0
ling_learning_is_nan{{{RUN}}} 0.0
ling_learning_raw_grad_norm{{{RUN}}} 1.5
ling_learning_num_zeros{{{RUN}}} 7.0
ling_perf_tokens_per_second{{{RUN}}} 2048.5
ling_last_finite_step{{{RUN}}} 12.0
ling_last_nonfinite_step{{{RUN}}} 3.0
ling_last_finite_checkpoint_step{{{RUN}}} 10.0
ling_last_step_timestamp_seconds{{{RUN}}} 1.7672256e+09
ling_nonfinite_steps_consecutive_max{{{RUN}}} 1.0
# TYPE ling_nonfinite_steps_total counter
ling_nonfinite_steps_total{{{RUN},kind="nan",signal="NonFiniteLoss"}} 1.0
ling_nonfinite_steps_total{{{RUN},kind="inf",signal="NonFiniteGradient"}} 0.0
# TYPE ling_run_info gauge
ling_run_info{{{RUN},pod_uid="u1",process="0"}} 1.0
python_gc_objects_collected_total{{generation="0"}} 325.0
"""


def target(port: int = 1, *, host_network: bool = False) -> ScrapeTarget:
    return ScrapeTarget(ip="127.0.0.1", port=port, pod_uid="u1", host_network=host_network)


def read(page: str, *, host_network: bool = False) -> HealthSample | ScrapeFailure:
    return read_page(page, target(host_network=host_network), now=NOW)


def sample_of(page: str) -> HealthSample:
    result = read(page)
    assert isinstance(result, HealthSample), result
    return result


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
    async with scrape_session() as session:
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
        async with serving(PAGE.encode()) as port, scrape_session() as session:
            blocked = [
                asyncio.create_task(scrape(session, target(hole.getsockname()[1])))
                for _ in range(100)
            ]
            await asyncio.sleep(0.1)
            started = time.monotonic()
            assert isinstance(await scrape(session, target(port)), HealthSample)
            assert time.monotonic() - started < 1.5
            for task in blocked:
                task.cancel()
            await asyncio.gather(*blocked, return_exceptions=True)


def test_the_page_of_another_pod_is_discarded() -> None:
    result = read(PAGE.replace('pod_uid="u1"', 'pod_uid="u2"'))
    assert isinstance(result, ScrapeFailure)
    assert result.reason == "OtherPod"
    assert "u2" in result.message


def test_a_page_that_does_not_say_whose_it_is_is_discarded_on_a_shared_address_only() -> None:
    anonymous = "\n".join(line for line in PAGE.splitlines() if "run_info" not in line)
    assert isinstance(read(anonymous), HealthSample)
    result = read(anonymous, host_network=True)
    assert isinstance(result, ScrapeFailure)
    assert result.reason == "UnknownPod"


@pytest.mark.parametrize("literal", ["NaN", "nan", "+Inf", "-Inf", "Inf"])
def test_a_loss_that_is_no_number_is_read_as_what_it_is(literal: str) -> None:
    sample = sample_of(f"ling_learning_loss{{{RUN}}} {literal}\nling_learning_is_nan{{{RUN}}} 1\n")
    assert sample.loss is not None
    assert not math.isfinite(sample.loss)
    assert sample.is_nan


@pytest.mark.parametrize("literal", ["NaN", "+Inf", "-1", "1e300"])
def test_a_step_that_is_no_count_is_no_step(literal: str) -> None:
    assert sample_of(f"ling_step{{{RUN}}} {literal}\n").step is None


def test_a_page_without_our_series_gives_a_sample_that_knows_nothing() -> None:
    sample = sample_of("<html>hello</html>\npython_info 1\n")
    assert sample.step is None
    assert sample.loss is None
    assert sample.nonfinite_steps == ()


def test_a_broken_line_of_ours_gives_no_sample_rather_than_half_of_one() -> None:
    result = read(PAGE + 'ling_step{run="r 3\n')
    assert isinstance(result, ScrapeFailure)
    assert result.reason == "NotMetrics"


LINES = st.lists(
    st.one_of(
        st.text(max_size=60).map(lambda text: "ling_" + text),
        st.sampled_from(PAGE.splitlines()),
        st.tuples(st.sampled_from(PAGE.splitlines()), st.integers(0, 80), st.text(max_size=3)).map(
            lambda cut: cut[0][: cut[1]] + cut[2] + cut[0][cut[1] :]
        ),
    ),
    max_size=12,
)


@given(LINES)
@settings(max_examples=1500, deadline=None)
def test_no_page_makes_an_exception_escape(lines: list[str]) -> None:
    result = read("\n".join(lines))
    assert isinstance(result, HealthSample | ScrapeFailure)
