"""A run in a Kueue queue, pass by pass: admitted, stopped by its Workload, paused, evicted."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ling_operator.jobset import build_jobset
from ling_operator.plan import SetSuspend, SetWorkloadActive
from ling_operator.workload import WorkloadView, view_workload
from story import Story

ADMITTED = WorkloadView(
    name="jobset-ling2-0a1b2", uid="wl-1", owner="ling2", owner_uid="js-1",
    active=True, admitted=True, message="",
)  # fmt: skip
WAITING = replace(ADMITTED, admitted=False, message="insufficient quota for pods")
INACTIVE = replace(ADMITTED, active=False, admitted=False)
DEACTIVATE = SetWorkloadActive("jobset-ling2-0a1b2", "wl-1", False, "NonFiniteLoss")


def queued(scene: Any) -> Story:
    """Return a run in a queue that has its quota."""
    return Story(scene, world={"workload": ADMITTED}, queue="team")


@pytest.fixture
def story(scene: Any) -> Story:
    story = queued(scene)
    story.see(0)
    return story


def stopped(scene: Any) -> dict[str, Any]:
    return {"jobset": scene.jobset(suspended=True), "pods": (), "workload": INACTIVE}


def test_the_jobset_names_its_queue_and_waits_for_it_even_where_kueue_is_missing(
    scene: Any,
) -> None:
    queued = build_jobset(scene.run(queue="team"), attempt=1, restore_before_step=None)
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert queued["spec"]["suspend"] is True
    template = queued["spec"]["replicatedJobs"][0]["template"]
    assert "kueue.x-k8s.io/queue-name" not in template["metadata"]["labels"]
    free = build_jobset(scene.run(), attempt=1, restore_before_step=None)
    assert "kueue.x-k8s.io/queue-name" not in free["metadata"]["labels"]
    assert free["spec"]["suspend"] is False


def test_a_run_without_a_queue_has_no_admitted_condition(scene: Any) -> None:
    plan = scene.reconcile(
        scene.observed(scene.running(), jobset=scene.jobset(), pods=scene.pods())
    )
    assert "Admitted" not in {c.type for c in plan.status.conditions}


@pytest.mark.parametrize(
    ("workload", "expected", "message"),
    [
        (None, ("Unknown", "NoWorkload"), "LocalQueue team"),
        (WAITING, ("False", "WaitingForQuota"), "insufficient quota for pods"),
        (ADMITTED, ("True", "Admitted"), "jobset-ling2-0a1b2"),
    ],
)
def test_admitted_says_what_kueue_says(
    scene: Any, workload: WorkloadView | None, expected: tuple[str, str], message: str
) -> None:
    run = scene.running(queue="team")
    run = run.model_copy(update={"status": run.status.model_copy(update={"conditions": ()})})
    suspended = workload is not ADMITTED
    world = {"jobset": scene.jobset(suspended=suspended), "pods": (), "workload": workload}
    plan = scene.reconcile(scene.observed(run, **world))
    (condition,) = (c for c in plan.status.conditions if c.type == "Admitted")
    assert (condition.status, condition.reason) == expected
    assert message in condition.message
    assert plan.actions == ()
    assert plan.status.phase == ("Queued" if suspended else "Starting")


def test_a_halt_deactivates_the_workload_and_leaves_the_jobset_to_kueue(
    scene: Any, story: Story
) -> None:
    for second in range(1, 3):
        assert story.see(second, sample=scene.nan_sample(12)).actions == (DEACTIVATE,)
    assert story.see(3, workload=INACTIVE).actions == (), "Kueue is carrying it out"
    story.see(4, **stopped(scene))
    assert story.status.phase == "Halted"
    assert story.status.stop is not None
    assert story.status.stop.confirmed
    assert story.condition("Admitted") == ("False", "Deactivated")


def test_a_halt_holds_where_kueue_does_not_answer(scene: Any, story: Story) -> None:
    story.see(1, sample=scene.nan_sample(12))
    plan = story.see(60, workload=INACTIVE)
    assert plan.actions == ()
    assert plan.requeue_after == timedelta(seconds=60)
    suspend = SetSuspend("js-1", True, "NonFiniteLoss")
    assert story.see(61).actions == (suspend,)
    assert story.see(62).actions == (suspend,), "until it is seen"
    story.see(63, jobset=scene.jobset(suspended=True))
    assert story.status.stop is not None
    assert story.status.stop.confirmed
    assert story.see(64).requeue_after is None
    again = story.see(65, jobset=scene.jobset())
    assert again.actions == (suspend,), "nor does it undo what somebody does"
    assert "HaltOverridden" in {event.reason for event in again.events}


def test_a_run_halted_while_it_waits_for_quota_is_deactivated_too(scene: Any) -> None:
    story = queued(scene)
    story.see(0)
    story.see(1, workload=replace(WAITING, message="preempted"),
              jobset=scene.jobset(suspended=True))  # fmt: skip
    plan = story.see(2, pods=(scene.exited(90), scene.exited(143, 1)))
    assert plan.actions == (replace(DEACTIVATE, reason="Diverged"),)


def test_a_reactivated_halt_is_undone_at_most_once_a_minute(scene: Any, story: Story) -> None:
    story.see(1, sample=scene.nan_sample(12))
    story.see(2, **stopped(scene))
    undone = {"workload": ADMITTED, "jobset": scene.jobset(), "pods": scene.pods()}
    plan = story.see(10, **undone)
    assert plan.actions == (DEACTIVATE,)
    assert "HaltOverridden" in {event.reason for event in plan.events}
    assert story.see(20).actions == ()
    assert story.see(20).requeue_after == timedelta(seconds=50)
    assert story.see(71).actions == (DEACTIVATE,)


def test_before_its_workload_exists_a_halt_is_not_taken_for_done(scene: Any) -> None:
    story = queued(scene)
    story.see(0)
    plan = story.see(1, jobset=scene.jobset(suspended=True), workload=None,
                     pods=(scene.exited(90), scene.exited(143, 1)))  # fmt: skip
    assert plan.actions == ()
    assert story.status.stop is not None
    assert not story.status.stop.confirmed
    assert story.see(2, workload=WAITING).actions[0] == replace(DEACTIVATE, reason="Diverged")
    assert "HaltOverridden" not in {event.reason for event in story.see(3).events}


def test_where_kueue_was_removed_the_jobset_itself_is_suspended(scene: Any, story: Story) -> None:
    plan = story.see(1, workload=None, sample=scene.nan_sample(12))
    assert plan.actions == (SetSuspend("js-1", True, "NonFiniteLoss"),)


def test_a_pause_and_a_resume_go_through_the_workload_and_count_no_restart(
    scene: Any, story: Story
) -> None:
    story.edit(suspend=True)
    pause = SetWorkloadActive("jobset-ling2-0a1b2", "wl-1", False, "SuspendRequested")
    assert story.see(1).actions == (pause,)
    assert story.see(2, workload=INACTIVE).actions == ()
    story.see(3, **stopped(scene))
    assert story.status.phase == "Suspended"
    assert story.condition("Suspended") == ("True", "SuspendRequested")
    story.edit(suspend=False)
    assert story.see(4).actions == (replace(pause, active=True, reason="Resuming"),)
    assert story.see(5, workload=WAITING).actions == (), "it is Kueue that un-suspends"
    assert story.status.phase == "Queued"
    running = {"jobset": scene.jobset(restarts=1), "pods": scene.pods(restart_attempt=1)}
    story.see(6, workload=ADMITTED, **running)
    assert story.condition("Suspended") == ("False", "Resumed")
    assert (story.status.phase, story.status.restarts) == ("Running", 0)


def test_an_eviction_is_shown_as_queued_and_counts_no_restart(scene: Any, story: Story) -> None:
    evicted = replace(WAITING, message="Preempted to accommodate a workload")
    assert story.see(1, workload=evicted).actions == ()
    assert story.condition("Admitted") == ("False", "Evicted")
    assert story.see(2, jobset=scene.jobset(suspended=True), pods=()).actions == ()
    assert story.condition("Suspended") == ("True", "Evicted")
    assert story.status.phase == "Queued"
    running = {"jobset": scene.jobset(restarts=1), "pods": scene.pods(restart_attempt=1)}
    assert story.see(3, workload=ADMITTED, **running).actions == ()
    story.see(4)
    assert (story.status.phase, story.status.restarts) == ("Running", 0)
    assert story.status.restarts_without_progress == 0


def test_a_workload_that_somebody_else_deactivated_is_left_to_them(
    scene: Any, story: Story
) -> None:
    assert story.see(1, **stopped(scene)).actions == ()
    assert story.condition("Admitted") == ("False", "Deactivated")
    assert story.status.phase == "Queued"
    assert story.see(2).actions == ()


def workload(**status: Any) -> dict[str, Any]:
    owners = [
        {"kind": "Team", "name": "other", "uid": "x"},
        {"kind": "JobSet", "name": "ling2", "uid": "js-1"},
    ]
    metadata = {"name": "jobset-ling2-0a1b2", "uid": "wl-1", "ownerReferences": owners}
    return {"metadata": metadata, "spec": {"active": True}, "status": status}


def test_a_workload_is_read_by_its_jobset_owner_and_its_conditions() -> None:
    admitted = [
        {"type": "Admitted", "status": "True"},
        {"type": "QuotaReserved", "status": "True"},
    ]
    assert view_workload(workload(conditions=admitted)) == ADMITTED
    evicted = [
        {"type": "Admitted", "status": "False"},
        {"type": "QuotaReserved", "status": "False", "message": "pending"},
        {"type": "Evicted", "status": "True", "message": "Preempted to accommodate"},
    ]
    assert view_workload(workload(conditions=evicted)).message == "Preempted to accommodate"
    assert view_workload({"metadata": {"name": "w", "uid": "u"}}).owner_uid == ""


@pytest.mark.parametrize("halted", [True, False])
def test_a_run_whose_jobset_is_gone_has_no_quota(scene: Any, story: Story, halted: bool) -> None:
    if halted:
        story.see(1, sample=scene.nan_sample(12))
    story.see(2, jobset=None, workload=None, pods=())
    assert story.status.phase == ("Halted" if halted else "Cancelled")
    assert story.condition("Admitted") == ("False", "NoWorkload")


def test_a_run_with_quota_that_waits_for_machines_says_so() -> None:
    reserved = [
        {"type": "QuotaReserved", "status": "True", "message": "Quota reserved in tpu"},
        {"type": "Evicted", "status": "False", "message": "Previously: preempted"},
    ]
    checks = [
        {"name": "budget", "state": "Ready", "message": "ok"},
        {"name": "dws", "state": "Pending", "message": "Waiting for resources"},
    ]
    waiting = view_workload(workload(conditions=reserved, admissionChecks=checks))
    assert not waiting.admitted
    assert waiting.message == (
        "The quota is reserved; admission check dws is Pending: Waiting for resources"
    )


def test_a_run_that_kueue_gave_up_says_why(scene: Any, story: Story) -> None:
    why = "The workload is deactivated due to exceeding the maximum number of re-queuing retries"
    story.see(1, **(stopped(scene) | {"workload": replace(INACTIVE, message=why)}))
    (condition,) = (c for c in story.status.conditions if c.type == "Admitted")
    assert condition.message == f"The Workload is not active; its quota is free. {why}"
