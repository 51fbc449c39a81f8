"""How long does Megatron's sample order take to build, and how much memory?

10 million documents and 10 billion tokens of synthetic lengths, one epoch, samples of 4,096; and
the turns of a blend. Beside it, Megatron's own compiled helper on the same input, for what it
does: the sample index and the turns (it shuffles with NumPy too). The helper comes out of
megatron-core's wheel, installed without its dependencies into a temporary environment; without a
package index that part is left out.

Usage: python benchmarks/index_build.py [--runs 10] [--output FILE.json]
"""

import argparse
import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ling_trainer.data.blend import build_blend_index, normalize
from ling_trainer.data.gpt import build_index, build_sample_index

DOCUMENTS, TOKENS, SEQUENCE_LENGTH, SEED = 10_000_000, 10_000_000_000, 4096, 1234
BLEND = (0.5, 0.3, 0.15, 0.05)
MEGATRON = "megatron-core==0.19.2"


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description="Time the building of indices.")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options.runs, load_helper(Path(folder)))
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


def measure(runs: int, helper: ModuleType | None) -> dict[str, Any]:
    """Time each part `runs` times after a first one that is not counted."""
    lengths = document_lengths()
    documents = np.arange(DOCUMENTS, dtype=np.int32)
    before = peak_bytes()

    def whole() -> Any:
        return build_index(
            lengths, documents, num_samples=None, sequence_length=SEQUENCE_LENGTH, seed=SEED
        )

    index = whole()
    peak = peak_bytes()
    order, total = index.document_index, int(lengths.sum(dtype=np.int64))
    settings: Any = {
        "sequence_length": SEQUENCE_LENGTH,
        "extra_token": True,
        "drop_last_partial": True,
    }
    shares = normalize(BLEND)
    timed: dict[str, Callable[[], Any]] = {
        "index": whole,
        "sample_index": lambda: build_sample_index(lengths, order, **settings),
        "blend_turns": lambda: build_blend_index(shares, len(index)),
    }
    if helper is not None:
        timed["megatron_sample_index"] = lambda: helper.build_sample_idx_int32(
            lengths, order, SEQUENCE_LENGTH, 1, total, True, 1
        )
        timed["megatron_blend_turns"] = lambda: megatron_turns(helper, shares, len(index))
        np.testing.assert_array_equal(index.sample_index, timed["megatron_sample_index"]())
        turns = build_blend_index(shares, len(index)).dataset_index
        np.testing.assert_array_equal(turns, timed["megatron_blend_turns"]())
    return {
        "question": "time and memory of Megatron's sample order",
        "documents": DOCUMENTS,
        "tokens": total,
        "samples": len(index),
        "peak_bytes": peak,
        "peak_bytes_before": before,
        "megatron": MEGATRON if helper else None,
        "equal_to_megatron": None if helper is None else True,
        "seconds": {name: times(call, runs) for name, call in timed.items()},
        **machine(),
    }


def document_lengths() -> np.ndarray:
    """Draw lengths that are spread as those of web text are, TOKENS in all."""
    drawn = np.random.default_rng(SEED).lognormal(6.4, 1.0, DOCUMENTS)
    lengths = np.maximum(drawn * (TOKENS / drawn.sum()), 1).astype(np.int32)
    lengths[: TOKENS - int(lengths.sum(dtype=np.int64))] += 1
    return lengths


def megatron_turns(helper: ModuleType, shares: list[float], size: int) -> np.ndarray:
    """Let Megatron's helper give the turns."""
    turns, numbers = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helper.build_blending_indices(turns, numbers, np.array(shares), len(shares), size, False)
    return turns


def times(call: Callable[[], Any], runs: int) -> dict[str, float]:
    """Time calls on the wall and in CPU seconds, which other processes do not stretch."""
    wall, cpu = [], []
    for _ in range(runs):
        start = (time.perf_counter(), time.process_time())
        call()
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
    return {
        "wall_median": round(statistics.median(wall), 4),
        "wall_min": round(min(wall), 4),
        "wall_max": round(max(wall), 4),
        "cpu_median": round(statistics.median(cpu), 4),
        "cpu_min": round(min(cpu), 4),
        "cpu_max": round(max(cpu), 4),
        "runs": runs,
    }


def peak_bytes() -> int:
    """Return the largest memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def load_helper(folder: Path) -> ModuleType | None:
    """Install Megatron's wheel into a fresh environment and load its helper from there."""
    environment = folder / "environment"
    try:
        subprocess.run([sys.executable, "-m", "venv", environment], check=True, timeout=300)
        pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--only-binary=:all:", MEGATRON], check=True, timeout=300)
        found = next(environment.rglob("helpers_cpp.*.so"))
        spec = importlib.util.spec_from_file_location("helpers_cpp", found)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (OSError, subprocess.SubprocessError, StopIteration, ImportError) as error:
        print(f"without Megatron's helper: {error!r}", file=sys.stderr)
        return None
    return module


def machine() -> dict[str, Any]:
    """Describe where this ran."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit or None,
        "machine": f"{os.cpu_count()} x {platform.processor() or platform.machine()}",
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


if __name__ == "__main__":
    main()
