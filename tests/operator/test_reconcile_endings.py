"""One observation, one plan: what halts or ends a run, and what does neither."""

from dataclasses import replace
from typing import Any

import pytest

from ling_operator.api import TrainingRun
from plan_rows import Row, foreign_owner, world
from story import WORDS

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


@pytest.mark.parametrize("row", ENDINGS, ids=lambda row: row.reason)
def test_plan(scene: Any, row: Row) -> None:
    row.check(scene)
