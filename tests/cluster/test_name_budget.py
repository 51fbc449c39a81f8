"""How long a run's name may be: by the API server, by JobSet, and by pods at the limit."""

from __future__ import annotations

from typing import Any

import pytest

from ling_operator.api import TpuSlice, TrainingRun
from ling_operator.jobset import build_jobset
from ling_operator.name_budget import name_budget
from ling_operator.tpu import slice_shape
from lingcluster.client import ApiError, Manifest
from lingcluster.operator_process import StartOperator
from lingcluster.sample_runs import shell_run, training_run
from lingcluster.training_runs import TrainingRuns

TOO_LONG = "metadata.name is too long for the names of its pods"
PLACES: list[tuple[dict[str, Any], int, int, int]] = [
    # place, slices, hosts a slice, characters of a name
    ({"cpu": {"processes": 10}}, 1, 10, 43),
    ({"cpu": {"processes": 11}}, 1, 11, 42),
    ({"cpu": {"processes": 1001}}, 1, 1001, 40),
    ({"tpu": {"accelerator": "v6e-1"}}, 1, 1, 43),
    ({"tpu": {"accelerator": "v5e-16", "slices": 10}}, 10, 4, 43),
    ({"tpu": {"accelerator": "v6e-32", "slices": 11}}, 11, 8, 42),
    ({"tpu": {"accelerator": "tpu-v6e-slice", "topology": "8x8"}}, 1, 16, 42),
    ({"tpu": {"accelerator": "tpu-v5p-slice", "topology": "2x4x4"}}, 1, 8, 43),
    ({"tpu": {"accelerator": "tpu-v4-podslice", "topology": "8x4x4"}}, 1, 32, 42),
    ({"tpu": {"accelerator": "v5p-1024", "slices": 100}}, 100, 128, 40),
    ({"tpu": {"accelerator": "v5p-4x4x4"}}, 1, 16, 42),
    ({"tpu": {"accelerator": "v5litepod-256", "slices": 101}}, 101, 64, 40),
    ({"tpu": {"accelerator": "tpu7x-128", "parallelContainers": 2}}, 1, 16, 42),
    ({"tpu": {"accelerator": "tpu7x", "topology": "12x12x28", "slices": 16}}, 16, 1008, 39),
]


def named(length: int, place: dict[str, Any]) -> Manifest:
    settings = {"preset": "ling2_tiny", "datasetType": "synthetic", "baseOutputDirectory": "/o"}
    return training_run("n" * length, {"image": "ling-trainer:1", "run": settings, **place})


@pytest.mark.parametrize(("place", "slices", "hosts", "budget"), PLACES)
def test_the_limit_is_the_api_servers_the_operators_and_jobsets(
    place: dict[str, Any], slices: int, hosts: int, budget: int, runs: TrainingRuns
) -> None:
    assert name_budget(slices=slices, hosts=hosts) == budget
    if "tpu" in place:
        assert slice_shape(TpuSlice.model_validate(place["tpu"])).hosts == hosts
    strict = {"dryRun": "All", "fieldValidation": "Strict"}
    stored = runs.client.create(runs.collection, named(budget, place), **strict)
    run = TrainingRun.parse({**stored, "metadata": {**stored["metadata"], "uid": "u"}})
    jobset = build_jobset(run, attempt=1, restore_before_step=None)
    runs.client.create(runs.jobsets, jobset, **strict)

    with pytest.raises(ApiError) as refused:
        runs.client.create(runs.collection, named(budget + 1, place), **strict)
    assert TOO_LONG in str(refused.value)
    jobset["metadata"]["name"] += "n"
    with pytest.raises(ApiError) as refused:
        runs.client.create(runs.jobsets, jobset, **strict)
    assert "63" in str(refused.value), "a shorter limit would be too strict"


def test_every_pod_of_a_run_whose_name_is_at_the_limit_is_made_and_runs(
    runs: TrainingRuns, start_operator: StartOperator
) -> None:
    start_operator()
    script = "hostname; exec sleep 300"
    wide = shell_run("w" * 42, script, processes=11)
    slices = shell_run("s" * 43, script)
    del slices["spec"]["cpu"]
    slices["spec"]["tpu"] = {"accelerator": "v6e-16", "slices": 2}
    for run, pods in ((wide, 11), (slices, 8)):
        name = run["metadata"]["name"]
        runs.apply(run)
        runs.wait_condition(name, "PodsReady", "True", "PodsRunning")
        found = runs.pods(name)
        assert len(found) == pods
        assert max(len(pod["metadata"]["name"]) for pod in found) == 63
        hosts = {pod["spec"]["hostname"] for pod in found}
        assert len(hosts) == pods, "each has a host name of its own, nothing is cut off"
        runs.delete(name)
