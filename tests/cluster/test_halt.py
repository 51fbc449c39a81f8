"""A NaN halts the run, by the scrape or by exit code 90; and no answer is no NaN."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from lingcluster.checkpoint_leaves import inspect_checkpoints
from lingcluster.client import Manifest, find_condition, has_condition, wait_for
from lingcluster.journal import journal, step_time
from lingcluster.kubelet import ProcessKubelet
from lingcluster.operator_process import OperatorProcess, StartOperator
from lingcluster.port_proxy import PortState
from lingcluster.story import Story
from lingcluster.training_runs import TrainingRuns, shown_step
from lingcluster.watch import Recording, first_time, terminations

FAULT_STEP = 30
NEVER = 3600  # seconds between scrapes: the first one comes before the fault, no second


def at_phase(phase: str) -> Callable[[Manifest], bool]:
    return lambda run: run.get("status", {}).get("phase") == phase


@pytest.mark.slow
def test_two_trainers_that_diverge_end_with_90_and_halt_the_run_without_a_restart(
    runs: TrainingRuns,
    start_operator: StartOperator,
    real_run: Callable[..., Manifest],
    kubelet: ProcessKubelet,
    story: Story,
    halt_latencies: dict[str, float],
    namespace: str,
    tmp_path: Path,
) -> None:
    run = real_run("self", steps=1000)
    run["spec"]["run"] |= {
        "fault": {"enabled": True, "faultStep": FAULT_STEP},
        "metrics": {"metricsLingerSeconds": 0},
    }
    run["spec"]["health"] = {"scrapeIntervalSeconds": NEVER}
    start_operator()
    identity = runs.client.identity
    with Recording(identity, runs.pods_path) as pods, Recording(identity, runs.collection) as seen:
        runs.apply(run)
        status = runs.wait_phase("self", "Halted")["status"]
        runs.wait_no_live_pod("self")
    assert (status["halt"]["reason"], status["halt"]["step"]) == ("NonFiniteLoss", FAULT_STEP)
    assert status["health"].get("nonfiniteSteps", 0) == 0, "no scrape told it"
    ends = terminations(pods.changes)
    assert [end["exitCode"] for end in ends.values()] == [90, 90], "and no third pod"
    assert status["restarts"] == 0
    assert runs.jobset("self")["status"].get("restarts", 0) == 0
    assert kubelet.live_processes(namespace) == []
    bad = step_time(tmp_path / "real" / "self", FAULT_STEP)
    assert bad is not None
    latency = first_time(seen.changes, at_phase("Halted")) - bad
    halt_latencies["(exit code 90, no scrape, no linger)"] = latency
    story.tell(f"Halted {latency:.2f} s after the NaN by exit code 90 alone")


@pytest.mark.slow
def test_a_peer_killed_three_seconds_before_process_0_writes_90_still_ends_halted(
    runs: TrainingRuns,
    start_operator: StartOperator,
    real_run: Callable[..., Manifest],
    kubelet: ProcessKubelet,
    namespace: str,
) -> None:
    run = real_run("peer", steps=1000)
    run["spec"]["run"] |= {
        "fault": {"enabled": True, "faultStep": FAULT_STEP},
        "metrics": {"metricsLingerSeconds": 8},
    }
    run["spec"]["health"] = {"scrapeIntervalSeconds": NEVER}
    start_operator()
    with Recording(runs.client.identity, runs.pods_path) as pods:
        runs.apply(run)
        runs.wait("peer", "two pods", lambda _: len(runs.live_pods("peer")) == 2)
        first, peer = runs.pod("peer", 0), runs.pod("peer", 1)
        wait_for(
            "the peer to diverge",
            lambda: "exit=90" in kubelet.log(namespace, peer),
            timeout=240,
            describe=lambda: kubelet.logs(namespace),
        )
        kubelet.kill9(namespace, peer)  # it only lingers now; process 0 goes in ten seconds
        status = runs.wait_phase("peer", "Halted")["status"]
        runs.wait_no_live_pod("peer")
    ends = terminations(pods.changes)
    assert (ends[peer]["exitCode"], ends[first]["exitCode"]) == (137, 90)
    ended = [datetime.fromisoformat(ends[name]["finishedAt"]) for name in (peer, first)]
    assert (ended[1] - ended[0]).total_seconds() >= 3
    assert (status["halt"]["reason"], status["halt"]["step"]) == ("NonFiniteLoss", FAULT_STEP)
    assert runs.status("peer")["phase"] == "Halted"
    wait_for("the stop to hold", lambda: runs.jobset("peer")["spec"]["suspend"])


@pytest.mark.slow
def test_a_nan_of_one_step_halts_by_the_scrape_alone_while_the_trainer_goes_on(
    runs: TrainingRuns,
    start_operator: StartOperator,
    real_run: Callable[..., Manifest],
    kubelet: ProcessKubelet,
    story: Story,
    halt_latencies: dict[str, float],
    namespace: str,
    tmp_path: Path,
) -> None:
    run = real_run("scraped", steps=100_000)
    run["spec"]["run"]["fault"] = {"enabled": True, "faultStep": FAULT_STEP}
    run["spec"]["health"] = {"scrapeIntervalSeconds": 2, "trainerStops": False}
    start_operator()
    identity = runs.client.identity
    with Recording(identity, runs.pods_path) as pods, Recording(identity, runs.collection) as seen:
        runs.apply(run)
        status = runs.wait_phase("scraped", "Halted")["status"]
        runs.wait_no_live_pod("scraped")
    directory = tmp_path / "real" / "scraped"
    steps = journal(directory)
    assert steps[FAULT_STEP]["learning/loss"] == "NaN"
    assert isinstance(steps[FAULT_STEP + 1]["learning/loss"], float), "the NaN was of one step"
    halt = status["halt"]
    assert (halt["reason"], halt["step"], halt["value"]) == ("NonFiniteLoss", FAULT_STEP, "nan")
    assert status["health"]["nonfiniteSteps"] == 1
    assert [end["exitCode"] for end in terminations(pods.changes).values()] == [143, 143]
    assert kubelet.live_processes(namespace) == []
    found = inspect_checkpoints(directory / "checkpoints")
    assert [each for each in found.values() if each["nonfinite"]] == []
    bad = step_time(directory, FAULT_STEP)
    assert bad is not None
    latency = first_time(seen.changes, at_phase("Halted")) - bad
    halt_latencies["(scrape every 2 s, trainerStops: false)"] = latency
    story.tell(f"Halted {latency:.2f} s after the NaN by the scrape alone")
    assert latency <= 4


@pytest.mark.parametrize("state", ["refuse", "hang"])
def test_five_blocked_scrapes_give_no_verdict_and_the_run_goes_on(
    state: PortState,
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    kubelet: ProcessKubelet,
    namespace: str,
) -> None:
    operator = start_operator()
    runs.apply(scripted_run("blocked", env={"STEP_SECONDS": "0.1"}))
    before = runs.wait_step("blocked", 1)
    pod = runs.pod("blocked", 0)
    failed = _failed_scrapes(operator)
    kubelet.set_port(namespace, pod, state)
    wait_for(
        "five failed scrapes",
        lambda: _failed_scrapes(operator) >= failed + 5,
        timeout=60,
        describe=lambda: runs.status("blocked"),
    )
    runs.wait_condition("blocked", "MetricsAvailable", "False", "MetricsMissing")
    blocked = runs.get("blocked")
    assert blocked["status"]["phase"] == "Running"
    assert has_condition(blocked, "Healthy")
    assert find_condition(blocked, "Halted") is None
    assert not runs.jobset("blocked")["spec"]["suspend"]
    kubelet.set_port(namespace, pod, "open")
    # The scripted trainer exports a part of the contract: some rules lack their series.
    runs.wait_condition("blocked", "MetricsAvailable", "True", "MetricsMissing")
    run = runs.wait("blocked", "a later step", lambda run: shown_step(run) > before)
    assert run["status"]["restarts"] == 0
    assert runs.pod("blocked", 0) == pod


def _failed_scrapes(operator: OperatorProcess) -> float:
    """Sum the operator's own count of scrapes that gave no page."""
    pattern = r'^ling_operator_scrapes_total\{result="(?!ok")\w+"\} (\S+)$'
    return sum(map(float, re.findall(pattern, operator.metrics(), re.MULTILINE)))
