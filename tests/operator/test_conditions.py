"""Conditions: when a transition time moves, and when it does not."""

from datetime import UTC, datetime, timedelta

from ling_operator.api import ConditionType
from ling_operator.conditions import find, has_reason, holds, set_condition

NOW = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)
LATER = NOW + timedelta(minutes=1)
HEALTHY, HALTED = ConditionType.HEALTHY, ConditionType.HALTED


def test_the_transition_time_moves_with_the_status_and_not_with_reason_or_message() -> None:
    first = set_condition((), HEALTHY, "True", reason="A", generation=1, now=NOW)
    said = set_condition(first, HEALTHY, "True", reason="B", message="m", generation=2, now=LATER)
    (condition,) = said
    assert (condition.reason, condition.message, condition.observed_generation) == ("B", "m", 2)
    assert condition.last_transition_time == NOW
    turned = set_condition(said, HEALTHY, "False", reason="C", generation=2, now=LATER)
    assert turned[0].last_transition_time == LATER


def test_setting_the_same_again_changes_nothing() -> None:
    once = set_condition((), HEALTHY, "True", reason="A", generation=1, now=NOW)
    assert set_condition(once, HEALTHY, "True", reason="A", generation=1, now=LATER) == once


def test_a_condition_keeps_its_place_and_the_others() -> None:
    both = set_condition((), HEALTHY, "True", reason="A", generation=1, now=NOW)
    both = set_condition(both, HALTED, "False", reason="B", generation=1, now=NOW)
    both = set_condition(both, HEALTHY, "False", reason="C", generation=1, now=NOW)
    assert [c.type for c in both] == [HEALTHY, HALTED]
    assert not holds(both, HEALTHY)
    assert has_reason(both, HALTED, "X", "B")


def test_a_condition_that_was_never_set_does_not_hold() -> None:
    assert find((), HALTED) is None
    assert not holds((), HALTED)


def test_a_message_longer_than_the_api_server_takes_is_cut() -> None:
    (condition,) = set_condition(
        (), HEALTHY, "True", reason="A", message="x" * 40_000, generation=1, now=NOW
    )
    assert len(condition.message) <= 32_768


def test_a_message_is_text_whoever_said_it() -> None:
    said = "is the page of pod \x1b[2Jx\x00\ud800"
    (condition,) = set_condition(
        (), HEALTHY, "True", reason="A", message=said, generation=1, now=NOW
    )
    assert condition.message == "is the page of pod x\ufffd\ufffd"
