"""Passes in a row: halts that hold, attempts, suspend and resume."""

from datetime import timedelta
from typing import Any

import pytest

from ling_operator.plan import CreateJobSet, DeleteJobSet, Plan, SetSuspend
from story import WORDS, Story, kinds, reasons


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
