"""A run that watches a JobSet which somebody else launched, pass by pass."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ling_operator.api import API_VERSION, KIND
from ling_operator.plan import SetSuspend, SetWorkloadActive
from ling_operator.progress import metrics_port_of, scrape_target
from ling_operator.run_view import view_run
from ling_operator.views import Owner, view_jobset, view_pod
from ling_operator.workload import WorkloadView
from story import WORDS, Story, kinds

WATCH: dict[str, Any] = {"watch": {"jobSet": "xpk-run"}, "image": None, "cpu": None, "run": None}
ADMITTED = WorkloadView(
    name="jobset-xpk-run-0a1b2", uid="wl-1", owner="xpk-run", owner_uid="js-1",
    active=True, admitted=True, message="",
)  # fmt: skip
INACTIVE = replace(ADMITTED, active=False, admitted=False)


class Watch(Story):
    """The story of a run that watches `xpk-run`, which runs two pods."""

    def __init__(self, scene: Any, **spec: Any) -> None:
        self.scene = scene
        self.spec = WATCH | spec
        self.run = scene.run(**self.spec)
        self.world = {"jobset": None, "pods": ()}

    def launched(self, **changes: Any) -> dict[str, Any]:
        """Return what is seen once somebody has launched the JobSet."""
        jobset = self.scene.jobset(name="xpk-run", owner=None, attempt=0, hosts=2)
        return {"jobset": replace(jobset, **changes), "pods": self.made(1)}

    def made(self, second: float, **changes: Any) -> tuple[Any, ...]:
        """Return both pods, created at that second."""
        created = self.scene.at(second)
        return tuple(
            self.scene.pod(i, **({"uid": f"pod-{i}-{second:g}", "created": created} | changes))
            for i in range(2)
        )

    def page(self, second: float, step: int, *, nan: bool = False, pod: str = "pod-0-1") -> Any:
        """Return process 0's page."""
        make = self.scene.nan_sample if nan else self.scene.sample
        return make(step, second, pod_uid=pod, page_pod_uid=pod)


@pytest.fixture
def story(scene: Any) -> Watch:
    """Return a run that has watched for a while."""
    story = Watch(scene)
    story.see(2, **story.launched())
    story.see(3)
    return story


@pytest.fixture
def halted(story: Watch) -> Watch:
    """Return one that was halted by a NaN at step 12; its pods are gone."""
    story.see(4, sample=story.page(4, 12, nan=True))
    story.see(5, **story.launched(suspended=True) | {"pods": ()})
    return story


def test_a_jobset_that_is_not_there_is_waited_for_and_not_made(scene: Any) -> None:
    story = Watch(scene)
    plan = story.see(0)
    assert plan.actions == ()
    assert plan.requeue_after == timedelta(seconds=5)
    assert (story.status.phase, story.condition("Created")) == (
        "Pending",
        ("False", "JobSetNotFound"),
    )
    going = story.launched(deleting=True)
    assert story.see(1, **going).actions == ()
    assert story.condition("Created") == ("False", "JobSetNotFound")
    assert story.see(2, **story.launched()).actions == ()
    assert story.condition("Created") == ("True", "JobSetFound")
    assert story.status.job_set_uid == "js-1"
    assert story.see(3).actions == ()
    assert story.status.phase == "Running"
    assert story.status.attempts[-1].job_set_uid == "js-1"


def test_all_pods_of_the_jobset_are_expected(story: Watch) -> None:
    story.see(4, pods=story.made(1)[:1])
    assert story.condition("PodsReady") == ("False", "PodsPending")
    assert story.status.phase == "Starting"


def test_what_may_not_be_said_with_watch_is_told_and_nothing_is_watched(scene: Any) -> None:
    story = Watch(scene, queue="team")
    story.see(0, **story.launched())
    assert story.condition("Created") == ("False", "InvalidConfig")
    assert story.status.job_set_uid is None


