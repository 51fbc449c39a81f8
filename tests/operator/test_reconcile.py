"""One observation, one plan: a table whose rows say why they exist, from creation to the end."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ling_operator.api import TrainingRun
from ling_operator.plan import CreateJobSet, DeleteJobSet, Observed, Plan, SetSuspend
from ling_operator.views import Owner

type Facts = dict[str, tuple[str, str]]
WORDS = {"reason": "NonFiniteLoss", "step": 12, "last_finite_step": 11, "value": "nan"}


@dataclass(frozen=True)
class Row:
    """What is seen, what is wanted, and why the row exists."""

    reason: str
    observed: Callable[[Any], Observed]
    phase: str
    actions: tuple[str, ...] = ()
    conditions: Facts | None = None
    says: str = ""
    """Part of the message of the first of `conditions`."""


def act(plan: Plan) -> tuple[str, ...]:
    names = {CreateJobSet: "create", DeleteJobSet: "delete"}
    return tuple(
        ("suspend" if action.suspend else "resume")
        if isinstance(action, SetSuspend)
        else names[type(action)]
        for action in plan.actions
    )


def world(scene: Any, run: TrainingRun, **rest: Any) -> Observed:
    return scene.observed(run, **({"jobset": scene.jobset(), "pods": scene.pods()} | rest))


def foreign_owner(**changes: Any) -> Owner:
    owner = Owner(api_version="apps/v1", kind="Deployment", name="other", uid="other-uid")
    return replace(owner, **changes)


CREATION = [
    Row(
        "A new object gets its JobSet.",
        lambda s: s.observed(s.run()),
        "Pending",
        ("create",),
        {"Created": ("False", "Creating")},
    ),
    Row(
        "The JobSet is there: attempt 1 has started.",
        lambda s: world(s, s.after(s.run(), s.reconcile(s.observed(s.run())))),
        "Running",
        (),
        {"Created": ("True", "JobSetCreated"), "PodsReady": ("True", "PodsRunning")},
    ),
    Row(
        "A JobSet that was made just before the operator died is taken over.",
        lambda s: world(s, s.run(), pods=()),
        "Starting",
        (),
        {"Created": ("True", "JobSetCreated")},
    ),
    Row(
        "A suspended object is not started, and can still be edited.",
        lambda s: s.observed(s.run(suspend=True)),
        "Suspended",
        (),
        {"Created": ("False", "NotStarted")},
    ),
    Row(
        "A setting that the trainer would refuse starts nothing and names the field.",
        lambda s: s.observed(s.run(run=s.settings | {"stepz": 3})),
        "Pending",
        (),
        {"Created": ("False", "InvalidConfig")},
        "stepz is not a setting; did you mean steps?",
    ),
    Row(
        "A spec of a newer CRD starts nothing.",
        lambda s: s.observed(s.run(), spec_error="spec.elastic is not a field"),
        "Pending",
        (),
        {"Created": ("False", "InvalidConfig")},
        "spec.elastic is not a field",
    ),
    Row(
        "A refused POST is said in a condition, and tried again.",
        lambda s: s.observed(s.run(), create_error="403: jobsets is forbidden"),
        "Pending",
        ("create",),
        {"Created": ("False", "CreateFailed")},
        "403: jobsets is forbidden",
    ),
    Row(
        "Somebody else's JobSet of this name is left alone.",
        lambda s: s.observed(s.run(), jobset=s.jobset(owner=foreign_owner())),
        "Pending",
        (),
        {"Created": ("False", "NameConflict")},
        "belongs to Deployment other",
    ),
    Row(
        "xpk's JobSet has no owner at all: left alone too.",
        lambda s: s.observed(s.run(), jobset=s.jobset(owner=None)),
        "Pending",
        (),
        {"Created": ("False", "NameConflict")},
        "belongs to nobody",
    ),
    Row(
        "A deleted object of the same name still has its JobSet: wait for the collector.",
        lambda s: s.observed(
            s.run(),
            jobset=s.jobset(owner=replace(s.jobset().owner, uid="old-uid")),
        ),
        "Pending",
        (),
        {"Created": ("False", "WaitingForPrevious")},
    ),
    Row(
        "Its JobSet is gone but a pod still writes.",
        lambda s: s.observed(s.run(), pods=(s.pod(job_set_uid="old", deleting=True),)),
        "Pending",
        (),
        {"Created": ("False", "WaitingForPrevious")},
        "ling2-slice-job-0-0-abcde",
    ),
    Row(
        "Its pods have ended but a Job is left that could make new ones.",
        lambda s: s.observed(
            s.run(), jobs=("ling2-slice-job-0",), pods=(s.pod(job_set_uid="old", gone=True),)
        ),
        "Pending",
        (),
        {"Created": ("False", "WaitingForPrevious")},
        "ling2-slice-job-0",
    ),
    Row(
        "Evidence of an earlier attempt is no pod that lives.",
        lambda s: s.observed(s.run(), pods=(replace(s.exited(90, **WORDS), job_set_uid="old"),)),
        "Pending",
        ("create",),
        {"Created": ("False", "Creating")},
    ),
]

RUNNING = [
    Row(
        "All pods run.",
        lambda s: world(s, s.running()),
        "Running",
        (),
        {"PodsReady": ("True", "PodsRunning"), "Healthy": ("Unknown", "NoSampleYet")},
    ),
    Row(
        "One host is not there yet.",
        lambda s: world(s, s.running(), pods=(s.pod(0),)),
        "Starting",
        (),
        {"PodsReady": ("False", "PodsPending")},
        "1 of 2 pods run.",
    ),
    Row(
        "The first pod that cannot run says why: the others of a slice wait for it.",
        lambda s: world(
            s,
            s.running(),
            pods=(
                s.pod(1, phase="Pending", ready=False, problem="ImagePullBackOff: x"),
                s.pod(0, phase="Pending", ready=False, problem="Unschedulable: 0/8 nodes"),
            ),
        ),
        "Starting",
        (),
        {"PodsReady": ("False", "PodsPending")},
        "0 of 2 pods run. ling2-slice-job-0-0-abcde: Unschedulable: 0/8 nodes",
    ),
    Row(
        "A pod on a lost node keeps the restart waiting: nobody else says so.",
        lambda s: world(
            s, s.running(), pods=(s.pod(0, deleting=True, ends_by=s.at(-31)), s.pod(1))
        ),
        "Restarting",
        (),
        {"PodsReady": ("False", "PodsPending")},
        "abcde: was to end by 2026-11-30T08:59:29Z; is its node node-0 lost?",
    ),
    Row(
        "A side container outlives its trainer: the JobSet sees neither an end nor a failure.",
        lambda s: world(s, s.running(), pods=(s.pod(0), s.pod(1, ready=False, exit_code=42))),
        "Starting",
        (),
        {"PodsReady": ("False", "PodsPending")},
        "1-abcde: its trainer ended with 42, but other containers of it still run.",
    ),
    Row(
        "A pod within its grace writes a checkpoint.",
        lambda s: world(
            s, s.running(), pods=(s.pod(0, deleting=True, ends_by=s.at(-29)), s.pod(1))
        ),
        "Restarting",
        (),
        {"PodsReady": ("False", "PodsPending")},
    ),
    Row(
        "So does one of an earlier attempt, and of an earlier run of the name.",
        lambda s: s.observed(
            s.run(), pods=(s.pod(0, job_set_uid="js-0", deleting=True, ends_by=s.at(-60)),)
        ),
        "Pending",
        (),
        {"Created": ("False", "WaitingForPrevious")},
        "is its node node-0 lost?",
    ),
    Row(
        "A page shows where the run is.",
        lambda s: world(s, s.running(), sample=s.sample(12)),
        "Running",
        (),
        {
            "Healthy": ("True", "Healthy"),
            "MetricsAvailable": ("True", "Scraped"),
            "Progressing": ("True", "StepAdvanced"),
        },
    ),
    Row(
        "Process 0 has finished before its peer: the JobSet says when the run is complete.",
        lambda s: world(s, s.running(), pods=(s.exited(0), s.pod(1))),
        "Running",
    ),
    Row(
        "No page for many intervals is no evidence of anything but itself.",
        lambda s: world(s, s.running(-300), scrape_problem="connection refused"),
        "Running",
        (),
        {
            "MetricsAvailable": ("False", "MetricsMissing"),
            "Healthy": ("Unknown", "NoSampleYet"),
        },
        "connection refused",
    ),
    Row(
        "On the node's network a page of another pod is not this run's.",
        lambda s: world(
            s,
            s.running(template={"hostNetwork": True}),
            pods=s.pods(host_network=True),
            sample=s.nan_sample(12, page_pod_uid="pod-of-another-run"),
        ),
        "Running",
        (),
        {"Healthy": ("Unknown", "NoSampleYet")},
    ),
    Row(
        "There, a page that does not say whose it is counts for nobody.",
        lambda s: world(
            s,
            s.running(template={"hostNetwork": True}),
            pods=s.pods(host_network=True),
            sample=s.nan_sample(12, page_pod_uid=None),
        ),
        "Running",
        (),
        {"Healthy": ("Unknown", "NoSampleYet")},
    ),
    Row(
        "With an address of its own, a foreign trainer's page counts without the series.",
        lambda s: world(s, s.running(), sample=s.nan_sample(12, page_pod_uid=None)),
        "Halted",
        ("suspend",),
    ),
    Row(
        "A page of an earlier attempt's pod is not this attempt's.",
        lambda s: world(s, s.running(), sample=s.nan_sample(12, pod_uid="pod-of-attempt-0")),
        "Running",
        (),
        {"Healthy": ("Unknown", "NoSampleYet")},
    ),
    Row(
        "A lost peer: the JobSet makes new pods.",
        lambda s: world(s, s.running(), pods=(s.exited(42), s.pod(1, deleting=True))),
        "Restarting",
    ),
    Row(
        "The pods of restart 1 are coming up.",
        lambda s: world(
            s,
            s.running(),
            jobset=s.jobset(restarts=1),
            pods=(s.pod(uid="pod-0b", restart_attempt=1, phase="Pending", ready=False),),
        ),
        "Restarting",
    ),
    Row(
        "Somebody suspended the JobSet, not the object: theirs to undo.",
        lambda s: world(s, s.running(), jobset=s.jobset(suspended=True), pods=()),
        "Queued",
    ),
]

ENDINGS = [
    Row(
        "A NaN on the page halts: intent in the status, then the act.",
        lambda s: world(s, s.running(), sample=s.nan_sample(12)),
        "Halted",
        ("suspend",),
        {"Halted": ("True", "NonFiniteLoss"), "Healthy": ("False", "NonFiniteLoss")},
        "From step 12 on the loss is nan",
    ),
    Row(
        "Exit code 90 of any pod halts, with what it said.",
        lambda s: world(s, s.running(), pods=(s.pod(0), s.exited(90, 1, **WORDS))),
        "Halted",
        ("suspend",),
        {"Halted": ("True", "NonFiniteLoss")},
        "The trainer on node-1 stopped itself at step 12: nan.",
    ),
    Row(
        "A pod that is gone still counts: its exit code was in the watch event.",
        lambda s: world(s, s.running(), pods=(replace(s.exited(90, **WORDS), gone=True),)),
        "Halted",
        ("suspend",),
        {"Halted": ("True", "NonFiniteLoss")},
    ),
    Row(
        "90 without a message is a halt all the same.",
        lambda s: world(s, s.running(), pods=(s.exited(90), s.pod(1))),
        "Halted",
        ("suspend",),
        {"Halted": ("True", "Diverged")},
    ),
    Row(
        "A message that no condition can hold as a reason does not break the write.",
        lambda s: world(s, s.running(), pods=(s.exited(90, reason="not a word!"),)),
        "Halted",
        ("suspend",),
        {"Halted": ("True", "Diverged")},
    ),
    Row(
        "The peer's 134 killed the Job first: the run diverged nevertheless.",
        lambda s: world(
            s,
            s.running(),
            jobset=s.jobset(restarts=1),
            pods=(s.exited(134), s.exited(90, 1, **WORDS)),
        ),
        "Halted",
        ("suspend",),
        {"Halted": ("True", "NonFiniteLoss")},
    ),
    Row(
        "A JobSet that has failed needs no suspending.",
        lambda s: world(
            s,
            s.running(),
            jobset=s.jobset(terminal="Failed"),
            pods=(s.exited(90, **WORDS), s.pod(1, deleting=True)),
        ),
        "Halted",
        (),
        {"Halted": ("True", "NonFiniteLoss")},
    ),
    Row(
        "Alert only tells.",
        lambda s: world(
            s,
            s.running(health={"nonFinite": {"action": "Alert"}}),
            sample=s.nan_sample(12),
        ),
        "Running",
        (),
        {"Healthy": ("False", "NonFiniteLoss")},
    ),
    Row(
        "Ignore looks away.",
        lambda s: world(
            s,
            s.running(health={"nonFinite": {"action": "Ignore"}}),
            sample=s.nan_sample(12),
        ),
        "Running",
        (),
        {"Healthy": ("True", "Healthy")},
    ),
    Row(
        "One bad step below the threshold goes on.",
        lambda s: world(
            s,
            s.running(health={"nonFinite": {"consecutiveSteps": 3}}),
            sample=s.nan_sample(12),
        ),
        "Running",
        (),
        {"Healthy": ("True", "Healthy")},
    ),
    Row(
        "All processes ended with 0.",
        lambda s: world(
            s,
            s.running(),
            jobset=s.jobset(terminal="Completed"),
            pods=(s.exited(0), s.exited(0, 1)),
            sample=s.sample(198),
        ),
        "Complete",
        (),
        {"Complete": ("True", "Finished")},
    ),
    *(
        Row(
            f"Exit code {code} is final: no restart can help.",
            lambda s, code=code: world(s, s.running(), pods=(s.exited(code), s.pod(1))),
            "Failed",
            ("suspend",),
            {"Failed": ("True", reason)},
            f"ended with {code}",
        )
        for code, reason in (
            (2, "ConfigurationError"),
            (3, "DataError"),
            (4, "CheckpointError"),
            (5, "MetricsPortTaken"),
        )
    ),
    Row(
        "A host was taken away: the Job ignores what its trainer made of that, and so do we.",
        lambda s: world(
            s, s.running(), pods=(replace(s.exited(4), disrupted=True), s.pod(0), s.pod(1))
        ),
        "Running",
    ),
    Row(
        "A host was taken away, and its trainer had diverged.",
        lambda s: world(s, s.running(), pods=(replace(s.exited(90), disrupted=True), s.pod(1))),
        "Halted",
        ("suspend",),
    ),
    Row(
        "The trainer's own reason and sentence are better than ours.",
        lambda s: world(
            s,
            s.running(),
            pods=(s.exited(3, reason="TruncatedFile", message="corpus.bin ends at byte 12"),),
        ),
        "Failed",
        ("suspend",),
        {"Failed": ("True", "TruncatedFile")},
        "corpus.bin ends at byte 12",
    ),
    Row(
        "A reason that no event has a place for would keep the failure from being told.",
        lambda s: world(s, s.running(), pods=(s.exited(3, reason="R" * 129),)),
        "Failed",
        ("suspend",),
        {"Failed": ("True", "DataError")},
    ),
    Row(
        "Of two final codes the lowest process's is told, in whatever order pods are seen.",
        lambda s: world(s, s.running(), pods=(s.exited(3, 1), s.exited(2, 0))),
        "Failed",
        ("suspend",),
        {"Failed": ("True", "ConfigurationError")},
    ),
    Row(
        "The budget of crashes is spent.",
        lambda s: world(
            s,
            s.running(),
            jobset=s.jobset(terminal="Failed", failure_reason="ReachedMaxRestarts", failure="3"),
            pods=(s.exited(1),),
        ),
        "Failed",
        (),
        {"Failed": ("True", "RestartsExhausted")},
    ),
    Row(
        "The JobSet failed for a reason of its own.",
        lambda s: world(
            s, s.running(), jobset=s.jobset(terminal="Failed", failure="deadline"), pods=()
        ),
        "Failed",
        (),
        {"Failed": ("True", "JobSetFailed")},
        "deadline",
    ),
    Row(
        "Somebody deleted the JobSet: cancelled, never made anew.",
        lambda s: s.observed(s.running()),
        "Cancelled",
        (),
        {"Created": ("False", "JobSetDeleted")},
    ),
    Row(
        "Its deletion has begun, which nobody can stop: its pods leave, and that is no restart.",
        lambda s: world(
            s, s.running(), jobset=s.jobset(deleting=True), pods=s.pods(deleting=True)
        ),
        "Cancelled",
        (),
        {"Created": ("False", "JobSetDeleted")},
    ),
    Row(
        "A new JobSet of the name, by somebody else, is not ours.",
        lambda s: s.observed(s.running(), jobset=s.jobset(uid="js-x", owner=foreign_owner())),
        "Cancelled",
        (),
        {"Created": ("False", "JobSetDeleted")},
    ),
    Row(
        "Somebody changed a label of the JobSet: it is the attempt's all the same, and watched.",
        lambda s: world(s, s.running(), jobset=s.jobset(attempt=0), sample=s.nan_sample(12)),
        "Halted",
        ("suspend",),
        {"Halted": ("True", "NonFiniteLoss")},
    ),
    Row(
        "An object that is being deleted is left to the garbage collector.",
        lambda s: world(s, deleted(s, s.running()), sample=s.nan_sample(12)),
        "Running",
    ),
]


def deleted(scene: Any, run: TrainingRun) -> TrainingRun:
    metadata = run.metadata.model_copy(update={"deletion_timestamp": scene.now})
    return run.model_copy(update={"metadata": metadata})


@pytest.mark.parametrize("row", CREATION + RUNNING + ENDINGS, ids=lambda row: row.reason)
def test_plan(scene: Any, row: Row) -> None:
    plan = scene.reconcile(row.observed(scene))
    got = {c.type: (c.status, c.reason) for c in plan.status.conditions}
    want = row.conditions or {}
    assert (plan.status.phase, act(plan)) == (row.phase, row.actions), f"got {got}"
    assert {kind: got.get(kind) for kind in want} == want
    if row.says:
        message = next(c.message for c in plan.status.conditions if c.type == next(iter(want)))
        assert row.says in message
