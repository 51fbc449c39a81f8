"""`ling` and `kubectl ling` on live runs: the table, logs over a restart, the debug bundle."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from lingcluster.client import Manifest
from lingcluster.control_plane import ControlPlane
from lingcluster.kubelet import ProcessKubelet
from lingcluster.operator_process import StartOperator
from lingcluster.training_runs import TrainingRuns

PLUGIN = f"""#!{sys.executable}
import sys
from ling_operator.cli import main
sys.argv[0] = __file__
main()
"""


@dataclass
class Plugin:
    """The real kubectl with the plugin on its PATH, and a user's kubeconfig."""

    binary: Path
    environment: dict[str, str]
    directory: Path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.binary, "ling", *arguments],
            env=self.environment,
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: str, code: int = 0) -> str:
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=60)
        assert process.returncode == code, out + err
        return out if code == 0 else err


@pytest.fixture
def ling(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Plugin:
    folder = tmp_path / "bin"
    folder.mkdir()
    plugin = folder / "kubectl-ling"
    plugin.write_text(PLUGIN)
    plugin.chmod(0o755)
    kubeconfig = control_plane.identity("admin").write_kubeconfig(
        tmp_path / "kubeconfig", namespace=namespace
    )
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "KUBECONFIG": str(kubeconfig),
        "HOME": str(tmp_path),
    }
    return Plugin(control_plane.kubectl.binary, environment, tmp_path)


@pytest.fixture
def followed(ling: Plugin) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a command that goes on; it is ended after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        started.append(ling.start(*arguments))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_kubectl_ling_lists_watches_and_refuses_as_kubectl_does(
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    ling: Plugin,
    followed: Callable[..., subprocess.Popen[str]],
    namespace: str,
) -> None:
    start_operator()
    runs.apply(scripted_run("good", steps=40))
    watching = followed("list", "--watch", "--no-headers")
    assert read_until(watching, r"^good ")
    runs.apply(scripted_run("halts", env={"NAN_STEP": "20"}))
    runs.wait_phase("good", "Complete")
    runs.wait_phase("halts", "Halted")
    runs.wait("halts", "both ends", lambda run: len(_ended(run)) == 2)

    table = ling("list").splitlines()
    assert [line.split()[:2] for line in table] == [
        ["NAME", "PHASE"],
        ["good", "Complete"],
        ["halts", "Halted"],
    ]
    assert "\033[" not in "".join(table)
    finished = ling("list", "-A", "-o", "wide", "--filter-by-status", "HALTED").splitlines()
    assert finished[1].split()[:3] == [namespace, "halts", "Halted"]
    assert "The trainer on" in finished[1]
    assert ling("list", "-o", "name", "--filter-by-name", "^go") == (
        "trainingrun.ling.primatrix.io/good\n"
    )
    assert len(json.loads(ling("list", "-o", "json"))["items"]) == 2
    assert yaml.safe_load(ling("get", "halts", "-o", "yaml"))["metadata"]["name"] == "halts"
    detail = ling("get", "halts")
    assert "ended with 90: {" in detail
    assert "Last lines of halts-slice-job-0-0" in detail

    assert 'trainingruns.ling.primatrix.io "none" not found' in ling("get", "none", code=1)
    usage = ling("list", "--filter-by-status", "NONE", code=2)
    assert "usage: kubectl ling list" in usage
    assert "is no status" in usage

    out = read_until(watching, r"^halts +Halted")
    phases = [line.split()[1] for line in out.splitlines() if line.startswith("halts")]
    assert phases[0] != "Halted"
    assert "NAME" not in out


def _ended(run: Manifest) -> list[Manifest]:
    return run["status"]["attempts"][-1]["evidence"]["ended"]


@pytest.mark.slow
def test_logs_are_followed_over_a_restart_to_the_end_of_the_run(
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    kubelet: ProcessKubelet,
    ling: Plugin,
    followed: Callable[..., subprocess.Popen[str]],
    namespace: str,
) -> None:
    start_operator()
    runs.apply(scripted_run("again", env={"STEP_SECONDS": "0.1"}))
    runs.wait_phase("again", "Running")
    one = runs.pod("again", 1)
    following = followed("logs", "again", "-f", "--all")
    assert read_until(following, r"^\[1\] process 1 on port \d+ from step 0$")
    assert ling("logs", "again", "--process", "1") == kubelet.log(namespace, one)
    assert "there is no process 7" in ling("logs", "again", "--process", "7", code=1)

    runs.client.delete(f"{runs.pods_path}/{one}")
    lines = read_until(following, r"^\[1\] process 1 on port \d+ from step [1-9]")
    assert re.search(r"^\[1\] SIGTERM at step \d+$", lines, re.MULTILINE), "to the last line"
    runs.wait_phase("again", "Running")
    runs.client.delete(f"{runs.jobsets}/again")
    _, err = following.communicate(timeout=60)
    assert following.returncode == 0, err
    assert "[1] pod " in err
    assert ", restart 1" in err
    assert runs.status("again")["phase"] == "Cancelled"


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """Return what a command prints up to a line, or to its end without that line."""
    assert process.stdout is not None
    lines = ""
    for line in process.stdout:
        lines += line
        if re.search(pattern, line):
            return lines
    raise AssertionError(f"{pattern} never came: {lines}")


def test_a_debug_bundle_of_a_live_run_holds_all_but_its_secrets(
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    kubelet: ProcessKubelet,
    ling: Plugin,
    tmp_path: Path,
) -> None:
    start_operator()
    secret = "hf_0123456789abcdef"
    runs.apply(scripted_run("live", env={"HF_TOKEN": secret, "STEP_SECONDS": "0.1"}))
    runs.wait_step("live", 1)
    kubelet.wait_for_words(runs.namespace, runs.live_pods("live"))
    said = ling("debug", "live", "-o", "bundle.tar.gz")
    assert said.startswith("bundle.tar.gz: ")
    with tarfile.open(tmp_path / "bundle.tar.gz") as archive:
        texts: dict[str, str] = {}
        for member in archive.getmembers():
            assert member.mode == 0o600
            content = archive.extractfile(member)
            assert content is not None
            texts[member.name.partition("/")[2]] = content.read().decode()
    pods = [runs.pod("live", process) for process in (0, 1)]
    assert texts.keys() == {
        "config.yaml",
        "events.txt",
        "jobs.yaml",
        "jobset.yaml",
        "last-words.txt",
        "pods.yaml",
        "summary.txt",
        "trainingrun.yaml",
        *(f"logs/{pod}/jax-tpu.log" for pod in pods),
    }
    assert secret not in "".join(texts.values())
    assert "(redacted)" in texts["trainingrun.yaml"]
    # The API server proxies to no loopback address, which every pod here has.
    assert f"- metrics/{pods[0]}.txt: address not allowed" in texts["summary.txt"]
    assert texts[f"logs/{pods[1]}/jax-tpu.log"].startswith("process 1 on port")
    assert yaml.safe_load(texts["config.yaml"])["run_name"] == "live"
    assert "JobSetCreated" in texts["events.txt"]
    assert "workload.yaml: " in texts["summary.txt"]
    mode = (tmp_path / "bundle.tar.gz").stat().st_mode & 0o777
    assert mode == 0o600

    kubelet.set_logs("refuse")
    ling("debug", "live", "-o", "folder")
    summary = (tmp_path / "folder" / "summary.txt").read_text()
    assert f"- logs/{pods[0]}/jax-tpu.log: " in summary
    assert "File exists" in ling("debug", "live", "-o", "folder", code=1)
