"""Local runs end to end: real processes, real signals, real files, a trainer that is not ours."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ling_operator.cli import main

TRAINER = Path(__file__).with_name("contract_trainer.py")


class Runs:
    """Writes a run's file and runs `ling` on it, as a user does."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "run.yaml"
        self.home = directory / "out" / "try"
        self.started: list[subprocess.Popen[str]] = []
        self.manifest: dict[str, Any] = {
            "apiVersion": "ling.primatrix.io/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": "try"},
            "spec": {
                "image": "none",
                "command": ["python", str(TRAINER)],
                "cpu": {"processes": 1},
                "run": {
                    "preset": "ling2_tiny",
                    "dataset_type": "synthetic",
                    "base_output_directory": str(directory / "out"),
                    "steps": 20,
                },
                "health": {"scrapeIntervalSeconds": 1},
                "template": {"env": [], "terminationGracePeriodSeconds": 5},
            },
        }

    @property
    def spec(self) -> dict[str, Any]:
        return self.manifest["spec"]

    def fault(self, **variables: str) -> None:
        self.spec["template"]["env"] = [{"name": k, "value": v} for k, v in variables.items()]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        self.file.write_text(yaml.safe_dump(self.manifest))
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ling_operator.cli",
                "run",
                str(self.file),
                "--local",
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=90)
        return process.returncode, output

    def status(self) -> dict[str, Any]:
        stored: dict[str, Any] = json.loads((self.home / "trainingrun.json").read_text())
        return stored["status"]

    def logs(self) -> dict[str, str]:
        """Return what the trainers said, by attempt-restart-process."""
        files = (self.home / "logs").glob("*.log")
        return {"-".join(re.findall(r"\d+", f.name)): f.read_text() for f in files}

    def trainers(self) -> list[int]:
        """Return the ids of processes that run this run's trainer now."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(self.home).encode() in environment and TRAINER.name.encode() in command:
                found.append(int(entry.name))
        return found


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    for trainer in made.trainers():
        os.kill(trainer, signal.SIGKILL)


def until(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def saved_step(runs: Runs, process: int = 0) -> int:
    return int((runs.home / f"step-{process}").read_text())


def test_a_run_completes_and_says_so_again_without_starting_anything(runs: Runs) -> None:
    runs.spec["cpu"]["processes"] = 2
    code, output = runs.run("steps=10")
    assert code == 0, output
    assert "Complete at step 10" in output
    assert "\x1b" not in output, "colour belongs on a terminal"
    assert set(runs.logs()) == {"1-0-0", "1-0-1"}
    ports = [re.findall(r"on port (\d+)", text)[0] for text in runs.logs().values()]
    assert len(set(ports)) == 2, "each process has a metrics port of its own"

    code, output = runs.run("steps=10")
    assert code == 0
    assert "Complete at step 10" in output
    assert set(runs.logs()) == {"1-0-0", "1-0-1"}


@pytest.mark.slow
def test_a_nan_halts_the_run_until_attempt_is_raised(runs: Runs) -> None:
    runs.fault(NAN_STEP="7")
    code, output = runs.run()
    assert code == 1, output
    assert "Halted: NonFiniteLoss" in output
    assert "step 7" in output
    assert "--attempt 2" in output
    assert runs.trainers() == []
    halt = runs.status()["halt"]
    assert (halt["reason"], halt["step"], halt["value"]) == ("NonFiniteLoss", 7, "nan")
    evidence = runs.status()["attempts"][-1]["evidence"]
    assert evidence["log"][0].startswith("process 0 on port")
    assert {end["exitCode"] for end in evidence["ended"]} <= {90, 137}

    code, output = runs.run()
    assert code == 1
    assert "Halted: NonFiniteLoss" in output
    assert set(runs.logs()) == {"1-0-0"}, "a halted run does not start by itself"

    runs.fault()
    code, output = runs.run()
    assert code == 2
    assert "spec.template" in output
    assert "spec.attempt: 2" in output

    code, output = runs.run("--attempt", "2")
    assert code == 0, output
    assert runs.status()["attempt"] == 2
    code, output = runs.run("--attempt", "1")
    assert code == 2
    assert "spec.attempt=1 is lower than 2" in output


def test_a_nan_seen_only_by_the_scrape_halts_a_trainer_that_does_not_stop_itself(
    runs: Runs,
) -> None:
    runs.spec["health"]["trainerStops"] = False
    runs.fault(NAN_STEP="5", STEP_SECONDS="0.2")
    code, output = runs.run("steps=10000")
    assert code == 1, output
    assert "Halted: NonFiniteLoss" in output
    assert "SIGTERM at step" in runs.logs()["1-0-0"]
    assert runs.trainers() == []


def test_code_42_of_one_process_restarts_all_and_costs_no_restart(runs: Runs) -> None:
    runs.spec["cpu"]["processes"] = 2
    runs.spec["restarts"] = 0
    # Process 0 ends with 42 once; its peer is told to leave and saves where it is.
    runs.fault(EXIT="6:42")
    code, output = runs.run()
    assert code == 0, output
    logs = runs.logs()
    assert "1-1-0" in logs
    assert "1-1-1" in logs, "both start anew"
    assert "from step 6" in logs["1-1-0"]


@pytest.mark.parametrize(("code", "reported"), [(1, 1), (3, 1), (2, 2)])
def test_other_failures_end_the_run_and_show_the_last_lines(
    runs: Runs, code: int, reported: int
) -> None:
    runs.spec["restarts"] = 0
    runs.fault(EXIT=f"4:{code}")
    result, output = runs.run()
    assert result == reported, output
    assert "Failed" in output
    assert f"  ending with {code}" in output
    assert set(runs.logs()) == {"1-0-0"}


def test_a_crash_is_restarted_while_restarts_last(runs: Runs) -> None:
    runs.spec["restarts"] = 1
    runs.fault(EXIT="4:1")
    code, output = runs.run()
    assert code == 0, output
    assert runs.status()["restarts"] == 1


@pytest.mark.slow
def test_control_c_checkpoints_and_the_next_start_goes_on_from_there(runs: Runs) -> None:
    runs.spec["cpu"]["processes"] = 2
    process = runs.start("steps=150")
    until(lambda: len(runs.trainers()) == 2 and len(runs.logs()) == 2, "trainers run")
    until(lambda: all("from step 0" in log for log in runs.logs().values()), "they train")
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1, output
    assert "Suspended" in output
    assert runs.trainers() == []
    left = saved_step(runs)
    assert left > 0
    assert runs.status()["phase"] == "Suspended"

    code, output = runs.run("steps=150")
    assert code == 0, output
    assert f"from step {left}" in runs.logs()["1-0-0"]
    assert runs.status()["restarts"] == 0, "a pause is no restart"


@pytest.mark.slow
def test_a_second_process_is_told_who_holds_the_run(runs: Runs) -> None:
    first = runs.start("steps=10000")
    until(runs.trainers, "the trainer runs")
    code, output = runs.run("steps=10000")
    assert code == 1
    assert f"in use by process {first.pid}" in output
    assert len(runs.trainers()) == 1


@pytest.mark.slow
def test_trainers_checkpoint_when_their_parent_is_killed_and_nobody_enters_before(
    runs: Runs,
) -> None:
    process = runs.start("steps=100")
    until(lambda: "from step 0" in runs.logs().get("1-0-0", ""), "it trains")
    time.sleep(0.5)
    process.kill()
    process.wait()
    until(lambda: not runs.trainers(), "the trainer leaves")
    left = saved_step(runs)
    code, output = runs.run("steps=100")
    assert code == 0, output
    assert any(f"from step {left}" in log for log in runs.logs().values())


@pytest.mark.slow
def test_a_divergence_that_nobody_watched_halts_the_run_at_the_next_start(runs: Runs) -> None:
    runs.fault(NAN_STEP="30", IGNORE_SIGTERM="1")
    process = runs.start("steps=100")
    until(lambda: "from step 0" in runs.logs().get("1-0-0", ""), "it trains")
    process.kill()
    process.wait()
    until(lambda: not runs.trainers(), "the trainer ends by itself")
    code, output = runs.run("steps=100")
    assert code == 1, output
    assert "Halted: NonFiniteLoss" in output
    assert set(runs.logs()) == {"1-0-0"}


@pytest.mark.slow
def test_a_second_control_c_kills_a_trainer_that_will_not_leave(runs: Runs) -> None:
    runs.spec["template"]["terminationGracePeriodSeconds"] = 600
    runs.fault(IGNORE_SIGTERM="1")
    process = runs.start("steps=10000")
    until(lambda: "from step 0" in runs.logs().get("1-0-0", ""), "it trains")
    process.send_signal(signal.SIGINT)
    until(lambda: "SIGTERM at step" in runs.logs()["1-0-0"], "it is asked to leave")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert runs.trainers() == []


@pytest.mark.slow
def test_grace_ends_in_a_kill(runs: Runs) -> None:
    runs.spec["template"]["terminationGracePeriodSeconds"] = 1
    runs.fault(IGNORE_SIGTERM="1")
    process = runs.start("steps=10000")
    until(lambda: "from step 0" in runs.logs().get("1-0-0", ""), "it trains")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert "Suspended" in output
    assert runs.trainers() == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["stepz=3"], "stepz"),
        (["steps=-1"], "steps=-1"),
        (["base_output_directory=gs://bucket/x"], "base_output_directory='gs://bucket/x'"),
        (["num_experts=15"], "n_group=4 does not divide num_experts=15"),
        (["steps"], "no '='"),
    ],
)
def test_a_wrong_setting_ends_with_2_and_names_the_field(
    runs: Runs, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.file.write_text(yaml.safe_dump(runs.manifest))
    with pytest.raises(SystemExit) as ended:
        main(["run", str(runs.file), "--local", *arguments])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
    assert not runs.home.exists()


def test_a_variable_that_only_a_cluster_has_is_refused_by_name(runs: Runs) -> None:
    secret = {"secretKeyRef": {"name": "s", "key": "k"}}
    runs.spec["template"]["env"] = [{"name": "TOKEN", "valueFrom": secret}]
    code, output = runs.run()
    assert code == 2, output
    assert "TOKEN" in output


def test_a_terminal_shows_one_live_row_in_colour(runs: Runs) -> None:
    runs.file.write_text(yaml.safe_dump(runs.manifest))
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ling_operator.cli", "run", str(runs.file), "--local"],
        stdout=child,
        stderr=child,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(child)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal is gone with its last process
        while chunk := os.read(parent, 65536):
            shown += chunk
    os.close(parent)
    assert process.wait(timeout=30) == 0
    assert b"\x1b[" in shown
    assert b"TOKENS/S" in shown
    assert b"Complete at step 20" in shown


@pytest.mark.slow
def test_an_object_for_tpus_runs_as_one_process(runs: Runs) -> None:
    del runs.spec["cpu"]
    runs.spec["tpu"] = {"accelerator": "tpu-v5p-slice", "topology": "2x2x4"}
    code, output = runs.run()
    assert code == 0, output
    assert "one process" in output
    assert set(runs.logs()) == {"1-0-0"}
    code, output = runs.run()
    assert code == 0, output
