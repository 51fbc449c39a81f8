"""Passes in a row: halts that hold, attempts, suspend and resume, restarts, writes, events."""

import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ling_operator.plan import CreateJobSet, DeleteJobSet, Plan, SetSuspend
from ling_operator.progress import scrape_target
from ling_operator.views import PodView
from story import Story

WORDS = {"reason": "NonFiniteLoss", "step": 12, "last_finite_step": 11, "value": "nan"}


@pytest.fixture
def story(scene: Any) -> Story:
    return Story(scene)


@pytest.fixture
def halted(scene: Any) -> Story:
    story = Story(scene)
    story.see(0, sample=scene.nan_sample(12))
    story.see(1, jobset=scene.jobset(suspended=True), pods=())
    return story


def kinds(plan: Plan) -> list[str]:
    return [type(action).__name__ for action in plan.actions]


def reasons(plan: Plan) -> list[str]:
    return [event.reason for event in plan.events]


def test_a_halt_says_reason_step_value_host_and_time(scene: Any, halted: Story) -> None:
    halt = halted.status.halt
    assert halt is not None
    assert (halt.reason, halt.step, halt.value) == ("NonFiniteLoss", 12, "nan")
    assert (halt.host, halt.time) == ("node-0", scene.now)
    assert halted.status.attempts[-1].reason == "NonFiniteLoss"


def test_a_halt_is_acted_on_until_the_jobset_is_seen_suspended(scene: Any, story: Story) -> None:
    for second in range(3):  # the act fails, or its effect is not seen yet
        plan = story.see(second, sample=scene.nan_sample(12))
        assert plan.actions == (SetSuspend("js-1", True, "NonFiniteLoss"),)
    assert story.see(4, jobset=scene.jobset(suspended=True)).actions == ()
    assert "HaltOverridden" not in reasons(story.see(5))


def test_the_trainers_word_after_the_scrapes_halt_changes_nothing(
    scene: Any, halted: Story
) -> None:
    before = halted.status.halt
    pods = (scene.exited(90, reason="NonFiniteGradient", step=14), scene.pod(1))
    halted.see(2, pods=pods)
    assert halted.status.halt == before


@pytest.mark.parametrize(
    "edit",
    [
        {"suspend": True},
        {"suspend": False},
        {"health": {"nonFinite": {"action": "Ignore"}}},
        {"image": "trainer:2"},
        {"attempt": 1},
    ],
    ids=str,
)
def test_no_edit_but_a_raised_attempt_un_halts(halted: Story, edit: dict[str, Any]) -> None:
    halted.edit(**edit)
    for seconds in (2, 20, 200):
        assert halted.see(seconds).actions == ()
        assert halted.status.phase == "Halted"


def test_a_healthy_page_does_not_un_halt(scene: Any, halted: Story) -> None:
    assert halted.see(9, sample=scene.sample(13, 9)).actions == ()
    assert halted.status.phase == "Halted"


def test_a_halt_outlives_its_jobset(halted: Story) -> None:
    assert halted.see(9, jobset=None, pods=()).actions == ()
    assert halted.status.phase == "Halted"


def test_who_undoes_a_halt_is_answered_at_once_and_then_once_a_minute(
    scene: Any, halted: Story
) -> None:
    undone = scene.jobset(suspended=False)
    plan = halted.see(10, jobset=undone)
    assert kinds(plan) == ["SetSuspend"]
    assert "HaltOverridden" in reasons(plan)
    halted.see(11, jobset=scene.jobset(suspended=True))
    quiet = halted.see(12, jobset=undone)
    assert quiet.actions == ()
    assert quiet.requeue_after == timedelta(seconds=58)
    first = [e for e in halted.see(69).events if e.reason == "HaltOverridden"]
    again = halted.see(71)
    assert kinds(again) == ["SetSuspend"]
    second = [e for e in again.events if e.reason == "HaltOverridden"]
    assert first[0].name(halted.run) != second[0].name(halted.run)


def test_a_raised_attempt_deletes_waits_and_creates(scene: Any, halted: Story) -> None:
    halted.edit(attempt=2, image="trainer:2")
    deleting = halted.see(20, pods=(scene.pod(0, deleting=True),))
    assert deleting.actions == (DeleteJobSet("js-1", "attempt 2 replaces 1"),)
    assert (halted.status.phase, halted.status.attempt) == ("Pending", 2)
    assert halted.status.job_set_uid is None
    assert halted.status.halt is None
    assert halted.see(21, jobset=scene.jobset(suspended=True, deleting=True)).actions == ()
    assert halted.see(22, jobset=None).actions == ()  # a pod still lives
    assert halted.condition("Created") == ("False", "WaitingForPrevious")
    (create,) = halted.see(23, pods=(scene.pod(0, gone=True),)).actions
    assert isinstance(create, CreateJobSet)
    assert create.manifest["metadata"]["labels"]["ling.primatrix.io/attempt"] == "2"
    new = {"job_set_uid": "js-2", "attempt": 2}
    pods = scene.pod(0, uid="pod-2-0", **new), scene.pod(1, uid="pod-2-1", **new)
    halted.see(25, jobset=scene.jobset(uid="js-2", attempt=2), pods=pods)
    assert (halted.status.phase, halted.status.job_set_uid) == ("Running", "js-2")
    assert [a.attempt for a in halted.status.attempts] == [1, 2]


