"""The whole story once: apply, train, diverge, halt, resume, finish, delete. Real trainers."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from lingcluster import operator_process
from lingcluster.audit import AuditLog
from lingcluster.checkpoint_leaves import inspect_checkpoints
from lingcluster.client import Manifest, find_condition, wait_for
from lingcluster.control_plane import ControlPlane
from lingcluster.journal import kept_checkpoints, step_time
from lingcluster.kubelet import ProcessKubelet
from lingcluster.operator_process import StartOperator
from lingcluster.story import Story
from lingcluster.training_runs import TrainingRuns
from lingcluster.watch import Change, Recording, first_time, terminations

NAME = "ling2-run"
FAULT_STEP = 500  # a checkpoint step as well
STEPS = 540
SCRAPE_SECONDS = 2


@pytest.mark.slow
def test_a_diverging_run_is_halted_and_a_raised_attempt_finishes_it(
    control_plane: ControlPlane,
    namespace: str,
    runs: TrainingRuns,
    start_operator: StartOperator,
    real_run: Callable[..., Manifest],
    kubelet: ProcessKubelet,
    story: Story,
    halt_latencies: dict[str, float],
    audit_log: AuditLog,
    tmp_path: Path,
) -> None:
    def kubectl(*arguments: str, **options: str) -> str:
        return control_plane.kubectl("-n", namespace, *arguments, **options)

    run = real_run(NAME, steps=STEPS)
    run["spec"]["run"]["fault"] = {"enabled": True, "faultStep": FAULT_STEP}
    run["spec"]["health"] = {"scrapeIntervalSeconds": SCRAPE_SECONDS}
    directory = tmp_path / "real" / NAME
    start_operator()
    story.tell("the operator is ready, as its own service account")
    who = runs.client.identity
    with Recording(who, runs.collection) as watch, Recording(who, runs.pods_path) as pods:
        story.tell(kubectl("apply", "-f", "-", input=yaml.safe_dump(run)).strip())
        _follow_the_steps(runs, kubectl, story)
        halted = runs.wait_phase(NAME, "Halted")
        seen = first_time(watch.changes, lambda run: _phase(run) == "Halted")
        runs.wait_no_live_pod(NAME)
        stopped = time.time()
    bad = step_time(directory, FAULT_STEP)
    assert bad is not None
    latency = seen - bad
    halt_latencies["(scrape, the trainer lingers; end to end)"] = latency
    story.tell(f"NaN at step {FAULT_STEP}", at=bad)
    story.tell(f"Halted, {latency:.2f} s after the NaN", at=seen)
    story.tell("no pod lives", at=stopped)
    story.tell(kubectl("get", "trun", NAME))
    assert latency <= 2 * SCRAPE_SECONDS

    _assert_says_why(runs, halted, pods.changes)
    story.tell(f"status.halt: {halted['status']['halt']}")
    assert kubelet.live_processes(namespace) == []
    codes = [end["exitCode"] for end in terminations(pods.changes).values()]
    assert codes == [90, 90]
    story.tell(f"the processes ended with {codes}")
    found = inspect_checkpoints(directory / "checkpoints")
    assert found
    assert {step: each["nonfinite"] for step, each in found.items() if each["nonfinite"]} == {}
    assert max(found) < FAULT_STEP
    assert min(each["leaves"] for each in found.values()) > 20
    story.tell(f"checkpoints {sorted(found)}: every leaf is finite")

    resume_at = max(kept_checkpoints(directory))
    run["spec"]["attempt"] = 2
    run["spec"]["run"]["fault"]["enabled"] = False
    story.tell(kubectl("apply", "-f", "-", input=yaml.safe_dump(run)).strip())
    complete = runs.wait_phase(NAME, "Complete")
    log = kubelet.log(namespace, runs.pod(NAME, 0))
    assert f"restored the checkpoint of step {resume_at}" in log
    assert f" step={resume_at + 1} " in log
    assert f" step={resume_at} " not in log
    assert complete["status"]["training"]["step"] == STEPS
    story.tell(f"attempt 2 went on after step {resume_at}")
    story.tell(kubectl("get", "trun", NAME))

    processes = [started.process for started in kubelet.started(namespace)]
    assert len(processes) == 4
    mine = audit_log.records(user=operator_process.USER)
    assert [record for record in mine if record.code in (401, 403)] == []
    story.tell(f"{len(mine)} requests of the operator, none refused for want of a right")
    kubectl("delete", "trun", NAME)
    _wait_until_gone(runs)
    assert [each for each in processes if each.is_alive()] == []
    wait_for("no process", lambda: not kubelet.live_processes(namespace))
    story.tell("deleted: no JobSet, Job, pod, Service or process is left")


def _follow_the_steps(runs: TrainingRuns, kubectl: Callable[..., str], story: Story) -> None:
    """Read `kubectl get trun` while it says Running; STEP has to rise."""
    runs.wait_step(NAME, 1)
    rows: list[list[str]] = []
    while (row := kubectl("get", "trun", NAME, "--no-headers").split())[1] == "Running":
        if row[:-1] not in [seen[:-1] for seen in rows]:
            story.tell(" ".join(row))
            rows.append(row)
        time.sleep(0.2)
    steps = [int(row[2]) for row in rows]
    assert len(set(steps)) >= 2, "STEP was seen once"
    assert steps == sorted(steps)
    assert {row[3] for row in rows} == {str(STEPS)}
    assert all(0 < float(row[4]) < 10 for row in rows), "LOSS is a loss"


def _phase(run: Manifest) -> str | None:
    return run.get("status", {}).get("phase")


def _assert_says_why(runs: TrainingRuns, run: Manifest, pods: list[Change]) -> None:
    """The status, a condition and an event give one reason, and where to look."""
    halt = run["status"]["halt"]
    assert (halt["reason"], halt["step"], halt["value"]) == ("NonFiniteLoss", FAULT_STEP, "nan")
    hosts = {change.object["metadata"]["name"]: change.object["spec"] for change in pods}
    (first,) = (spec for name, spec in hosts.items() if name.startswith(f"{NAME}-slice-job-0-0-"))
    assert halt["host"] == first["nodeName"]
    datetime.fromisoformat(halt["time"])
    condition = find_condition(run, "Halted")
    assert condition is not None
    assert (condition["status"], condition["reason"]) == ("True", "NonFiniteLoss")
    events = wait_for(
        "the event", lambda: [e for e in runs.events(NAME) if e["reason"] == "NonFiniteLoss"]
    )
    assert [event["type"] for event in events] == ["Warning"]


def _wait_until_gone(runs: TrainingRuns) -> None:
    namespace = runs.namespace
    for collection in (
        runs.jobsets,
        f"/apis/batch/v1/namespaces/{namespace}/jobs",
        runs.pods_path,
        f"/api/v1/namespaces/{namespace}/services",
        runs.collection,
    ):
        wait_for(
            f"{collection} to be empty",
            lambda path=collection: not runs.client.items(path),
            timeout=60,
        )
