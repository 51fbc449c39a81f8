"""What status keeps of an attempt that was halted or failed."""

import json
from dataclasses import replace
from typing import Any

from ling_operator.api import Evidence, TrainingRun, dump
from ling_operator.bounded_text import last_lines
from ling_operator.evidence import ENDS_KEPT, LOG_BYTES, LOG_LINES
from ling_operator.plan import LogSource, LogTail, Plan, SetSuspend

PAGE_HALT: dict[str, Any] = {"trainerStops": False}


def evidence_of(plan: Plan) -> Evidence:
    evidence = plan.status.attempts[-1].evidence
    assert evidence is not None
    return evidence


def nan_seen(scene: Any, run: TrainingRun, **world: Any) -> Any:
    world = {"jobset": scene.jobset(), "pods": scene.pods(), **world}
    return scene.observed(run, sample=scene.nan_sample(20), **world)


def test_a_halt_asks_for_process_zeros_log_and_is_whole_without_it(scene: Any) -> None:
    observed = nan_seen(scene, scene.running(health=PAGE_HALT))
    plan = scene.reconcile(observed)
    assert plan.read_log == LogSource("ling2-slice-job-0-0-abcde", "pod-0", "jax-tpu")
    assert isinstance(plan.actions[0], SetSuspend)
    assert evidence_of(plan).log_problem == "not read"

    log = LogTail("pod-0", ("step 19", "step 20 loss nan"))
    plan = scene.reconcile(replace(observed, log=log))
    assert plan.read_log is None
    assert isinstance(plan.actions[0], SetSuspend)
    kept = evidence_of(plan)
    assert kept.log == ("step 19", "step 20 loss nan")
    assert (kept.log_pod, kept.log_problem) == ("ling2-slice-job-0-0-abcde", None)


def test_why_there_is_no_log_is_said(scene: Any) -> None:
    run = scene.running(health=PAGE_HALT)
    refused = LogTail("pod-0", problem="pods/log is forbidden")
    plan = scene.reconcile(replace(nan_seen(scene, run), log=refused))
    assert evidence_of(plan).log_problem == "pods/log is forbidden"

    pods = (scene.exited(90, 1, reason="NonFiniteLoss", step=20),)
    plan = scene.reconcile(scene.observed(run, jobset=scene.jobset(), pods=pods))
    assert plan.read_log is None
    assert evidence_of(plan).log_problem == "no pod of process 0 is left"


def test_a_log_is_of_the_newest_process_zero_that_has_started(scene: Any) -> None:
    run = scene.running(health=PAGE_HALT)
    old = scene.pod(0, uid="old", name="old", phase="Failed", exit_code=42)
    new = scene.pod(0, uid="new", name="new", restart_attempt=1)
    pending = scene.pod(0, uid="next", name="next", restart_attempt=2, phase="Pending", ip=None)
    sample = scene.nan_sample(20, pod_uid="new", page_pod_uid="new")
    observed = scene.observed(
        run, jobset=scene.jobset(restarts=1), pods=(old, new, pending), sample=sample
    )
    assert scene.reconcile(observed).read_log == LogSource("new", "new", "jax-tpu")


def test_ends_that_tell_something_are_kept_divergence_first(scene: Any) -> None:
    run = scene.running()
    killed = replace(scene.exited(137, 0), end_reason="OOMKilled")
    said = replace(scene.exited(90, 1, reason="NonFiniteLoss"), message='{"reason": "x"}')
    stopped = scene.pod(2, phase="Failed", exit_code=143)
    plan = scene.reconcile(
        scene.observed(run, jobset=scene.jobset(), pods=(killed, said, stopped))
    )
    ends = evidence_of(plan).ended
    assert [(e.exit_code, e.reason, e.message) for e in ends] == [
        (90, None, '{"reason": "x"}'),
        (137, "OOMKilled", None),
    ]


def test_processes_that_end_after_the_halt_are_added_up_to_the_bound(scene: Any) -> None:
    run = scene.running(health=PAGE_HALT)
    run = scene.after(run, scene.reconcile(nan_seen(scene, run)))
    pods = tuple(replace(scene.exited(90, i), name=f"p{i}", uid=f"p{i}") for i in range(20))
    first = scene.observed(run, jobset=scene.jobset(suspended=True), pods=pods[3:4])
    plan = scene.reconcile(first)
    assert plan.read_log is None, "the log is read once"
    run = scene.after(run, plan)
    plan = scene.reconcile(replace(first, run=run, pods=pods))
    assert plan.read_log is None, "nor for a pod of process 0 that is seen later"
    names = [end.pod for end in evidence_of(plan).ended]
    assert names[0] == "p3", "what was kept stays"
    assert len(names) == ENDS_KEPT
    assert evidence_of(plan).time == scene.now


