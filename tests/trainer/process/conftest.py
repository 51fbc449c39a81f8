"""Real trainer processes: a tiny model, a shared compilation cache, what they leave behind."""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml

from ling_trainer.data.build import build_dataset
from ports import free_ports

MODEL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
    "intermediate_size": 32, "first_k_dense_replace": 1, "layer_group_size": 2,
    "group_norm_size": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 2, "moe_intermediate_size": 16, "chunk_size": 16,
    "num_nextn_predict_layers": 0,
}  # fmt: skip

MANY_STEPS = 60


@dataclass
class Processes:
    """The processes of one start of a run."""

    folder: Path
    popen: list[subprocess.Popen[bytes]]
    run_directory: Path
    port: int  # of the coordinator, where there are several

    def wait(self, timeout: float = 300) -> list[int]:
        """Return every exit code, 128 + n for signal n as a shell has it."""
        deadline = time.monotonic() + timeout
        codes = [p.wait(max(deadline - time.monotonic(), 0.1)) for p in self.popen]
        return [128 - code if code < 0 else code for code in codes]

    def output(self, process: int = 0) -> str:
        return (self.folder / f"output-{process}").read_text()

    def message(self, process: int = 0) -> dict[str, str]:
        """Return the termination message."""
        return json.loads((self.folder / f"message-{process}").read_text())

    def until(self, pattern: str, process: int = 0, timeout: float = 240) -> re.Match[str]:
        """Wait until the output matches; fail with it where the process ends first."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            ended = self.popen[process].poll() is not None
            if found := re.search(pattern, self.output(process)):
                return found
            assert not ended, f"ended without {pattern!r}:\n{self.output(process)}"
            time.sleep(0.005)
        raise AssertionError(f"no {pattern!r} after {timeout} s:\n{self.output(process)}")

    def url(self, process: int = 0) -> str:
        return self.until(r"metrics=(\S+)", process)[1]

    def kill(self) -> None:
        for process in self.popen:
            if process.poll() is None:
                process.kill()
            process.wait()


@dataclass
class Launcher:
    """Start `python -m ling_trainer` with a tiny model and the settings of a test."""

    folder: Path
    dataset: str
    cache: Path
    started: list[Processes] = field(default_factory=list)

    def __call__(
        self,
        run_name: str,
        settings: dict[str, Any] | None = None,
        *,
        processes: int = 1,
        expected: int | None = None,
        environ: dict[str, str] | None = None,
    ) -> Processes:
        folder = self.folder / f"start-{len(self.started)}"
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(self.settings(run_name)))
        command = [sys.executable, "-m", "ling_trainer", "run", str(folder / "config.yaml")]
        command += [f"{key}={json.dumps(value)}" for key, value in (settings or {}).items()]
        (port,) = free_ports(1)
        popen: list[subprocess.Popen[bytes]] = []
        for index in range(processes):
            several = {
                "LING_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "LING_NUM_PROCESSES": str(expected or processes),
                "LING_PROCESS_ID": str(index),
                "LING_CONTAINER_INDEX": str(index),
            }
            own = {"LING_TERMINATION_LOG": str(folder / f"message-{index}")}
            if processes > 1 or expected:
                own |= several
            with (folder / f"output-{index}").open("wb") as output:
                popen.append(
                    subprocess.Popen(
                        command,
                        env=self.environ() | own | (environ or {}),
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        group = Processes(folder, popen, self.folder / "runs" / run_name, port)
        self.started.append(group)
        return group

    def settings(self, run_name: str) -> dict[str, Any]:
        return {
            "preset": "ling2_tiny",
            "steps": 10,
            "run_name": run_name,
            "base_output_directory": str(self.folder / "runs"),
            "model": MODEL,
            "data": {
                "dataset_path": self.dataset,
                "max_target_length": 32,
                "global_batch_size": 4,
            },
            "checkpoint": {"checkpoint_period": 5, "protect_steps": 5},
            "metrics": {"metrics_port": 0, "metrics_linger_seconds": 0.2},
        }

    def environ(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("LING_", "POD_"))}
        return inherited | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "LING_ALLOW_FAULT_INJECTION": "1",
            "PYTHONUNBUFFERED": "1",
        }


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small corpus of real text: few enough tokens that a run reads some of them twice."""
    folder = tmp_path_factory.mktemp("data")
    text = Path(os.__file__).read_text()
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": text[i : i + 300]}) + "\n" for i in range(0, 12_000, 300))
    )
    build_dataset([folder / "text.jsonl"], folder / "corpus")
    return str(folder / "corpus")


@pytest.fixture(scope="session")
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jax-cache")


@pytest.fixture
def launch(tmp_path: Path, dataset: str, compilation_cache: Path) -> Iterator[Launcher]:
    """Start processes; whatever still runs at the end of the test is killed."""
    launcher = Launcher(tmp_path, dataset, compilation_cache)
    yield launcher
    for group in launcher.started:
        group.kill()


@pytest.fixture(scope="session")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory, dataset: str, compilation_cache: Path
) -> Callable[[int], Processes]:
    """MANY_STEPS steps of so many processes, never disturbed: what others are compared with."""
    done: dict[int, Processes] = {}

    def run(processes: int) -> Processes:
        if processes not in done:
            folder = tmp_path_factory.mktemp(f"uninterrupted-{processes}")
            group = Launcher(folder, dataset, compilation_cache)(
                "run", {"steps": MANY_STEPS}, processes=processes
            )
            try:
                assert set(group.wait()) == {0}, group.output()
            finally:
                group.kill()
            done[processes] = group
        return done[processes]

    return run


@pytest.fixture(scope="session")
def many_steps() -> int:
    """How many: at some 30 ms a step, a signal sent at the fifth lands well before the last."""
    return MANY_STEPS


@pytest.fixture(scope="session")
def read_back() -> SimpleNamespace:
    """What a run left: checkpoint steps, leaves, journal."""
    return SimpleNamespace(
        steps=checkpoint_steps, leaves=read_leaves, hashes=hash_leaves, journal=read_journal
    )


def checkpoint_steps(run_directory: Path) -> list[int]:
    """List complete checkpoints, by Orbax's own marker."""
    folder = run_directory / "checkpoints"
    return sorted(int(p.parent.name) for p in folder.glob("*/commit_success.txt"))


def read_leaves(run_directory: Path, step: int) -> dict[str, np.ndarray]:
    """Read every array of a checkpoint, by Orbax alone."""
    path = run_directory / "checkpoints" / str(step) / "state"
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        restored = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    return {
        jax.tree_util.keystr(key): np.asarray(leaf)
        for key, leaf in jax.tree_util.tree_leaves_with_path(restored)
    }


def hash_leaves(run_directory: Path, step: int) -> dict[str, str]:
    """Hash every array of a checkpoint."""
    return {
        name: hashlib.sha256(
            f"{leaf.dtype}{leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes()
        ).hexdigest()
        for name, leaf in read_leaves(run_directory, step).items()
    }


def read_journal(run_directory: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl, refusing what is no JSON."""

    def refuse(text: str) -> Callable[..., Any]:
        raise ValueError(f"{text} is no JSON")

    lines = (run_directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]
