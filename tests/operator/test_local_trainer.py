"""A local run with the project's own trainer: a NaN, an automatic halt, the next attempt."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

# One block of each kind, narrow: it compiles in seconds.
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "head_dim": 16,
    "group_norm_size": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "max_target_length": 32,
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_nan_halts_the_trainer_and_the_next_attempt_restores_and_finishes(
    tmp_path: Path,
) -> None:
    manifest: dict[str, Any] = {
        "apiVersion": "ling.primatrix.io/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": "small"},
        "spec": {
            "image": "ling-trainer",
            "cpu": {"processes": 1},
            "run": {
                "preset": "ling2_tiny",
                "dataset_type": "synthetic",
                "base_output_directory": str(tmp_path),
                "steps": 8,
                "checkpoint_period": 2,
                "metrics_linger_seconds": 3,
                "fault": {"enabled": True, "fault_kind": "nan_loss", "fault_step": 6},
                **SMALL,
            },
            "health": {"scrapeIntervalSeconds": 1},
            "template": {"env": [{"name": "LING_ALLOW_FAULT_INJECTION", "value": "1"}]},
        },
    }
    file = tmp_path / "run.yaml"

    def run(*arguments: str) -> tuple[int, str]:
        file.write_text(yaml.safe_dump(manifest))
        command = [sys.executable, "-m", "ling_operator.cli", "run", str(file), "--local"]
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=500, check=False
        )
        return done.returncode, done.stdout + done.stderr

    code, output = run()
    assert code == 1, output
    assert "Halted: NonFiniteLoss" in output
    stored = json.loads((tmp_path / "small" / "trainingrun.json").read_text())
    assert stored["status"]["halt"]["step"] == 6
    assert stored["status"]["restarts"] == 0

    code, output = run("--attempt", "2", "fault.enabled=false")
    assert code == 0, output
    assert "Complete at step 8" in output
    lines = (tmp_path / "small" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(steps)
    assert steps[-1] == 8
