"""What one object holds harms no other run; what keeps a pod from running is told in the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from lingcluster.client import Manifest
from lingcluster.control_plane import ControlPlane
from lingcluster.operator_process import StartOperator
from lingcluster.sample_runs import shell_run
from lingcluster.training_runs import TrainingRuns

DEEP = 3000
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"


def test_a_spec_or_last_words_deeper_than_a_parser_goes_harm_no_other_run(
    runs: TrainingRuns,
    control_plane: ControlPlane,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    tmp_path: Path,
) -> None:
    operator = start_operator()
    text = json.dumps(scripted_run("deep", run={"deep": "HERE"}))
    file = tmp_path / "deep.json"
    file.write_text(text.replace('"HERE"', "[" * DEEP + "]" * DEEP))
    control_plane.kubectl("create", "--namespace", runs.namespace, "-f", str(file))
    words = 'head -c 4096 /dev/zero | tr "\\0" "[" > /dev/termination-log; exit 3'
    runs.apply(shell_run("brackets", words))
    runs.wait_condition("brackets", "Failed", "True", "DataError")
    runs.apply(scripted_run("well"))
    runs.wait_phase("well", "Running")
    columns = "jsonpath={.status.conditions[?(@.type=='Created')].message}"
    get = ("get", "trainingrun", "deep", "--namespace", runs.namespace, "-o", columns)
    assert "nested too deeply" in control_plane.kubectl(*get)
    assert operator.returncode is None


def test_a_run_says_what_its_first_pod_waits_for(
    runs: TrainingRuns, start_operator: StartOperator
) -> None:
    start_operator()
    nowhere = {"nodeSelector": {"example.com/rack": "none"}}
    runs.apply(shell_run("unplaced", "sleep 300", processes=2, template=nowhere))
    imageless = shell_run("imageless", "sleep 300")
    imageless["spec"]["image"] = "nobody/has:it"
    runs.apply(imageless)
    for name, words in (("unplaced", "Unschedulable: 0/"), ("imageless", "ImagePullBackOff: ")):
        runs.wait(name, words, lambda run, words=words: words in _pods_ready(run))
        first = runs.pod(name, 0)
        assert f"pods run. {first}: {words}" in _pods_ready(runs.get(name))


def test_no_exclusive_topology_is_asked_for_by_an_empty_one(
    runs: TrainingRuns, start_operator: StartOperator
) -> None:
    start_operator()
    run = shell_run("anywhere", "sleep 300")
    del run["spec"]["cpu"]
    run["spec"]["tpu"] = {"accelerator": "v6e-16"}
    run["spec"]["template"]["annotations"] = {EXCLUSIVE: ""}
    runs.apply(run)
    runs.wait_phase("anywhere", "Running")
    assert all("affinity" not in pod["spec"] for pod in runs.pods("anywhere"))


def _pods_ready(run: Manifest) -> str:
    conditions = run.get("status", {}).get("conditions", [])
    return next((c["message"] for c in conditions if c["type"] == "PodsReady"), "")
