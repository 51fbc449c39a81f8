"""health.haltMode Fail, pass by pass: the JobSet of a halted run goes, the run stays halted."""

from typing import Any

import pytest

from ling_operator.plan import CreateJobSet, DeleteJobSet, SetSuspend
from story import Story

FAIL = {"haltMode": "Fail"}
DELETE = DeleteJobSet("js-1", "NonFiniteLoss")
WORDS = {"reason": "NonFiniteLoss", "step": 12}


@pytest.fixture
def story(scene: Any) -> Story:
    """Return a run that fails when it is halted."""
    return Story(scene, health=FAIL)


def test_the_jobset_is_deleted_by_its_uid_until_it_is_seen_going(scene: Any, story: Story) -> None:
    for second in range(3):  # the act fails, or its effect is not seen yet
        assert story.see(second, sample=scene.nan_sample(12)).actions == (DELETE,)
    assert story.see(3, jobset=scene.jobset(deleting=True)).actions == ()
    for second in (4, 400):
        assert story.see(second, jobset=None, pods=()).actions == ()
        assert (story.status.phase, story.condition("Created")) == (
            "Halted",
            ("True", "JobSetCreated"),
        )
    reasons = {event.reason for event in story.see(401).events}
    assert not reasons & {"HaltOverridden", "JobSetDeleted"}


def test_one_that_has_failed_of_the_divergence_goes_too(scene: Any, story: Story) -> None:
    pods = (scene.exited(90, **WORDS),)
    plan = story.see(0, jobset=scene.jobset(terminal="Failed"), pods=pods)
    assert plan.actions == (DELETE,)
    assert story.status.phase == "Halted"


def test_a_raised_attempt_starts_anew_when_the_last_pod_is_gone(scene: Any, story: Story) -> None:
    story.see(0, sample=scene.nan_sample(12))
    leaving = scene.pods(deleting=True)
    story.edit(attempt=2)
    going = {"jobset": scene.jobset(deleting=True), "pods": leaving}
    assert story.see(1, **going).actions == ()
    assert story.condition("Created") == ("False", "WaitingForPrevious")
    assert story.see(2, jobset=None).actions == ()
    (create,) = story.see(3, pods=()).actions
    assert isinstance(create, CreateJobSet)


def test_another_jobset_of_the_name_is_left_alone(scene: Any, story: Story) -> None:
    story.see(0, sample=scene.nan_sample(12))
    assert story.see(1, jobset=scene.jobset(uid="js-2", owner=None), pods=()).actions == ()
    assert story.status.phase == "Halted"


def test_the_mode_can_be_changed_after_the_halt(scene: Any) -> None:
    story = Story(scene)
    plan = story.see(0, sample=scene.nan_sample(12))
    assert plan.actions == (SetSuspend("js-1", True, "NonFiniteLoss"),)
    story.see(1, jobset=scene.jobset(suspended=True), pods=())
    story.edit(health=FAIL)
    assert story.see(2).actions == (DELETE,)


def test_a_failure_that_is_no_halt_keeps_its_jobset(scene: Any, story: Story) -> None:
    failed = {"jobset": scene.jobset(terminal="Failed"), "pods": (scene.exited(3),)}
    assert story.see(0, **failed).actions == ()
    assert story.status.phase == "Failed"
