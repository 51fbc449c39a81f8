"""Passes in a row: restarts that are counted or not, last words, and how a run ends."""

from dataclasses import replace
from typing import Any

import pytest

from ling_operator.plan import Plan
from ling_operator.views import PodView
from story import WORDS, Story, kinds


def restart(
    scene: Any,
    story: Story,
    count: int,
    step: int | None = None,
    gone: tuple[PodView, ...] = (),
) -> Plan:
    """See restart number `count` come up and, if a step is given, get that far."""
    seconds = count * 60
    uids = {"restart_attempt": count}
    pods = (scene.pod(0, uid=f"pod-0-{count}", **uids), scene.pod(1, uid=f"pod-1-{count}", **uids))
    story.see(seconds, jobset=scene.jobset(restarts=count), pods=gone)
    page = None
    if step is not None:
        uid = f"pod-0-{count}"
        page = scene.sample(step, seconds + 30, pod_uid=uid, page_pod_uid=uid)
    return story.see(seconds + 31, pods=(*pods, *gone), sample=page)


def test_three_restarts_without_a_new_step_end_the_run(scene: Any, story: Story) -> None:
    story.see(0, sample=scene.sample(20))
    restart(scene, story, 1, step=15)
    restart(scene, story, 2, step=20)  # as far as before, but no further
    assert (story.status.phase, story.status.restarts_without_progress) == ("Running", 2)
    plan = story.see(180, jobset=scene.jobset(restarts=3), pods=())
    assert (story.status.phase, story.condition("Failed")) == ("Failed", ("True", "NoProgress"))
    assert kinds(plan) == ["SetSuspend"]
    assert story.status.restarts == 3


def test_hosts_that_are_taken_away_are_no_crash_loop(scene: Any, story: Story) -> None:
    story.see(0, sample=scene.sample(20))
    lost: tuple[PodView, ...] = ()
    for count in range(1, 9):
        uid = {"restart_attempt": count - 1, "uid": f"taken-{count}"}
        lost = (scene.pod(1, phase="Failed", ready=False, disrupted=True, gone=True, **uid),)
        story.see(count * 60 - 10, pods=(scene.exited(42), *lost))
        restart(scene, story, count, step=15, gone=lost)
    assert (story.status.phase, story.status.restarts) == ("Running", 8)
    assert story.status.restarts_without_progress == 0
    for count in (9, 10):  # the last one that was taken away excuses none of these
        restart(scene, story, count, step=15, gone=lost)
    story.see(660, jobset=scene.jobset(restarts=11), pods=lost)
    assert story.condition("Failed") == ("True", "NoProgress")


def test_restarts_of_a_trainer_that_shows_no_step_are_not_held_against_it(
    scene: Any, story: Story
) -> None:
    for count in range(1, 9):
        restart(scene, story, count)
        uid, seconds = f"pod-0-{count}", count * 60 + 40
        page = scene.sample(1, seconds, pod_uid=uid, page_pod_uid=uid)
        story.see(seconds, sample=replace(page, step=None))
    assert (story.status.phase, story.status.restarts) == ("Running", 8)


def test_restarts_with_progress_go_on_for_ever(scene: Any, story: Story) -> None:
    story.see(0, sample=scene.sample(20))
    for count in range(1, 9):
        restart(scene, story, count, step=20 + count)
    assert (story.status.phase, story.status.restarts) == ("Running", 8)


def test_last_words_are_progress_that_no_scrape_saw(scene: Any, story: Story) -> None:
    story.see(0, sample=scene.sample(20))
    restart(scene, story, 1)
    restart(scene, story, 2)
    crashed = replace(scene.exited(42, reason="LostPeer", step=31), uid="pod-0-2")
    story.see(170, pods=(crashed,))
    story.see(180, jobset=scene.jobset(restarts=3))
    assert story.status.phase == "Restarting"
    assert story.status.restarts_without_progress == 1


def test_our_count_of_restarts_is_read_from_pods_when_the_jobset_is_seen_late(
    scene: Any, story: Story
) -> None:
    story.see(0, pods=scene.pods(restart_attempt=1))
    story.see(1, jobset=scene.jobset(restarts=1))
    assert story.status.restarts == 1


def test_90_that_is_seen_after_the_jobset_failed_turns_failed_into_halted(
    scene: Any, story: Story
) -> None:
    story.see(0, jobset=scene.jobset(terminal="Failed"), pods=())
    assert story.status.phase == "Failed"
    story.see(1, pods=(scene.exited(90, **WORDS),))
    assert story.status.phase == "Halted"


@pytest.mark.parametrize("code", [134, 137])
def test_a_trainer_that_said_it_diverged_and_was_killed_while_it_lingered_has_diverged(
    code: int, scene: Any, story: Story
) -> None:
    story.see(0, pods=(scene.exited(code, **WORDS, signal=WORDS["reason"]),))
    assert story.status.phase == "Halted"
    assert story.status.halt is not None
    assert story.status.halt.reason == WORDS["reason"]


def test_last_words_of_a_lost_peer_are_no_divergence(scene: Any, story: Story) -> None:
    story.see(0, pods=(scene.exited(42, reason="LostPeer", step=31),))
    assert story.status.phase != "Halted"


def test_a_complete_run_shows_its_last_step_and_stays_complete(scene: Any, story: Story) -> None:
    story.see(0, sample=scene.sample(197))
    story.see(5, jobset=scene.jobset(terminal="Completed"), pods=(scene.exited(0),))
    assert (story.status.training.step, story.status.training.target_steps) == (200, 200)
    story.see(90, jobset=None, pods=())  # its TTL
    assert story.status.phase == "Complete"


def test_a_stricter_policy_does_not_halt_what_has_ended(scene: Any) -> None:
    story = Story(scene, health={"nonFinite": {"action": "Alert"}})
    story.see(0, sample=scene.nan_sample(12))
    story.see(5, jobset=scene.jobset(terminal="Completed"), pods=(scene.exited(0),))
    story.edit(health={"nonFinite": {"action": "Halt"}})
    story.see(90, jobset=None, pods=())
    assert story.status.phase == "Complete"


def test_a_run_shorter_than_a_scrape_is_complete_at_its_last_step(
    scene: Any, story: Story
) -> None:
    assert (story.status.training.step, story.status.training.target_steps) == (0, 200)
    story.see(5, jobset=scene.jobset(terminal="Completed"), pods=(scene.exited(0),))
    assert story.status.training.step == 200
