"""How real processes end: exit codes, messages, and together."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from ling_trainer.distributed import seen_processes

pytestmark = pytest.mark.slow

NAN_AT_4 = {"fault.enabled": True, "fault_kind": "nan_loss", "fault_step": 4}
MANY = 4000


def test_divergence_ends_both_processes_with_90_at_the_same_step_even_under_sigterm(
    launch, read_back
):
    lingers = {"checkpoint_period": 2, "metrics_linger_seconds": 3}
    run = launch("diverged", NAN_AT_4 | lingers, processes=2)
    run.until("exit=90", process=0)
    run.until("exit=90", process=1)
    with urllib.request.urlopen(run.url()) as page:
        samples = [line.split() for line in page.read().decode().splitlines() if line[0] != "#"]
    counted = {name: float(value) for name, value in samples if "nonfinite_steps_total" in name}
    assert sorted(counted.values()) == [0, 0, 0, 1]
    (name,) = [name for name, value in counted.items() if value]
    assert 'kind="nan"' in name
    assert 'signal="NonFiniteLoss"' in name
    for process in run.popen:
        process.send_signal(signal.SIGTERM)
    assert run.wait() == [90, 90], run.output()
    for process in range(2):
        message = run.message(process)
        assert message["reason"] == message["signal"] == "NonFiniteLoss"
        assert (message["step"], message["lastFiniteStep"]) == ("4", "3")
        assert (message["value"], message["process"]) == ("nan", str(process))
        assert all(isinstance(value, str) for value in message.values())
    # Step 4 was a checkpoint's turn; the save of step 2 was awaited.
    assert read_back.steps(run.run_directory) == [2]


def test_a_peer_killed_while_process_0_lingers_does_not_change_its_90(launch):
    run = launch("peer-killed", NAN_AT_4 | {"metrics_linger_seconds": 3}, processes=2)
    run.until("exit=90", process=0)
    run.popen[1].kill()
    assert run.wait() == [90, 137], run.output()
    assert run.message(0)["reason"] == "NonFiniteLoss"


def test_sigterm_to_one_process_checkpoints_the_same_step_in_both(launch, read_back):
    run = launch("one-told", {"steps": MANY, "checkpoint_period": MANY}, processes=2)
    run.until(r" step=3 ")
    run.popen[1].send_signal(signal.SIGTERM)
    assert run.wait() == [143, 143], run.output()
    steps = {run.message(process)["step"] for process in range(2)}
    assert len(steps) == 1
    assert read_back.steps(run.run_directory) == [int(steps.pop())]


def test_a_lost_peer_asks_for_a_restart(launch):
    run = launch("lost", {"steps": MANY, "enable_checkpointing": False}, processes=2)
    run.until(r" step=3 ")
    run.popen[1].kill()
    codes = run.wait(timeout=180)
    assert codes == [42, 137], run.output()
    assert run.message(0)["reason"] == "LostPeer"


def test_a_wrong_process_count_asks_for_a_restart_and_says_who_was_seen(launch):
    run = launch("missing", {"distributed.start_timeout": 20}, processes=2, expected=3)
    assert run.wait() == [42, 42], run.output()
    assert "expected 3 processes, seen 2 within" in run.message(0)["message"]
    for process in range(2):
        assert run.message(process)["reason"] == "DistributedStartFailed"


def test_a_peer_that_gave_up_first_is_still_counted(launch):
    run = launch("gave-up", {"distributed.start_timeout": 20}, processes=2, expected=3)
    deadline = time.monotonic() + 120
    while seen_processes(run.port) != 2:
        assert time.monotonic() < deadline, run.output()
        time.sleep(0.1)
    time.sleep(6)  # process 0 looks once a second; it gives up long after
    run.popen[1].kill()
    assert run.wait() == [42, 137], run.output()
    assert "expected 3 processes, seen 2 within" in run.message(0)["message"]


def test_sigterm_while_waiting_for_peers_ends_at_once(launch):
    run = launch("waiting", expected=2)
    run.until("metrics=")
    time.sleep(3)  # into jax.distributed.initialize, where no Python handler runs
    run.popen[0].send_signal(signal.SIGTERM)
    assert run.wait(timeout=30) == [143], run.output()
    assert run.message()["reason"] == "Stopped"


def test_a_second_ctrl_c_does_not_wait_for_the_checkpoint(launch):
    run = launch("impatient", {"steps": MANY, "fault.enabled": True, "fault_kind": "hang",
                               "fault_step": 3})  # fmt: skip
    run.until(r" step=2 ")
    run.popen[0].send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert run.popen[0].poll() is None
    run.popen[0].send_signal(signal.SIGINT)
    assert run.wait(timeout=30) == [130], run.output()


def test_trainer_stops_off_counts_the_step_and_goes_on(launch, read_back):
    """The fault falls on a checkpoint step: what is kept is finite, and the save is made up."""
    fault = {"fault.enabled": True, "fault_kind": "nan_gradient", "fault_step": 5}
    run = launch("goes-on", fault | {"trainer_stops": False, "checkpoint_period": 5})
    assert run.wait() == [0], run.output()
    kept = read_back.steps(run.run_directory)
    assert kept == [6, 10]
    for step in kept:
        for name, leaf in read_back.leaves(run.run_directory, step).items():
            assert (abs(leaf) < float("inf")).all(), f"{name} of step {step}"
    journal = read_back.journal(run.run_directory)
    assert journal[4]["learning/raw_grad_norm"] == "NaN"
    assert journal[4]["learning/param_norm"] == journal[3]["learning/param_norm"]


def test_two_bad_steps_in_a_row_are_needed_where_two_are_asked_for(launch):
    fault = NAN_AT_4 | {"fault_kind": "inf_loss", "fault_count": 2}
    run = launch("two-in-a-row", fault | {"non_finite_consecutive_steps": 2})
    assert run.wait() == [90], run.output()
    message = run.message()
    assert (message["step"], message["lastFiniteStep"], message["value"]) == ("5", "3", "inf")


def test_missing_data_ends_with_3(launch, tmp_path):
    run = launch("no-data", {"dataset_path": str(tmp_path / "nothing")})
    assert run.wait() == [3], run.output()
    assert str(tmp_path / "nothing") in run.message()["message"]


def test_a_taken_metrics_port_ends_with_5(launch):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        run = launch("port", {"metrics_port": port})
        assert run.wait() == [5], run.output()
    assert f"port {port} is taken" in run.message()["message"]


def test_an_exception_nobody_expected_is_1_with_its_traceback(launch):
    run = launch("broken", environ={"JAX_PLATFORMS": "no_such_platform"})
    assert run.wait() == [1], run.output()
    assert "Traceback" in run.output()
    assert run.message()["reason"] == "UnexpectedError"


def test_a_relative_output_directory_is_relative_to_where_the_run_was_started(launch, tmp_path):
    settings = launch.settings("relative") | {"base_output_directory": "here", "steps": 2}
    command = [sys.executable, "-m", "ling_trainer"]
    environ = launch.environ() | {"LING_RUN_CONFIG": json.dumps(settings)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "here/relative/checkpoints/2/commit_success.txt").exists()
    assert (tmp_path / "here/relative/metrics.jsonl").exists()
    assert os.listdir(tmp_path / "here") == ["relative"]