def test_a_jobset_of_a_training_run_is_left_to_it(scene: Any) -> None:
    story = Watch(scene)
    owner = Owner(api_version=API_VERSION, kind=KIND, name="xpk-run", uid="another")
    story.see(0, **story.launched(owner=owner))
    assert story.condition("Created") == ("False", "NameConflict")
    story.see(1, **story.launched(), other_watcher="first")
    assert story.condition("Created") == ("False", "NameConflict")
    (created,) = (c for c in story.status.conditions if c.type == "Created")
    assert "watched by TrainingRun first already" in created.message
    story.see(2, other_watcher=None)
    assert story.condition("Created") == ("True", "JobSetFound")


def test_a_nan_suspends_a_jobset_that_is_in_no_queue(story: Watch) -> None:
    plan = story.see(4, sample=story.page(4, 12, nan=True))
    assert plan.actions == (SetSuspend("js-1", True, "NonFiniteLoss"),)
    assert story.status.phase == "Halted"


def test_a_nan_deactivates_the_workload_of_one_that_is(scene: Any) -> None:
    story = Watch(scene)
    story.see(2, **story.launched(queue="multislice-queue"), workload=ADMITTED)
    story.see(3)
    assert story.condition("Admitted") == ("True", "Admitted")
    plan = story.see(4, sample=story.page(4, 12, nan=True))
    off = SetWorkloadActive(ADMITTED.name, "wl-1", False, "NonFiniteLoss")
    assert plan.actions == (off,)
    suspended = story.launched(queue="multislice-queue", suspended=True) | {"pods": ()}
    assert story.see(5, **suspended, workload=INACTIVE).actions == ()
    story.edit(attempt=2)
    on = SetWorkloadActive(ADMITTED.name, "wl-1", True, "Resuming")
    assert story.see(6).actions == (on,)


def test_exit_90_halts_and_the_failed_jobset_stays(scene: Any, story: Watch) -> None:
    ended = replace(scene.exited(90, **WORDS), created=scene.at(1))
    plan = story.see(4, **story.launched(terminal="Failed") | {"pods": (ended,)})
    assert plan.actions == ()
    halt = story.status.halt
    assert halt is not None
    assert (story.status.phase, halt.step) == ("Halted", 12)


def test_fail_mode_never_deletes_what_others_launched(scene: Any) -> None:
    story = Watch(scene)
    story.see(2, **story.launched())
    story.edit(health={"haltMode": "Fail"})  # an older CRD would let it through
    assert kinds(story.see(4, sample=story.page(4, 12, nan=True))) == ["SetSuspend"]


def test_a_raised_attempt_lets_the_same_jobset_go_on_and_holds_the_past_not_against_it(
    scene: Any, halted: Watch
) -> None:
    late = {"phase": "Failed", "exit_code": 90, "ready": False, "gone": True}
    old = halted.made(1, **late)  # its message came when the run was halted already
    halted.edit(attempt=2)
    plan = halted.see(6, pods=old)
    assert plan.actions == (SetSuspend("js-1", False, "Resuming"),)
    assert (halted.status.phase, halted.status.job_set_uid) == ("Starting", "js-1")
    new = halted.made(9)
    running = halted.launched(restarts=1) | {"pods": old + new}
    halted.see(10, **running)
    halted.see(11)
    assert (halted.status.phase, halted.condition("Suspended")) == (
        "Running",
        ("False", "Resumed"),
    )
    assert halted.status.restarts == 0
    target = scrape_target(halted.run, running["pods"])
    assert target is not None
    assert target.uid == "pod-0-9"
    again = halted.see(12, sample=halted.page(12, 12, nan=True, pod="pod-0-9"))
    assert again.actions == (SetSuspend("js-1", True, "NonFiniteLoss"),)
    assert [a.reason for a in halted.status.attempts] == ["NonFiniteLoss", "NonFiniteLoss"]


