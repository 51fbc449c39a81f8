"""Rows, filters and durations of `ling list`."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ling_operator.api import Phase
from ling_operator.listing import Filter, columns, duration, news_of, parse_phases, row_of

NOW = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)


def run(name: str = "ling2", *, spec: Any = None, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "namespace": "team",
            "name": name,
            "creationTimestamp": "2026-11-30T06:00:00Z",
        },
        "spec": spec or {"cpu": {"processes": 2}},
        "status": status,
    }


def cells(each: dict[str, Any], *, wide: bool = False, namespaces: bool = False) -> dict[str, str]:
    chosen = columns(wide=wide, namespaces=namespaces)
    titles = [column.title for column in chosen]
    return dict(zip(titles, row_of(each, chosen, NOW), strict=True))


def test_a_run_that_has_no_status_yet_has_a_row() -> None:
    each = run()
    del each["status"]
    assert cells(each) == {
        "NAME": "ling2",
        "PHASE": "Pending",
        "STEP": "-",
        "TARGET": "-",
        "LOSS": "-",
        "HEALTH": "Unknown",
        "AGE": "3h",
    }


def test_a_wide_row_tells_pace_checkpoint_and_what_is_wrong() -> None:
    halted = {"type": "Halted", "status": "True", "reason": "NonFiniteLoss", "message": "a\nb"}
    each = run(
        spec={"tpu": {"accelerator": "tpu-v5p-slice", "topology": "4x4x4", "slices": 2}},
        phase="Halted",
        attempt=3,
        restarts=0,
        lastFiniteCheckpoint=1800,
        mttr={"meanSeconds": 95},
        training={
            "step": 1830,
            "tokensPerSecond": 5000,
            "estimatedCompletionTime": "2026-12-02T10:00:00Z",
        },
        conditions=[halted],
    )
    row = cells(each, wide=True, namespaces=True)
    assert next(iter(row)) == "NAMESPACE"
    assert row["MACHINES"] == "tpu-v5p-slice 4x4x4 x2"
    wanted = {"ATTEMPT": "3", "RESTARTS": "0", "TOKENS/S": "5000", "ETA": "2d1h"}
    wanted |= {"CHECKPOINT": "1800", "MTTR": "95s", "MESSAGE": "a b"}
    assert {title: row[title] for title in wanted} == wanted


def test_time_alone_is_no_news() -> None:
    chosen = columns(wide=True, namespaces=False)
    each = run(training={"estimatedCompletionTime": "2026-12-02T10:00:00Z"})
    assert news_of(each, chosen, NOW) == news_of(each, chosen, NOW + timedelta(hours=1))
    assert news_of(each, chosen, NOW) != news_of(run(phase="Running"), chosen, NOW)


@pytest.mark.parametrize(
    ("text", "phases"),
    [
        ("running", {Phase.RUNNING}),
        ("Halted,FAILED", {Phase.HALTED, Phase.FAILED}),
        ("finished", {Phase.HALTED, Phase.COMPLETE, Phase.FAILED, Phase.CANCELLED}),
        ("SUCCESSFUL", {Phase.COMPLETE}),
        ("everything", None),
        ("running,everything", None),
    ],
)
def test_a_status_filter_takes_phases_and_xpks_words(text: str, phases: set[Phase] | None) -> None:
    assert parse_phases(text) == phases


def test_an_unknown_status_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'RUNING' is no status; choose from .*Running"):
        parse_phases("runing")


def test_a_filter_wants_phase_and_name() -> None:
    wanted = Filter(frozenset({Phase.RUNNING}), re.compile(r"^ling2-\d+"))
    assert wanted.takes(run("ling2-7", phase="Running"))
    assert not wanted.takes(run("ling2-7", phase="Halted"))
    assert not wanted.takes(run("my-ling2-7", phase="Running"))
    assert Filter().takes(run("x"))
    assert Filter().takes(run("x", phase="ThatANewerOperatorKnows"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (150, "2m30s"),
        (601, "10m"),
        (7199, "119m"),
        (7200, "2h"),
        (9000, "2h30m"),
        (36000, "10h"),
        (176400, "2d1h"),
        (864000, "10d"),
    ],
)
def test_durations_read_as_kubectls(seconds: float, text: str) -> None:
    assert duration(timedelta(seconds=seconds)) == text
