"""Passes in a row: when a status is written, what events tell, and clocks that are set back."""

import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ling_operator.progress import scrape_target
from story import WORDS, Story, kinds, reasons


def test_progress_is_written_every_ten_seconds_and_evidence_at_once(
    scene: Any, story: Story
) -> None:
    story.see(0, sample=scene.sample(10))
    first = story.status
    assert first.training.step == 10
    for seconds in (2, 5, 9):
        story.see(seconds, sample=scene.sample(10 + seconds, seconds))
        assert story.status == first, "an early write"
    story.see(10, sample=scene.sample(20, 10))
    assert story.status.training.step == 20
    story.see(11, sample=scene.nan_sample(21, 11))
    assert (story.status.phase, story.status.training.step) == ("Halted", 21)


def test_a_slow_api_server_delays_progress_and_no_evidence(scene: Any, story: Story) -> None:
    slow = {"steady_write": timedelta(seconds=60)}
    story.see(0, sample=scene.sample(10))
    story.see(50, sample=scene.sample(60, 50), **slow)
    assert story.status.training.step == 10
    story.see(51, sample=scene.nan_sample(61, 51), **slow)
    assert (story.status.phase, story.status.training.step) == ("Halted", 61)


def test_a_bad_step_below_the_threshold_is_written_at_once(scene: Any) -> None:
    story = Story(scene, health={"nonFinite": {"consecutiveSteps": 3}})
    story.see(0, sample=scene.sample(10))
    story.see(2, sample=scene.nan_sample(12, 2))
    assert story.status.health.nonfinite_steps == 1


def test_a_loss_that_is_no_number_is_text_in_the_status(scene: Any, story: Story) -> None:
    story.see(0, sample=scene.sample(10, loss=3.14159))
    assert story.status.training.loss == "3.1416"
    story.see(11, sample=scene.nan_sample(11, 11))
    assert story.status.training.loss == "NaN"


def test_an_event_has_one_name_in_every_pass_and_is_not_told_late(
    scene: Any, story: Story
) -> None:
    first = story.see(0, sample=scene.nan_sample(12))
    names = {event.name(story.run) for event in first.events}
    assert reasons(first).count("NonFiniteLoss") == 1
    later = story.see(600)
    assert {event.name(story.run) for event in later.events} == names
    assert story.see(51 * 60).events == ()


@pytest.mark.parametrize("name", ["a" * 253, "a" * 235 + "-" + "b" * 17])
def test_an_events_name_is_one_whatever_the_runs(scene: Any, story: Story, name: str) -> None:
    (event, *_) = story.see(0, sample=scene.nan_sample(12)).events
    metadata = story.run.metadata.model_copy(update={"name": name})
    called = event.name(story.run.model_copy(update={"metadata": metadata}))
    assert len(called) <= 253
    assert re.fullmatch(r"([a-z0-9]([-a-z0-9]*[a-z0-9])?)(\.[a-z0-9]+)?", called)


@pytest.mark.parametrize("speed", [1e300, -1.0, float("nan"), float("inf")])
def test_a_speed_that_is_none_does_not_reach_the_status(
    scene: Any, story: Story, speed: float
) -> None:
    story.see(0, sample=scene.sample(10, tokens_per_second=speed))
    assert (story.status.training.step, story.status.training.tokens_per_second) == (10, None)


def test_a_clock_that_is_set_back_blinds_nobody(scene: Any, story: Story) -> None:
    hour = 3600
    story.see(hour, sample=scene.sample(20, hour))
    story.see(2, sample=scene.sample(20, hour))  # the last page from before
    assert story.status.health.sample_time == scene.at(hour)
    story.see(20)
    assert story.condition("MetricsAvailable") == ("False", "MetricsMissing")
    story.see(23, sample=scene.sample(21, 22))
    assert (story.status.training.step, story.status.health.sample_time) == (21, scene.at(22))
    assert story.condition("MetricsAvailable") == ("True", "Scraped")
    story.see(28, sample=scene.nan_sample(22, 27))
    assert story.status.phase == "Halted"


def test_a_stall_is_found_by_a_clock_that_was_set_back(scene: Any, story: Story) -> None:
    hour = 3600
    beat = {"heartbeat": scene.at(0), "last_step_time": scene.at(0)}
    story.see(hour, sample=scene.sample(20, hour, **beat))
    for second in range(0, 700, 60):
        story.see(second, sample=scene.sample(20, second, **beat))
    assert story.condition("Healthy") == ("False", "Stalled")


def test_a_clock_that_differs_by_seconds_makes_no_older_page_count(
    scene: Any, story: Story
) -> None:
    story.see(50, sample=scene.sample(20, 50))
    story.see(2, sample=scene.sample(19, 1))
    assert story.status.training.step == 20


def test_a_halt_is_enforced_by_a_clock_that_was_set_back(scene: Any, halted: Story) -> None:
    undone = scene.jobset(suspended=False)
    assert kinds(halted.see(3600, jobset=undone)) == ["SetSuspend"]
    halted.see(3601, jobset=scene.jobset(suspended=True))
    assert kinds(halted.see(10, jobset=undone)) == ["SetSuspend"]


def test_the_end_of_an_attempt_and_of_the_next_are_two_events(scene: Any, halted: Story) -> None:
    (first,) = [e for e in halted.see(2).events if e.reason == "NonFiniteLoss"]
    halted.edit(attempt=2)
    halted.see(3, jobset=None)
    new = {"job_set_uid": "js-2", "attempt": 2}
    halted.see(4, jobset=scene.jobset(uid="js-2", attempt=2), pods=scene.pods(**new))
    again = halted.see(5, pods=(replace(scene.exited(90, **WORDS), **new),))
    (second,) = [e for e in again.events if e.reason == "NonFiniteLoss"]
    assert first.name(halted.run) != second.name(halted.run)


def test_process_0_of_the_newest_restart_is_scraped_until_the_end(
    scene: Any, story: Story
) -> None:
    old = scene.pod(0, phase="Failed", exit_code=42)
    new = scene.pod(0, uid="pod-0b", restart_attempt=1)
    coming = scene.pod(0, uid="pod-0c", restart_attempt=2, phase="Pending", ip=None)
    other = scene.pod(0, uid="pod-x", job_set_uid="js-0", restart_attempt=9)
    pods = (old, scene.pod(1), new, coming, other)
    target = scrape_target(story.run, pods)
    assert target is not None
    assert target.uid == "pod-0b"
    story.see(0, pods=(scene.exited(90, **WORDS), new))
    assert scrape_target(story.run, pods) is None


def test_a_running_object_is_looked_at_every_interval_and_an_ended_one_never(
    scene: Any, story: Story
) -> None:
    assert story.see(0).requeue_after == timedelta(seconds=10)
    assert story.see(1, jobset=None, pods=()).requeue_after is None
