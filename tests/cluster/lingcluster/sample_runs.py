"""TrainingRuns to test with: a scripted trainer that is quick, and the real one, made small."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lingcluster.client import Manifest, load_manifests
from lingcluster.workloads import SHELL_IMAGE

SCRAPE_SECONDS = 1
# Two layers, of which the first is dense and the second MLA and a mixture of experts: what makes
# the compiler slow is the number of different layers.
_SMALL_MODEL: Manifest = {
    "hiddenSize": 32,
    "numHiddenLayers": 2,
    "numAttentionHeads": 2,
    "headDim": 16,
    "intermediateSize": 32,
    "firstKDenseReplace": 1,
    "layerGroupSize": 2,
    "groupNormSize": 2,
    "qLoraRank": 16,
    "kvLoraRank": 16,
    "qkNopeHeadDim": 16,
    "qkRopeHeadDim": 8,
    "vHeadDim": 16,
    "numExperts": 4,
    "numExpertsPerTok": 2,
    "nGroup": 2,
    "topkGroup": 1,
    "moeIntermediateSize": 16,
    "numNextnPredictLayers": 0,
}


def scripted_run(
    name: str,
    *,
    trainer: Path,
    output: Path,
    steps: int = 100_000,
    env: Mapping[str, str] | None = None,
    **spec: Any,
) -> Manifest:
    """Return a run of two processes of a script that speaks the trainer's contract.

    Args:
      name: of the object.
      trainer: the script; what its environment may say is written there.
      output: base_output_directory.
      steps: of 0.05 s each, unless env says otherwise.
      env: the script's environment.
      spec: fields of spec that differ.
    """
    return training_run(
        name,
        {
            "image": SHELL_IMAGE,
            "command": [sys.executable, str(trainer)],
            "cpu": {"processes": 2},
            "run": {
                "preset": "ling2_tiny",
                "dataset_type": "synthetic",
                "base_output_directory": str(output),
                "steps": steps,
            },
            "health": {"scrapeIntervalSeconds": SCRAPE_SECONDS},
            "template": {"terminationGracePeriodSeconds": 5, "env": variables(env or {})},
            **spec,
        },
    )


def shell_run(name: str, script: str, *, processes: int = 1, **spec: Any) -> Manifest:
    """Return a run whose trainer is a line of shell."""
    return training_run(
        name,
        {
            "image": SHELL_IMAGE,
            "command": ["sh", "-c", script],
            "cpu": {"processes": processes},
            "template": {"terminationGracePeriodSeconds": 5},
            **spec,
        },
    )


def training_run(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a TrainingRun."""
    return {
        "apiVersion": "ling.primatrix.io/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": name},
        "spec": dict(spec),
    }


def variables(values: Mapping[str, str]) -> Sequence[Manifest]:
    """Return environment variables as a container lists them."""
    return [{"name": name, "value": value} for name, value in values.items()]


def small_real_run(
    sample: Path, name: str, *, dataset: Path, output: Path, compilation_cache: Path, steps: int
) -> Manifest:
    """Return manifests/ling2-run.yaml for two processes of the real trainer, made small.

    Args:
      sample: the manifest.
      name: of the object.
      dataset: prefix of the .bin and .idx files.
      output: base_output_directory.
      compilation_cache: JAX's, shared by all processes that compile the same step.
      steps: to train; some tens a second.
    """
    (run,) = load_manifests(sample)
    run["metadata"]["name"] = name
    run["spec"]["cpu"]["processes"] = 2
    run["spec"]["run"] |= {
        "baseOutputDirectory": str(output),
        "steps": steps,
        "model": _SMALL_MODEL,
        "data": {"datasetPath": str(dataset), "maxTargetLength": 64, "globalBatchSize": 32},
        "checkpoint": {"checkpointPeriod": 20, "protectSteps": 20},
    }
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(compilation_cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    run["spec"]["template"] = {
        "terminationGracePeriodSeconds": 60,
        "env": [*variables(cache), *variables({"LING_ALLOW_FAULT_INJECTION": "1"})],
    }
    return run
