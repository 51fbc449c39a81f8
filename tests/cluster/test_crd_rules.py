"""What the API server itself refuses, keeps and defaults of a TrainingRun."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ling_operator.api import HealthPolicy, dump
from lingcluster.client import ApiError, Manifest, wait_for
from lingcluster.control_plane import ControlPlane
from lingcluster.operator_process import StartOperator
from lingcluster.sample_runs import training_run
from lingcluster.training_runs import TrainingRuns

CPU = {"cpu": {"processes": 2}}
TPU = {"tpu": {"accelerator": "v6e-16"}}
RUN = {"run": {"preset": "ling2_tiny"}}
WATCH: Manifest = {"watch": {"jobSet": "xpk-run", "metricsPort": 9470}}
THEIRS: dict[str, Any] = {
    "image": {"image": "ling-trainer:1"},
    "command": {"command": ["a"]},
    "args": {"args": ["a"]},
    "run": RUN,
    "queue": {"queue": "team"},
    "restarts": {"restarts": 0},
    "template": {"template": {"env": [{"name": "A", "value": "b"}]}},
}
"""What a run that watches another's JobSet must not say."""


def of(*parts: Manifest, name: str = "rules", **spec: Any) -> Manifest:
    """Return a run of an image and these parts."""
    merged: Manifest = {"image": "ling-trainer:1"}
    for part in (*parts, spec):
        merged |= copy.deepcopy(part)
    return training_run(name, merged)


@pytest.fixture
def dry_run(runs: TrainingRuns) -> Callable[[Manifest], Manifest]:
    """Create an object as far as the API server's checks and defaults."""
    return lambda run: runs.client.create(
        runs.collection, run, dryRun="All", fieldValidation="Strict"
    )


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (of(RUN), "set exactly one of spec.tpu, spec.cpu and spec.watch"),
        (of(RUN, CPU, TPU), "set exactly one of spec.tpu, spec.cpu and spec.watch"),
        (of(RUN, CPU, queue="Team"), "spec.queue"),
        (of(RUN, CPU, watch={"jobSet": "x"}), "set exactly one of spec.tpu, spec.cpu and spec"),
        (of(RUN, CPU, name="a" * 44), "metadata.name is too long"),
        (of(RUN, {"cpu": {"processes": 11}}, name="a" * 43), "metadata.name is too long"),
        (of(RUN, CPU, name="1st"), "begin with a letter"),
        (of(RUN, CPU, name="a.b"), "lower-case letters, digits and '-'"),
        (of(RUN, CPU, replicas=2), 'unknown field "spec.replicas"'),
        (of(RUN, CPU, health={"scrapeInterval": 2}), 'unknown field "spec.health.scrapeInterval"'),
        (of(RUN, CPU, attempt=0), "spec.attempt"),
        (of(RUN, CPU, health={"nonFinite": {"action": "Pause"}}), "spec.health.nonFinite.action"),
        (of(RUN, {"cpu": {"processes": 0}}), "spec.cpu.processes"),
        (of(CPU, {"run": {"steps": "many"}}), "spec.run.steps"),
        (training_run("rules", {**RUN, **CPU}), "spec.image is required; name the trainer's"),
        *(
            (training_run("rules", {**WATCH, **theirs}), f"spec.{field} belongs to the JobSet")
            for field, theirs in THEIRS.items()
        ),
        (training_run("rules", WATCH | {"health": {"haltMode": "Fail"}}), "haltMode Fail would"),
        (training_run("rules", {"watch": {"jobSet": "A"}}), "spec.watch.jobSet"),
    ],
)
def test_the_api_server_refuses_and_says_what_to_do(
    run: Manifest, words: str, dry_run: Callable[[Manifest], Manifest]
) -> None:
    with pytest.raises(ApiError) as refusal:
        dry_run(run)
    assert words in str(refusal.value)
    assert refusal.value.status in (400, 422)


@pytest.mark.parametrize(
    "run",
    [
        of(RUN, CPU, name="a" * 43),
        of(RUN, {"cpu": {"processes": 11}}, name="a" * 42),
        of(RUN, TPU),
    ],
    ids=["longest", "longest-11", "tpu"],
)
def test_the_api_server_accepts_and_defaults_only_outside_of_run(
    run: Manifest, dry_run: Callable[[Manifest], Manifest]
) -> None:
    stored = dry_run(run)["spec"]
    assert stored["run"] == run["spec"]["run"], "a stored default would hide the preset's"
    assert (stored["attempt"], stored["suspend"], stored["restarts"]) == (1, False, 3)
    assert stored["health"] == dump(HealthPolicy())
    assert stored["template"]["terminationGracePeriodSeconds"] == 300


def test_a_run_that_watches_needs_no_image_and_stays_one_that_watches(
    runs: TrainingRuns,
) -> None:
    name = "watches-a-jobset-of-another-name-than-its-own-50-x"
    run = runs.apply(training_run(name, WATCH))
    assert run["spec"]["watch"] == WATCH["watch"]
    assert not {"image", "run", "cpu", "tpu"} & run["spec"].keys()
    assert run["spec"]["health"]["haltMode"] == "Suspend"
    run["status"] = {"attempt": 1, "jobSetUID": "u-1"}
    runs.client.request("PUT", f"{runs.collection}/{name}/status", run)
    other = {"watch": {"jobSet": "another"}}
    with pytest.raises(ApiError, match=r"spec\.watch is fixed once an attempt has started"):
        runs.edit(name, **other)
    with pytest.raises(ApiError, match=r"spec\.watch cannot be added to a run or taken from it"):
        runs.edit(name, watch=None, image="a:1", **CPU, attempt=2)
    runs.edit(name, **other, attempt=2, health={"scrapeIntervalSeconds": 9})


