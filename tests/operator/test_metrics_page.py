"""What is read from a metrics page, whoever wrote it and whatever it holds."""

import math
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ling_operator.scrape import (
    ScrapeFailure,
    ScrapeTarget,
    read_page,
)
from ling_operator.verdict import HealthSample
from trainer_page import PAGE, RUN, target

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def read(page: str, *, host_network: bool = False) -> HealthSample | ScrapeFailure:
    return read_page(page, target(host_network=host_network), now=NOW)


def sample_of(page: str) -> HealthSample:
    result = read(page)
    assert isinstance(result, HealthSample), result
    return result


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


NUMBERS = st.floats() | st.integers(-3, 10**17).map(float)


@given(st.text(max_size=8), st.text(min_size=1, max_size=8), NUMBERS, NUMBERS, NUMBERS)
@settings(max_examples=500, deadline=None)
def test_a_page_is_read_as_prometheus_own_parser_reads_it(
    run: str, uid: str, step: float, loss: float, count: float
) -> None:
    registry = CollectorRegistry()
    Gauge("ling_run_info", "Whose.", ["run", "pod_uid"], registry=registry).labels(run, uid).set(1)
    Gauge("ling_step", "Last.", ["run"], registry=registry).labels(run).set(step)
    Gauge("ling_learning_loss", "Loss.", ["run"], registry=registry).labels(run).set(loss)
    names = ["run", "kind", "signal"]
    events = Counter("ling_nonfinite_steps", "Bad.", names, registry=registry)
    for kind in (run, "nan"):
        events.labels(run, kind, uid).inc(abs(count) if count == count else 0)
    page = generate_latest(registry).decode()
    whose = ScrapeTarget(ip="::1", port=1, pod_uid=uid, host_network=True)
    ours = read_page(page, whose, now=NOW)

    prometheus_reading: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(page):
        for each in family.samples:
            prometheus_reading.setdefault(each.name, []).append((each.labels, each.value))
    assert isinstance(ours, HealthSample), ours
    ((labels, _),) = prometheus_reading["ling_run_info"]
    assert ours.page_pod_uid == labels["pod_uid"] == uid
    ((_, value),) = prometheus_reading["ling_learning_loss"]
    assert ours.loss == value or (math.isnan(value) and math.isnan(ours.loss or 0.0))
    ((_, value),) = prometheus_reading["ling_step"]
    assert ours.step == (int(value) if 0 <= value <= 2**53 else None)
    theirs: dict[tuple[str, str], float] = {}
    for labels, value in prometheus_reading["ling_nonfinite_steps_total"]:
        key = labels["kind"], labels["signal"]
        theirs[key] = theirs.get(key, 0) + (int(value) if value <= 2**53 else 0)
    assert dict(ours.nonfinite_steps) == theirs


@pytest.mark.parametrize(
    "line",
    [
        "ling_step",
        "ling_step 3 4 5",
        "ling_step 1_0",
        "ling_step three",
        'ling_step{run="a"',
        'ling_step{run="a"}3',
        'ling_run_info{pod_uid="u1" 1',
        "ling_run_info{pod_uid=u1} 1",
        'ling_nonfinite_steps_total{kind="nan",,signal="x"} 1',
    ],
)
def test_a_line_that_is_no_sample_spoils_the_page(line: str) -> None:
    result = read(f"ling_target_steps 5\n{line}\n")
    assert isinstance(result, ScrapeFailure)
    assert result.reason == "NotMetrics"


@pytest.mark.parametrize(
    "line",
    [
        "ling_step 3",
        "ling_step\t3 1700000000",
        "ling_step{} 3.0 ",
        'ling_step{a="}",} 3',
        "  ling_step 3",
        'ling_step {a="x", b="y"} 3',
        'ling_step{a="x"} 3 1700000000.123 # {trace="1"} 0.5',
    ],
)
def test_the_formats_freedoms_are_understood(line: str) -> None:
    assert sample_of(line + "\n").step == 3


def test_labels_may_have_blanks_around_them() -> None:
    page = 'ling_nonfinite_steps_total { kind = "nan", signal = "NonFiniteLoss" , } 2\n'
    assert sample_of(page).nonfinite_steps == ((("nan", "NonFiniteLoss"), 2),)