def test_ended_pods_that_stay_do_not_halt_the_next_attempt(scene: Any, story: Watch) -> None:
    ended = tuple(replace(scene.exited(90, i, **WORDS), created=scene.at(1)) for i in range(2))
    story.see(4, pods=ended)
    story.see(5, **story.launched(suspended=True) | {"pods": ended})
    story.edit(attempt=2)
    assert kinds(story.see(6)) == ["SetSuspend"]
    story.see(7, **story.launched() | {"pods": ended + story.made(6)})
    assert story.see(8).actions == ()
    assert story.status.phase == "Running"


def test_a_new_attempt_waits_for_the_last_pod_of_a_stopped_one(story: Watch) -> None:
    story.see(4, sample=story.page(4, 12, nan=True))
    story.edit(attempt=2)
    leaving = story.made(1, deleting=True)
    plan = story.see(5, pods=leaving)
    assert plan.actions == (SetSuspend("js-1", True, "WaitingForPrevious"),)
    assert story.condition("Created") == ("False", "WaitingForPrevious")
    assert story.see(6, **story.launched(suspended=True) | {"pods": leaving}).actions == ()
    assert kinds(story.see(7, pods=())) == ["SetSuspend"]
    assert story.condition("Suspended") == ("False", "Resuming")


def test_an_attempt_raised_twice_before_the_stopped_one_is_at_rest_waits_too(
    story: Watch,
) -> None:
    story.see(4, sample=story.page(4, 12, nan=True))
    for attempt in (2, 3):
        story.edit(attempt=attempt)
        story.see(4 + attempt)
        assert story.condition("Created") == ("False", "WaitingForPrevious")
    story.see(8, **story.launched(suspended=True) | {"pods": ()})
    assert (story.status.phase, story.status.job_set_uid) == ("Starting", "js-1")


def test_an_attempt_raised_while_the_run_is_well_stops_nothing(story: Watch) -> None:
    story.see(4, sample=story.page(4, 12))
    story.edit(attempt=2)
    assert story.see(5).actions == ()
    assert (story.status.phase, story.status.attempt) == ("Running", 2)
    assert story.status.attempts[0].reason == "Superseded"


def test_a_pause_goes_on_into_the_next_attempt_and_ends_there(story: Watch) -> None:
    story.edit(suspend=True)
    assert kinds(story.see(4)) == ["SetSuspend"]
    story.see(5, **story.launched(suspended=True) | {"pods": ()})
    assert story.condition("Suspended") == ("True", "SuspendRequested")
    story.edit(suspend=True, attempt=2)
    assert story.see(6).actions == ()
    assert story.status.phase == "Suspended"
    story.edit(suspend=False)
    assert story.see(7).actions == (SetSuspend("js-1", False, "Resuming"),)


def test_a_jobset_that_its_launcher_suspended_is_left_to_them(scene: Any) -> None:
    story = Watch(scene)
    story.see(0, **story.launched(suspended=True) | {"pods": ()})
    assert story.see(1).actions == ()
    assert story.status.phase == "Queued"


@pytest.mark.parametrize("seen", ["gone", "deleting", "another"])
def test_a_jobset_that_is_gone_or_another_one_cancels_the_run(story: Watch, seen: str) -> None:
    world: dict[str, dict[str, Any]] = {
        "gone": {"jobset": None, "pods": ()},
        "deleting": story.launched(deleting=True),
        "another": story.launched(uid="js-2") | {"pods": ()},
    }
    plan = story.see(4, **world[seen])
    assert plan.actions == ()
    assert story.status.phase == "Cancelled"
    story.see(5, **story.launched(uid="js-2") | {"pods": ()})
    assert story.status.phase == "Cancelled"
    story.edit(attempt=2)
    story.see(6)
    assert (story.condition("Created"), story.status.job_set_uid) == (
        ("True", "JobSetFound"),
        "js-2",
    )


def test_a_halt_is_not_enforced_on_another_jobset_of_the_name(halted: Watch) -> None:
    plan = halted.see(6, **halted.launched(uid="js-2"))
    assert (plan.actions, halted.status.phase) == ((), "Halted")
    halted.edit(attempt=2)
    assert halted.see(7).actions == ()
    halted.see(8)
    assert (halted.status.job_set_uid, halted.condition("Suspended")) == ("js-2", None)


