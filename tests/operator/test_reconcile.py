"""One observation, one plan: a table whose rows say why they exist, from creation to running."""

from dataclasses import replace
from typing import Any

import pytest

from plan_rows import Row, foreign_owner, world
from story import WORDS

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


@pytest.mark.parametrize("row", CREATION + RUNNING, ids=lambda row: row.reason)
def test_plan(scene: Any, row: Row) -> None:
    row.check(scene)
