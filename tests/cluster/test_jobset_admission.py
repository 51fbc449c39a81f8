"""The JobSets that the operator builds, on the real API server: accepted, and as written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ling_operator.api import TrainingRun
from ling_operator.jobset import build_jobset
from lingcluster.client import Manifest
from lingcluster.sample_runs import training_run
from lingcluster.training_runs import TrainingRuns

CPU = {"cpu": {"processes": 2}}
SETTINGS = {"preset": "ling2_tiny", "datasetType": "synthetic", "baseOutputDirectory": "/runs"}
EVERYTHING: Manifest = {
    "args": ["steps=3"],
    "restarts": 0,
    "template": {
        "env": [{"name": "A", "value": "$(POD_IP)"}],
        "resources": {"requests": {"cpu": "2", "memory": "1Gi"}},
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
        "serviceAccountName": "trainer",
        "hostNetwork": True,
        "privileged": True,
        "terminationGracePeriodSeconds": 60,
        "imagePullPolicy": "IfNotPresent",
        "imagePullSecrets": [{"name": "pull"}],
        "labels": {"team": "ling"},
        "annotations": {"note": "text"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "priorityClassName": "high",
        "nodeSelector": {"pool": "a"},
        "initContainers": [{"name": "init", "image": "busybox"}],
        "sidecars": [{"name": "side", "image": "busybox"}],
        "ttlSecondsAfterFinished": 3600,
    },
}
SPECS: dict[str, Manifest] = {
    "one-cpu": {"cpu": {"processes": 1}},
    "cpu": CPU,
    "foreign-trainer": {**CPU, "run": {}, "command": ["my-trainer"]},
    "everything": {**CPU, **EVERYTHING},
    "single-host-tpu": {"tpu": {"accelerator": "v6e-4"}},
    "tpu": {"tpu": {"accelerator": "v5p-32"}},
    "slices": {"tpu": {"accelerator": "tpu-v6e-slice", "topology": "4x4", "slices": 4}},
    "everything-tpu": {"tpu": {"accelerator": "v5p-128"}, **EVERYTHING},
}


def built(name: str, namespace: str, spec: Manifest, *, restore: int | None) -> Manifest:
    """Build the JobSet of a spec, less the owner, who does not exist."""
    run = training_run(name, {"image": "t:1", "run": SETTINGS, **spec})
    run["metadata"] |= {"namespace": namespace, "uid": "u-1"}
    manifest = build_jobset(TrainingRun.parse(run), attempt=1, restore_before_step=restore)
    del manifest["metadata"]["ownerReferences"]
    return manifest


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("restore", [None, 40])
def test_a_built_jobset_is_accepted_and_nothing_is_defaulted_behind_its_back(
    name: str, restore: int | None, runs: TrainingRuns
) -> None:
    manifest = built(name, runs.namespace, SPECS[name], restore=restore)
    stored = runs.client.create(runs.jobsets, manifest, dryRun="All", fieldValidation="Strict")
    assert list(_differences(manifest["spec"], stored["spec"], "spec")) == []
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = {"metadata": {"name": "job"}, "spec": replicated["template"]["spec"]}
    # JobSet's own checks do not reach into the Job that its controller will make.
    path = f"/apis/batch/v1/namespaces/{runs.namespace}/jobs"
    runs.client.create(path, job, dryRun="All", fieldValidation="Strict")


def _differences(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    """Yield every place where what is stored says more or something else."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}, key=str):
            if key not in ours:
                yield f"{path}.{key}={theirs[key]!r} was added"
            elif key not in theirs:
                if ours[key] not in ({}, []):
                    yield f"{path}.{key}={ours[key]!r} was dropped"
            else:
                yield from _differences(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(mine, other, f"{path}[{index}]")
    elif ours != theirs:
        yield f"{path}: {ours!r} became {theirs!r}"
