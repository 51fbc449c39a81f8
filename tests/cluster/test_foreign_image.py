"""A trainer that is not ours, run by spec.command: judged by the series that it has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lingcluster.client import Manifest, find_condition
from lingcluster.operator_process import StartOperator
from lingcluster.sample_runs import training_run, variables
from lingcluster.training_runs import TrainingRuns
from lingcluster.workloads import SHELL_IMAGE

PAGES = {
    "all": "ling_step ling_learning_lm_loss ling_nonfinite_steps_total",
    "gauge": "ling_learning_is_nan",
    "loss": "ling_learning_lm_loss",
}
"""What each trainer exports of the contract."""


def foreign_run(name: str, series: str, nan: Path, repository: Path) -> Manifest:
    """Return a run of the foreign trainer, of one process."""
    trainer = repository / "tests" / "operator" / "foreign_trainer.py"
    env = variables({"SERIES": series, "NAN_FILE": str(nan)})
    return training_run(
        name,
        {
            "image": SHELL_IMAGE,
            "command": [sys.executable, str(trainer)],
            "cpu": {"processes": 1},
            "health": {"scrapeIntervalSeconds": 1},
            "template": {"terminationGracePeriodSeconds": 5, "env": env},
        },
    )


@pytest.mark.slow
def test_a_foreign_trainer_is_halted_by_any_one_series_and_told_which_rules_lack_theirs(
    runs: TrainingRuns, start_operator: StartOperator, repository: Path, tmp_path: Path
) -> None:
    nan = tmp_path / "nan"
    start_operator()
    for name, series in PAGES.items():
        runs.apply(foreign_run(name, series, nan, repository))
    lacking = {name: _lacking(runs, name) for name in PAGES}
    # No step number: no rule that compares steps can be judged.
    for name in ("gauge", "loss"):
        assert "lossSpike (ling_step" in lacking[name]
        assert "stall (ling_step)" in lacking[name]
    assert "nonFinite" not in "".join(lacking.values())
    assert "lossSpike" not in lacking["all"]
    assert "gradNormSpike (ling_learning_raw_grad_norm)" in lacking["all"]
    assert "numZeros (ling_learning_num_zeros, ling_learning_num_grad_elements)" in lacking["all"]
    for name in PAGES:
        run = runs.wait_phase(name, "Running")
        assert find_condition(run, "Healthy")["status"] == "True"  # type: ignore[index]
        assert "MetricsMissing" not in {event["reason"] for event in runs.events(name)}
    nan.touch()
    for name in PAGES:
        halt = runs.wait_phase(name, "Halted")["status"]["halt"]
        assert (halt["reason"], halt["value"]) == ("NonFiniteLoss", "nan")
        assert ("step" in halt) is (name == "all")
        runs.wait_no_live_pod(name)


def _lacking(runs: TrainingRuns, name: str) -> str:
    """Return what the condition says of a run's rules without series."""
    condition = runs.wait_condition(name, "MetricsAvailable", "True", "MetricsMissing")
    return condition["message"].partition("Rules without their series: ")[2]