def test_a_failed_attempt_leaves_evidence_and_a_complete_one_does_not(scene: Any) -> None:
    run = scene.running()
    failed = replace(scene.exited(3, 0, message="no such file"), message="no such file")
    plan = scene.reconcile(scene.observed(run, jobset=scene.jobset(), pods=(failed, scene.pod(1))))
    assert plan.read_log == LogSource(failed.name, "pod-0", "jax-tpu")
    assert evidence_of(plan).ended[0].message == "no such file"

    done = tuple(scene.exited(0, i) for i in range(2))
    plan = scene.reconcile(
        scene.observed(run, jobset=scene.jobset(terminal="Completed"), pods=done)
    )
    assert plan.status.phase == "Complete"
    assert (plan.read_log, plan.status.attempts[-1].evidence) == (None, None)


def test_a_halt_after_a_failure_keeps_the_log_that_was_read_then(scene: Any) -> None:
    run = scene.running()
    failed = scene.jobset(terminal="Failed", failure_reason="ReachedMaxRestarts")
    crash = replace(scene.exited(1, 1), name="crashed")
    seen = scene.observed(
        run, jobset=failed, pods=(scene.pod(0), crash), log=LogTail("pod-0", ("the trace",))
    )
    run = scene.after(run, scene.reconcile(seen))
    assert run.status.phase == "Failed"
    late = (crash, replace(scene.exited(90, 0), gone=True))
    plan = scene.reconcile(scene.observed(run, jobset=failed, pods=late))
    assert plan.status.phase == "Halted"
    assert evidence_of(plan).log == ("the trace",)
    assert [end.exit_code for end in evidence_of(plan).ended] == [1, 90]


def test_ten_attempts_that_said_all_they_could_fit_into_forty_kilobytes(scene: Any) -> None:
    run = scene.running(health=PAGE_HALT)
    for attempt in range(1, 12):
        uid = f"js-{attempt}"
        crash = {"host": "h" * 63, "message": "m" * 512, "end_reason": "OOMKilled"}
        crash |= {"job_set_uid": uid, "attempt": attempt}
        pods = tuple(
            replace(scene.exited(90, i), name=f"{'n' * 60}-{i}", **crash) for i in range(64)
        )
        log = LogTail("pod-0", last_lines("\u20ac" * 40_000, lines=LOG_LINES, limit=LOG_BYTES))
        jobset = scene.jobset(uid=uid, attempt=attempt)
        run = scene.after(
            run, scene.reconcile(scene.observed(run, jobset=jobset, pods=pods, log=log))
        )
        spec = run.spec.model_copy(update={"attempt": attempt + 1})
        run = run.model_copy(update={"spec": spec})
        run = scene.after(run, scene.reconcile(scene.observed(run)))
    assert len(run.status.attempts) == 10
    size = len(json.dumps(dump(run.status)["attempts"], ensure_ascii=False).encode())
    assert 20_000 < size < 40_000


def test_only_the_newest_attempts_keep_their_evidence_in_full(scene: Any) -> None:
    run = scene.running(health=PAGE_HALT)
    for attempt in range(1, 6):
        uid = f"js-{attempt}"
        pods = tuple(
            replace(scene.exited(90, i), name=f"a{attempt}-{i}", attempt=attempt, job_set_uid=uid)
            for i in range(2)
        )
        jobset = scene.jobset(uid=uid, attempt=attempt)
        log = LogTail("pod-0", (f"attempt {attempt}",))
        seen = scene.observed(run, jobset=jobset, pods=pods, log=log)
        run = scene.after(run, scene.reconcile(seen))
        assert run.status.phase == "Halted"
        spec = run.spec.model_copy(update={"attempt": attempt + 1})
        run = run.model_copy(update={"spec": spec})
        run = scene.after(run, scene.reconcile(scene.observed(run)))
    kept = [a.evidence for a in run.status.attempts[:-1]]
    assert [e.log for e in kept if e is not None] == [
        (),
        (),
        (),
        ("attempt 4",),
        ("attempt 5",),
    ]
    assert [len(e.ended) for e in kept if e is not None] == [1, 1, 1, 2, 2]
    assert kept[0] is not None
    assert kept[0].log_problem == "left out: the attempt is an old one"
