"""The user's pause: one checkpoint, the run goes on from it, and no pause fails a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lingcluster.client import Manifest, find_condition
from lingcluster.fault_table import FaultTable
from lingcluster.journal import kept_checkpoints
from lingcluster.kubelet import ProcessKubelet
from lingcluster.operator_process import StartOperator
from lingcluster.sample_runs import training_run
from lingcluster.training_runs import TrainingRuns, shown_step
from lingcluster.watch import Recording, terminations
from lingcluster.workloads import jobset

PAUSES = 5
GRACE_SECONDS = 60  # a busy machine makes 3 s long
SURVIVORS = ("good", "crashing", "xpk-good")
SLOW_END = "trap 'sleep 3; exit {code}' TERM; echo ready; while true; do sleep 0.1; done"


@pytest.mark.slow
def test_a_suspended_run_writes_one_checkpoint_and_a_resumed_one_goes_on_from_it(
    runs: TrainingRuns,
    start_operator: StartOperator,
    real_run: Callable[..., Manifest],
    kubelet: ProcessKubelet,
    namespace: str,
    tmp_path: Path,
) -> None:
    run = real_run("paused", steps=100_000)
    run["spec"]["health"] = {"scrapeIntervalSeconds": 1}
    run["spec"]["restarts"] = 0
    start_operator()
    with Recording(runs.client.identity, runs.pods_path) as pods:
        runs.apply(run)
        runs.wait_step("paused", 1)
        runs.edit("paused", suspend=True)
        runs.wait_phase("paused", "Suspended")
        runs.wait_condition("paused", "Suspended", "True", "SuspendRequested")
        pods.catch_up()
        ends = list(terminations(pods.changes).values())
    assert runs.live_pods("paused") == []
    assert kubelet.live_processes(namespace) == []
    assert [end["exitCode"] for end in ends] == [143, 143]
    (stopped_at,) = {int(json.loads(end["message"])["step"]) for end in ends}
    assert max(kept_checkpoints(tmp_path / "real" / "paused")) == stopped_at

    runs.edit("paused", suspend=False)
    resumed = runs.wait(
        "paused",
        f"a step after {stopped_at}",
        lambda run: run["status"]["phase"] == "Running" and shown_step(run) > stopped_at,
    )
    log = kubelet.log(namespace, runs.pod("paused", 0))
    assert f"restored the checkpoint of step {stopped_at}" in log
    assert f" step={stopped_at + 1} " in log
    assert f" step={stopped_at} " not in log
    condition = find_condition(resumed, "Suspended")
    assert condition is not None
    assert condition["reason"] == "Resumed"
    assert resumed["status"]["restarts"] == 0, "a pause is no restart, and none was allowed"
    assert resumed["status"]["attempt"] == 1


@pytest.mark.slow
def test_five_pauses_of_slow_pods_fail_only_xpks_jobset_whose_trainer_ends_with_1(
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    kubelet: ProcessKubelet,
    faults: FaultTable,
) -> None:
    """Pods that a pause ends are not counted by their Job, but its podFailurePolicy looks at them.

    XPK's rule fails the JobSet for good on 1. Ours have no rule for 1, so a pause is no crash.
    """
    kubelet.timing.stop_delay, kubelet.timing.final_delay = 1.0, 2.0
    start_operator()
    slow = {"SIGTERM_SECONDS": "3"}
    for name, code in (("good", 143), ("crashing", 1)):
        run = scripted_run(name, restarts=0, env={**slow, "SIGTERM_EXIT": str(code)})
        run["spec"]["template"]["terminationGracePeriodSeconds"] = GRACE_SECONDS
        runs.apply(run)
    for name, code in (("xpk-good", 143), ("xpk-crashing", 1)):
        theirs = jobset(
            name,
            SLOW_END.format(code=code),
            grace=GRACE_SECONDS,
            max_restarts=0,
            fail_on_final_codes=True,
        )
        runs.client.create(runs.jobsets, theirs)
        runs.apply(training_run(name, {"watch": {"jobSet": name}}))
    runs.wait_phase("xpk-crashing", "Running")
    began = time.monotonic()
    with Recording(runs.client.identity, runs.pods_path) as pods:
        for _ in range(PAUSES):
            _wait_running(runs, kubelet)
            for name in (*SURVIVORS, "xpk-crashing"):
                runs.edit(name, suspend=True)
            for name in SURVIVORS:
                runs.wait_condition(name, "Suspended", "True", "SuspendRequested")
            for name in (*SURVIVORS, "xpk-crashing"):
                runs.edit(name, suspend=False)
        _wait_running(runs, kubelet)
        pods.catch_up()
        ends = terminations(pods.changes)
    seconds = time.monotonic() - began
    for name, code in (("good", 143), ("crashing", 1), ("xpk-good", 143)):
        run = runs.get(name)
        assert (run["status"]["restarts"], run["status"]["attempt"]) == (0, 1), name
        counted = runs.jobset(name)["status"].get("restartsCountTowardsMax", 0)
        assert counted == 0, "JobSet took no pause for a crash"
        codes = [end["exitCode"] for pod, end in ends.items() if end and pod.startswith(name)]
        assert codes == [code] * 2 * PAUSES

    runs.wait_condition("xpk-crashing", "Failed", "True", "JobSetFailed")
    condition = find_condition(runs.jobset("xpk-crashing"), "Failed")
    assert condition is not None
    assert condition["reason"] == "FailJobSetFailurePolicyAction"
    faults.record(
        "five pauses of pods that take 3 s to end and are reported 1 s late",
        f"{seconds / PAUSES:.1f} s a pause and resume",
        "no restart counted; with XPK's policy a trainer that ends with 1 fails its JobSet",
    )


def _wait_running(runs: TrainingRuns, kubelet: ProcessKubelet) -> None:
    """Wait until all run, and answer SIGTERM: process 1 ignores it until it has a handler."""
    for name in SURVIVORS:
        runs.wait_phase(name, "Running")
    names = [
        pod["metadata"]["name"]
        for pod in runs.client.items(runs.pods_path)
        if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]
    kubelet.wait_for_words(runs.namespace, names)
