"""Runs for the control plane's tests: of a scripted trainer, and of real ones on real text."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lingcluster import sample_runs
from lingcluster.client import Manifest


@pytest.fixture
def scripted_run(repository: Path, tmp_path: Path) -> Callable[..., Manifest]:
    """`sample_runs.scripted_run` with the scripted trainer and a folder of the test's own."""
    trainer = repository / "tests" / "operator" / "contract_trainer.py"
    return functools.partial(
        sample_runs.scripted_run, trainer=trainer, output=tmp_path / "scripted"
    )


@pytest.fixture(scope="session")
def text_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a dataset of real text: sources of the Python standard library."""
    prefix = tmp_path_factory.mktemp("data") / "stdlib"
    sources = [json.__file__, *sorted(Path(json.__file__).parents[1].glob("t*.py"))]
    program = [sys.executable, "-m", "ling_trainer", "data", "build"]
    subprocess.run(
        [*program, "--input", *map(str, sources), "--output", str(prefix)],
        check=True,
        capture_output=True,
    )
    return prefix


@pytest.fixture(scope="session")
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JAX's compilation cache, so that only the first trainer of a session compiles."""
    own = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return Path(own) if own else tmp_path_factory.mktemp("jax-cache")


@pytest.fixture
def real_run(
    repository: Path, text_dataset: Path, compilation_cache: Path, tmp_path: Path
) -> Callable[..., Manifest]:
    """`sample_runs.small_real_run` on real text, with a folder of the test's own."""
    return functools.partial(
        sample_runs.small_real_run,
        repository / "manifests" / "ling2-run.yaml",
        dataset=text_dataset,
        output=tmp_path / "real",
        compilation_cache=compilation_cache,
    )
