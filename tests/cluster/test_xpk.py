"""xpk's commands, and its own code where it can be downloaded, on a run in Kueue's queue.

tests/golden/xpk/commands.json has the command strings of xpk 1.16.0: of `xpk workload list` (list,
exists, find, wait, status), `xpk inspector` (describe) and `xpk workload delete`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lingcluster import xpk_code
from lingcluster.build import Programs
from lingcluster.client import Manifest, wait_for
from lingcluster.control_plane import ControlPlane
from lingcluster.kueue_controller import make_queue
from lingcluster.operator_process import StartOperator
from lingcluster.story import Story
from lingcluster.training_runs import TrainingRuns

pytestmark = pytest.mark.usefixtures("kueue")

QUEUE = "multislice-queue"  # the one LocalQueue that `xpk cluster create` makes
PRIORITIES = {"very-low": 100, "low": 250, "medium": 500, "high": 750, "very-high": 1000}
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ling-tpu" / "xpk"


@pytest.fixture
def shell(control_plane: ControlPlane, programs: Programs, namespace: str, tmp_path: Path) -> Any:
    """The environment of a user of xpk: kubectl on the path, the namespace in the kubeconfig."""
    kubeconfig = control_plane.client.identity.write_kubeconfig(
        tmp_path / "kubeconfig", namespace=namespace
    )
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "kubectl").symlink_to(programs["kubectl"])
    path = f"{folder}:{os.environ.get('PATH', os.defpath)}"
    return {"PATH": path, "KUBECONFIG": str(kubeconfig), "HOME": str(tmp_path)}


@pytest.fixture
def run_xpk(shell: dict[str, str], namespace: str, repository: Path) -> Callable[..., str]:
    """Run one of xpk's command strings in a shell, as xpk does."""
    commands = json.loads((repository / "tests/golden/xpk/commands.json").read_text())

    def run(name: str, **words: str) -> str:
        command = commands[name].format(namespace=namespace, **words)
        environment = {**os.environ, **shell}
        done = subprocess.run(
            ["bash", "-c", command], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    return run


@pytest.fixture(scope="session")
def xpk(request: pytest.FixtureRequest) -> Path:
    """xpk's code. Without it: skipped, and said loudly."""
    try:
        return xpk_code.fetch(CACHE)
    except xpk_code.XpkUnavailableError as problem:
        message = f"NOT TESTED: xpk's own code, only its command strings: {problem}"
        reporter = request.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"\n{message}", red=True, bold=True)
        pytest.skip(message)


@pytest.fixture
def tpu_run(
    control_plane: ControlPlane, namespace: str, scripted_run: Callable[..., Manifest]
) -> Callable[..., Manifest]:
    """Runs of one slice of four hosts, on hostNetwork and with xpk's priority, in its queue."""
    make_queue(control_plane.client, namespace, QUEUE, pods=4, chips=16)
    for name, value in PRIORITIES.items():
        priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": value}
        path = f"/apis/scheduling.k8s.io/v1/priorityclasses/{name}"
        control_plane.client.apply(path, priority | {"metadata": {"name": name}})

    def make(name: str, **options: Any) -> Manifest:
        run = scripted_run(name, queue=QUEUE, **options)
        del run["spec"]["cpu"]
        run["spec"]["tpu"] = {"accelerator": "v6e-16"}
        run["spec"]["template"] |= {"hostNetwork": True, "priorityClassName": "high"}
        return run

    return make


def row_of(workloads: Manifest, name: str) -> Manifest:
    """Return what `xpk workload list` reads of a run: by its Workload's first owner."""
    rows = [w for w in workloads["items"] if w["metadata"]["ownerReferences"][0]["name"] == name]
    (workload,) = rows
    return workload