@pytest.fixture
def started(runs: TrainingRuns) -> Manifest:
    """A run whose attempt has a JobSet, as far as its status says."""
    run = runs.apply(of(RUN, CPU, command=["a"], args=["b"]))
    run["status"] = {"attempt": 1, "jobSetUID": "u-1"}
    return runs.client.request("PUT", f"{runs.collection}/rules/status", run)


EDITS: dict[str, Any] = {
    "image": "another:1",
    "command": ["c"],
    "args": ["b", "c"],
    "cpu": {"processes": 3},
    "run": {"steps": 7},
    "queue": "team",
    "restarts": 5,
    "template": {"hostNetwork": True},
}


@pytest.mark.parametrize("field", EDITS)
def test_a_fixed_field_changes_only_together_with_a_raised_attempt(
    field: str, started: Manifest, runs: TrainingRuns
) -> None:
    with pytest.raises(ApiError) as refusal:
        runs.edit("rules", **{field: EDITS[field]})
    assert f"spec.{field} is fixed once an attempt has started" in str(refusal.value)
    assert "raise spec.attempt in the same edit" in str(refusal.value)
    runs.edit("rules", **{field: EDITS[field]}, attempt=2)


def test_a_fixed_field_can_be_removed_or_added_only_with_a_raised_attempt(
    started: Manifest, runs: TrainingRuns
) -> None:
    for edit in ({"command": None}, {"cpu": None, **TPU}):
        with pytest.raises(ApiError, match="is fixed once an attempt has started"):
            runs.edit("rules", **edit)
    runs.edit("rules", cpu=None, **TPU, attempt=2)


def test_before_the_first_jobset_and_for_suspend_and_health_edits_are_free(
    runs: TrainingRuns,
) -> None:
    runs.apply(of(RUN, CPU))
    runs.edit("rules", **EDITS)
    run = runs.get("rules")
    run["status"] = {"attempt": 1, "jobSetUID": "u-1"}
    runs.client.request("PUT", f"{runs.collection}/rules/status", run)
    runs.edit("rules", suspend=True, health={"scrapeIntervalSeconds": 9})
    assert runs.get("rules")["spec"]["run"] == {**RUN["run"], **EDITS["run"]}


def test_an_unknown_setting_is_kept_and_reported_as_invalid_config_with_its_name(
    runs: TrainingRuns, start_operator: StartOperator
) -> None:
    start_operator()
    settings = {"preset": "ling2_tiny", "optimizer": {"learningRat": 0.1}, "stepz": 4}
    runs.apply(of(CPU, {"run": settings}))
    condition = runs.wait_condition("rules", "Created", "False", "InvalidConfig")
    assert runs.get("rules")["spec"]["run"] == settings
    assert "learningRat" in condition["message"]
    assert "stepz" in condition["message"]
    assert "spec.run" in condition["message"]
    assert runs.client.items(runs.jobsets) == []
    event = wait_for(
        "the event", lambda: [e for e in runs.events("rules") if e["reason"] == "InvalidConfig"]
    )
    assert event[0]["type"] == "Warning"


def test_kubectl_shows_six_columns_and_explains_the_settings(
    control_plane: ControlPlane, runs: TrainingRuns
) -> None:
    runs.apply(of(RUN, CPU, suspend=True))
    table = control_plane.kubectl("get", "trun", "-n", runs.namespace)
    header = table.splitlines()[0].split()
    assert header == ["NAME", "PHASE", "STEP", "TARGET", "LOSS", "HEALTH", "AGE"]
    text = control_plane.kubectl("explain", "trainingrun.spec.run.checkpoint.checkpointPeriod")
    assert "Steps between checkpoints" in text
    assert "integer" in text


def test_the_sample_runs_are_accepted_as_they_are(
    control_plane: ControlPlane, namespace: str, repository: Path
) -> None:
    samples = sorted((repository / "manifests").glob("*.yaml"))
    assert len(samples) >= 2
    for sample in samples:
        control_plane.kubectl(
            "apply", "-n", namespace, "--dry-run=server", "--validate=strict", "-f", str(sample)
        )


def test_the_operators_manifests_and_the_crd_are_accepted_as_they_are(
    control_plane: ControlPlane, operator_kubeconfig: Path, repository: Path
) -> None:
    manifests = repository / "manifests"
    answer = control_plane.kubectl(
        "apply",
        "--server-side",
        "--force-conflicts",
        "--dry-run=server",
        "--validate=strict",
        "-k",
        str(manifests / "operator"),
    )
    assert "deployment.apps/ling-operator" in answer
    crd = next((manifests / "crd").glob("*.yaml"))
    # Client-side apply keeps the whole object in an annotation, of which 256 KiB fit.
    control_plane.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", str(crd))
    assert yaml.safe_load(crd.read_text())["kind"] == "CustomResourceDefinition"