def test_the_next_attempt_restores_before_the_step_that_the_halt_names(
    scene: Any, halted: Story
) -> None:
    halt = halted.status.halt
    assert halt is not None
    limited = halted.status.model_copy(
        update={"halt": halt.model_copy(update={"restore_before_step": 50})}
    )
    halted.run = halted.run.model_copy(update={"status": limited})

    def restore(plan: Plan) -> Any:
        (create,) = plan.actions
        assert isinstance(create, CreateJobSet)
        job = create.manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
        env = job["template"]["spec"]["containers"][0]["env"]
        return {v["name"]: v.get("value") for v in env}.get("LING_RESTORE_BEFORE_STEP")

    halted.edit(attempt=2)
    assert restore(halted.see(20, jobset=None)) == "50"
    halted.edit(
        attempt=3
    )  # attempt 2 never got there: the bad checkpoints are still to be avoided
    assert restore(halted.see(30)) == "50"
    ran = halted.status.health.model_copy(update={"highest_step": 80})
    status = halted.status.model_copy(update={"health": ran})
    halted.run = halted.run.model_copy(update={"status": status})
    halted.edit(attempt=4)
    assert restore(halted.see(40)) is None


@pytest.mark.parametrize("phase", ["Running", "Failed", "Complete", "Cancelled"])
def test_a_raised_attempt_leaves_every_phase(scene: Any, story: Story, phase: str) -> None:
    if phase == "Failed":
        story.see(0, pods=(scene.exited(3),))
    elif phase == "Complete":
        story.see(0, jobset=scene.jobset(terminal="Completed"), pods=(scene.exited(0),))
    elif phase == "Cancelled":
        story.see(0, jobset=None, pods=())
    assert story.status.phase == phase
    story.edit(attempt=5)
    plan = story.see(1, pods=())
    assert kinds(plan) == (["CreateJobSet"] if phase == "Cancelled" else ["DeleteJobSet"])
    assert story.status.attempt == 5
    assert story.status.attempts[0].end_time is not None


def test_a_lower_attempt_changes_nothing(story: Story) -> None:
    story.edit(attempt=3)
    story.see(0)
    story.edit(attempt=2)
    story.see(1)
    assert story.status.attempt == 3


def test_the_history_keeps_the_last_ten_attempts(scene: Any, story: Story) -> None:
    for attempt in range(2, 15):
        story.edit(attempt=attempt)
        story.see(attempt, jobset=None, pods=())
    assert [a.attempt for a in story.status.attempts] == list(range(5, 15))
    assert {a.reason for a in story.status.attempts[:-1]} == {"Superseded"}


def test_suspend_and_resume_keep_the_jobset_and_spend_no_restart(scene: Any, story: Story) -> None:
    story.edit(suspend=True)
    assert story.see(0).actions == (SetSuspend("js-1", True, "SuspendRequested"),)
    assert (story.status.phase, story.condition("Suspended")) == (
        "Suspended",
        ("False", "Suspending"),
    )
    leaving = scene.pods(deleting=True)
    story.see(1, jobset=scene.jobset(suspended=True, restarts=1), pods=leaving)
    assert story.condition("Suspended") == ("False", "Suspending")
    story.see(3, pods=())
    assert story.condition("Suspended") == ("True", "SuspendRequested")
    story.edit(suspend=False)
    assert story.see(10).actions == (SetSuspend("js-1", False, "Resuming"),)
    assert story.status.phase == "Starting"
    assert kinds(story.see(11)) == ["SetSuspend"]  # its effect is not seen yet
    story.see(12, jobset=scene.jobset(restarts=2))
    story.see(13, pods=scene.pods(restart_attempt=2))
    assert (story.status.phase, story.condition("Suspended")) == ("Running", ("False", "Resumed"))
    assert story.status.restarts == 0
    story.see(14, jobset=scene.jobset(restarts=3), pods=())
    assert (story.status.phase, story.status.restarts) == ("Restarting", 1)


def test_a_jobset_that_somebody_else_suspended_is_not_resumed(scene: Any, story: Story) -> None:
    for seconds in (0, 10):
        plan = story.see(seconds, jobset=scene.jobset(suspended=True), pods=())
        assert plan.actions == ()
    assert story.status.phase == "Queued"


def test_a_nan_that_is_seen_while_suspending_halts(scene: Any, story: Story) -> None:
    story.edit(suspend=True)
    story.see(0)
    story.see(1, jobset=scene.jobset(suspended=True), pods=(scene.exited(90, **WORDS),))
    assert story.status.phase == "Halted"
    story.edit(suspend=False)
    assert story.see(2).actions == ()


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
    for count in range(1, 9):
        uid = {"restart_attempt": count - 1, "uid": f"taken-{count}"}
        taken = scene.pod(1, phase="Failed", ready=False, disrupted=True, gone=True, **uid)
        story.see(count * 60 - 10, pods=(scene.exited(42), taken))
        restart(scene, story, count, step=15, gone=(taken,))
    assert (story.status.phase, story.status.restarts) == ("Running", 8)
    assert story.status.restarts_without_progress == 0
    for count in (9, 10):  # the last one that was taken away excuses none of these
        restart(scene, story, count, step=15, gone=(taken,))
    story.see(660, jobset=scene.jobset(restarts=11), pods=(taken,))
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
