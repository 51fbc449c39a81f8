"""What the API server refuses is a condition of the run, written once and taken back."""

from dataclasses import replace
from typing import Any

import pytest

from ling_operator.api import ConditionType, TrainingRunStatus
from ling_operator.conditions import find
from ling_operator.reconcile import reconcile

SAID = 'SetSuspend: 403 Forbidden: jobsets "ling2" is forbidden: cannot patch resource "jobsets"'


@pytest.fixture
def running(scene: Any) -> Any:
    """An observation of a run that has made a step, its status written."""
    world = {"jobset": scene.jobset(), "pods": scene.pods(), "sample": scene.sample(5)}
    return settled(scene.observed(scene.running(), **world))


def settled(observed: Any, **changes: Any) -> Any:
    """Return the observation with what reconcile would write."""
    observed = replace(observed, **changes)
    return replace(
        observed, run=observed.run.model_copy(update={"status": reconcile(observed).status})
    )


def permitted(status: TrainingRunStatus) -> Any:
    return find(status.conditions, ConditionType.PERMITTED)


def test_without_a_refusal_ever_there_is_no_condition(running: Any) -> None:
    assert permitted(running.run.status) is None
    assert permitted(reconcile(running).status) is None


def test_a_refusal_is_written_with_the_servers_words_and_told_once(running: Any) -> None:
    refused = settled(running, refusal=SAID)
    condition = permitted(refused.run.status)
    assert (condition.status, condition.reason, condition.message) == ("False", "Refused", SAID)
    (told,) = [event for event in reconcile(refused).events if event.reason == "Refused"]
    assert (told.type, told.message) == ("Warning", SAID)
    again = replace(refused, refusal="event X: 403 Forbidden")
    plan = reconcile(again)
    assert plan.status == again.run.status, "other words alone are not worth a write"
    (same,) = [event for event in plan.events if event.reason == "Refused"]
    assert same.name(again.run) == told.name(refused.run)


def test_when_the_server_accepts_again_the_condition_says_so(running: Any) -> None:
    back = settled(settled(running, refusal=SAID), refusal=None)
    condition = permitted(back.run.status)
    assert (condition.status, condition.reason) == ("True", "Accepted")
    assert not [event for event in reconcile(back).events if event.reason == "Refused"]


def test_a_refusal_changes_neither_phase_nor_actions(running: Any) -> None:
    plain, refused = reconcile(running), reconcile(replace(running, refusal=SAID))
    assert (plain.status.phase, plain.actions) == (refused.status.phase, refused.actions)


def test_a_new_attempt_begins_without_the_old_refusal(scene: Any, running: Any) -> None:
    refused = settled(running, refusal=SAID)
    second = scene.run(refused.run.status, attempt=2)
    assert permitted(reconcile(replace(refused, run=second, refusal=None)).status) is None