def test_it_completes_and_fails_with_its_jobset_and_in_its_words(story: Watch) -> None:
    failed = story.launched(terminal="Failed", failure_reason="FailedJobs", failure="one did")
    story.see(4, **failed | {"pods": ()})
    (condition,) = (c for c in story.status.conditions if c.type == "Failed")
    assert (condition.reason, condition.message) == ("JobSetFailed", "FailedJobs: one did")
    story.edit(attempt=2)
    story.see(5)
    assert story.status.phase == "Failed", "nothing can be let go on"
    story.edit(attempt=3)
    story.see(6, **story.launched(uid="js-2"))
    story.see(7, **story.launched(uid="js-2", terminal="Completed") | {"pods": ()})
    assert story.status.phase == "Complete"


def test_exit_codes_and_restarts_of_a_live_jobset_are_its_launchers(
    scene: Any, story: Watch
) -> None:
    story.see(4, pods=(replace(scene.exited(2), created=scene.at(1)), story.made(1)[1]))
    for count in range(1, 6):
        story.see(10 * count, **story.launched(restarts=count) | {"pods": ()})
    assert story.status.phase == "Restarting"
    assert story.status.restarts == 5
    early = Watch(scene)
    early.see(1, **early.launched(restarts=4))
    early.see(2)
    assert early.status.restarts == 0, "those from before the run watched"


def test_the_metrics_port_is_the_specs_then_the_pods_then_the_trainers(story: Watch) -> None:
    pod = replace(story.made(1)[0], metrics_port=0)
    assert metrics_port_of(story.run, pod) == 9464
    assert metrics_port_of(story.run, replace(pod, metrics_port=9500)) == 9500
    story.edit(watch={"jobSet": "xpk-run", "metricsPort": 9600})
    assert metrics_port_of(story.run, replace(pod, metrics_port=9500)) == 9600


def test_of_a_spec_that_cannot_be_read_the_watched_jobset_is_known(story: Watch) -> None:
    manifest = story.scene.manifest(**WATCH, elastic=True)
    manifest["status"] = {"attempt": 1, "jobSetUID": "js-1", "phase": "Running"}
    view = view_run(manifest)
    assert view.problem is not None
    assert view.run is not None
    story.run = view.run
    plan = story.scene.reconcile(
        story.scene.observed(view.run, **story.launched(), spec_error=view.problem)
    )
    assert plan.status.phase == "Running"
    assert plan.actions == ()


def test_a_foreign_jobset_and_its_pods_are_read_by_jobsets_own_labels() -> None:
    job = {"replicas": 2, "template": {"spec": {"parallelism": 4}}}
    labels = {"kueue.x-k8s.io/queue-name": "multislice-queue"}
    jobset = view_jobset({
        "metadata": {"name": "xpk-run", "uid": "js-1", "labels": labels},
        "spec": {"replicatedJobs": [job, {"template": {"spec": {}}}]},
    })  # fmt: skip
    assert (jobset.owner, jobset.attempt, jobset.queue, jobset.hosts) == (
        None,
        0,
        "multislice-queue",
        9,
    )
    pod = view_pod({
        "metadata": {
            "name": "xpk-run-slice-job-0-0-abcde",
            "creationTimestamp": "2026-11-30T09:00:00Z",
            "labels": {
                "jobset.sigs.k8s.io/jobset-name": "xpk-run",
                "jobset.sigs.k8s.io/jobset-uid": "js-1",
            },
        },
        "spec": {"hostNetwork": True},
    })  # fmt: skip
    assert (pod.job_set, pod.job_set_uid, pod.attempt) == ("xpk-run", "js-1", 0)
    assert pod.created is not None
    assert pod.created.isoformat() == "2026-11-30T09:00:00+00:00"
