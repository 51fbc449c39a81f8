"""Evaluation of a real run: it changes no bit of it, and gives way to SIGTERM."""

import signal

import pytest

from ling_trainer.health_metrics import EVALUATED

pytestmark = pytest.mark.slow


def test_a_run_that_is_evaluated_and_stopped_in_an_evaluation_ends_as_one_never_disturbed(
    launch, read_back, dataset, uninterrupted, many_steps
):
    paths = {"dataset_path": None, "train_data_path": dataset, "valid_data_path": dataset}
    settings = paths | {"steps": many_steps, "eval_interval": 20, "eval_steps": 100}
    first = launch("evaluated", settings)
    first.until(r" step=40 ")
    first.popen[0].send_signal(signal.SIGTERM)
    assert first.wait() == [143], first.output()
    assert "the evaluation of step 40 gives way to a signal" in first.output()
    assert first.message()["step"] == "41"
    assert read_back.steps(first.run_directory)[-1] == 41

    second, plain = launch("evaluated", settings), uninterrupted(1)
    assert second.wait() == [0], second.output()
    hashes = [read_back.hashes(run.run_directory, many_steps) for run in (second, plain)]
    assert hashes[0] == hashes[1]
    journals = [read_back.journal(run.run_directory) for run in (second, plain)]
    losses = [[(x["step"], x["learning/loss"]) for x in journal] for journal in journals]
    assert losses[0] == losses[1]

    keys = {str(metric.log_key) for metric in EVALUATED}
    assert [line["step"] for line in journals[0] if keys <= line.keys()] == [20, 60]
    assert [line["step"] for line in journals[0] if keys & line.keys()] == [20, 60]
    early, late = (journals[0][step - 1]["eval/lm_loss"] for step in (20, 60))
    assert 6.2 > early > late > 3.0  # a uniform guess is ln(512) = 6.2
    assert f"eval_step=60 eval_lm_loss={late:.6f} " in second.output()