def test_xpks_commands_find_describe_wait_for_and_delete_a_run(
    runs: TrainingRuns,
    start_operator: StartOperator,
    tpu_run: Callable[..., Manifest],
    run_xpk: Callable[..., str],
    story: Story,
) -> None:
    start_operator()
    runs.apply(tpu_run("quick", steps=20))
    runs.wait_phase("quick", "Complete")
    runs.apply(tpu_run("long-run"))  # the quota is for one: applied at once, it might come first
    runs.wait_phase("long-run", "Running")
    pods = runs.pods("long-run")
    assert [pod["spec"]["priority"] for pod in pods] == [PRIORITIES["high"]] * 4
    assert {pod["metadata"]["labels"]["xpk.google.com/workload"] for pod in pods} == {"long-run"}

    workload = row_of(json.loads(run_xpk("list")), "long-run")
    (pod_set,) = workload["spec"]["podSets"]
    assert (pod_set["name"], pod_set["count"]) == ("slice-job", 4)
    (trainer,) = pod_set["template"]["spec"]["containers"]
    assert trainer["resources"]["limits"]["google.com/tpu"] in ("4", 4)
    (assigned,) = workload["status"]["admission"]["podSetAssignments"]
    assert assigned["count"] == 4
    assert {"quick", "long-run"} <= set(run_xpk("exists").splitlines())

    full_name = run_xpk("find", workload="quick").split(" ")[0]
    story.tell(f"Workload {full_name}")
    assert run_xpk("wait", full_workload_name=full_name, timeout="60")
    ended = json.loads(run_xpk("status", workload="quick"))["status"]["conditions"]
    assert "Completed" in {c["type"] for c in ended if c["status"] == "True"}

    assert "slice-job" in run_xpk("describe_jobset", workload="long-run")
    assert "Queue Name:" in run_xpk("describe_workload", workload="long-run")

    assert "deleted" in run_xpk("delete", workload="long-run")
    cancelled = runs.wait_phase("long-run", "Cancelled")
    assert cancelled["status"]["attempt"] == 1
    runs.wait_no_live_pod("long-run")
    wait_for(
        "the Workload to go",
        lambda: "long-run" not in run_xpk("exists").splitlines(),
    )
    assert runs.client.find(f"{runs.jobsets}/long-run") is None, "nobody makes it anew"


@pytest.mark.slow
def test_xpks_own_code_lists_waits_for_and_deletes_a_run_with_those_commands(
    runs: TrainingRuns,
    start_operator: StartOperator,
    tpu_run: Callable[..., Manifest],
    shell: dict[str, str],
    xpk: Path,
    repository: Path,
) -> None:
    golden = json.loads((repository / "tests/golden/xpk/commands.json").read_text())
    words = {"namespace": runs.namespace, "workload": "quick", "timeout": "60"}
    parsed = {"namespace": runs.namespace, "project": "p", "cluster": "c", "zone": "a-b-c"}
    start_operator()
    runs.apply(tpu_run("quick", steps=20))
    runs.wait_phase("quick", "Complete")
    runs.apply(tpu_run("long-run"))
    runs.wait_phase("long-run", "Running")

    listing = parsed | {"filter_by_status": "EVERYTHING", "filter_by_job": "long-run"}
    listed = xpk_code.call(xpk, "xpk.core.workload.get_workload_list", listing, environment=shell)
    code, table = listed.result
    assert code == 0
    header, row = table.splitlines()[:2]
    assert header.startswith("Jobset Name")
    name, _, priority, needed, running, _, status = row.split()[:7]
    assert (name, priority, needed, running) == ("long-run", "high", "4", "4")
    # The newest condition's; Kueue sets both within the same second.
    assert status in {"Admitted", "QuotaReserved"}, table
    assert golden["list"].format(**words) in listed.commands

    waiting = parsed | {"wait_for_job_completion": "quick", "timeout": 60}
    waited = xpk_code.call(
        xpk, "xpk.core.workload.wait_for_job_completion", waiting, environment=shell
    )
    assert waited.result == 0, waited.printed
    for each in ("exists", "find", "status"):
        assert golden[each].format(**words) in waited.commands

    deleted = xpk_code.call(
        xpk, "xpk.commands.workload.delete_workloads", parsed, ["long-run"], environment=shell
    )
    assert deleted.result == 0, deleted.printed
    assert golden["delete"].format(**words | {"workload": "long-run"}) in deleted.commands
    runs.wait_phase("long-run", "Cancelled")

    inspector = (xpk / "xpk" / "commands" / "inspector.py").read_text()
    for each in ("describe_jobset", "describe_workload"):
        assert golden[each].replace("{workload}", "{args.workload}") in inspector


def test_the_shapes_kept_here_are_those_of_xpks_table(xpk: Path, repository: Path) -> None:
    lines = (repository / "tests/golden/xpk/shapes.txt").read_text().splitlines()
    assert list(xpk_code.shapes(xpk)) == lines
