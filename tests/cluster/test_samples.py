"""The sample TrainingRuns: the API server takes them, and what the operator makes of each."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from ling_operator.api import TrainingRun
from ling_operator.jobset import build_jobset
from ling_operator.runnable import require_runnable, run_settings
from ling_operator.tpu import slice_shape
from ling_trainer.settings import resolve
from lingcluster.client import Manifest, load_manifests
from lingcluster.training_runs import TrainingRuns

SAMPLES = sorted(
    path
    for folder in ("manifests", "manifests/samples")
    for path in (Path(__file__).parents[2] / folder).glob("*.yaml")
)
PODS = {
    "ling2-run": (1, None),
    "ling2": (16, 4),
    "tiny-cpu": (2, None),
    "ling2-small": (4, 4),
    "ling2-tpu7x": (16, 4),
    "ling2-multislice": (64, 4),
}
DEVICES_PER_CHIP = {"tpu7x": 2}


@pytest.fixture(params=SAMPLES, ids=lambda path: path.stem)
def sample(request: pytest.FixtureRequest) -> Manifest:
    (manifest,) = load_manifests(request.param)
    return manifest


def test_a_sample_is_taken_as_written_and_so_is_its_jobset(
    sample: Manifest, runs: TrainingRuns
) -> None:
    strict = {"dryRun": "All", "fieldValidation": "Strict"}
    stored = runs.client.create(runs.collection, copy.deepcopy(sample), **strict)
    require_runnable(TrainingRun.parse(stored))
    if "watch" in sample["spec"]:
        return  # its JobSet is somebody else's
    assert stored["spec"]["run"] == sample["spec"]["run"]
    jobset = _jobset(stored)
    assert runs.client.create(runs.jobsets, jobset, **strict)["spec"]
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    path = f"/apis/batch/v1/namespaces/{runs.namespace}/jobs"
    runs.client.create(path, {"metadata": {"name": "job"}, "spec": job}, **strict)
    pod = {"metadata": {"name": "pod"}, "spec": job["template"]["spec"]}
    # Priority classes and service accounts are the cluster's; only the pod itself is asked about.
    pod["spec"].pop("priorityClassName", None)
    pod["spec"].pop("serviceAccountName", None)
    runs.client.create(runs.pods_path, pod, **strict)

    pods, chips = PODS[sample["metadata"]["name"]]
    assert replicated["replicas"] * job["completions"] == pods
    (trainer,) = (each for each in pod["spec"]["containers"] if each["name"] == "jax-tpu")
    limits = trainer.get("resources", {}).get("limits", {})
    assert limits.get("google.com/tpu") == chips


def _jobset(stored: Manifest) -> Manifest:
    jobset = build_jobset(TrainingRun.parse(stored), attempt=1, restore_before_step=None)
    del jobset["metadata"]["ownerReferences"]  # of an object that was not stored
    return jobset


def test_a_samples_mesh_and_batch_fit_its_devices(sample: Manifest) -> None:
    sample["metadata"] |= {"namespace": "team", "uid": "u"}
    run = TrainingRun.parse(sample)
    if run.spec.tpu is None:
        return
    config = resolve(run_settings(run))
    shape = slice_shape(run.spec.tpu)
    chips = shape.hosts * shape.chips_per_host
    devices = chips * DEVICES_PER_CHIP.get(shape.label, 1)
    mesh = config.mesh
    within = mesh.ici_fsdp_parallelism * mesh.ici_expert_parallelism * mesh.ici_tensor_parallelism
    assert devices % within == 0, "what is not the data axis has to fit in a slice"
    data = run.spec.tpu.slices * devices // within
    assert mesh.ici_data_parallelism in (-1, data)
    assert config.model.num_experts % mesh.ici_expert_parallelism == 0
    if sample["metadata"]["name"] == "ling2-tpu7x":
        each = config.data.per_device_batch_size
        assert each is not None
        assert each * devices * config.gradient_accumulation_steps == 5120
