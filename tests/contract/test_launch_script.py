"""scripts/pretrain_ling2.sh: every setting reaches the trainer, and the user's come last."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ling_trainer.config import RunConfig
from ling_trainer.schema import field_paths
from ling_trainer.settings import parse_overrides, resolve


def _recorded(repository: Path, tmp_path: Path, *arguments: str, **settings: str) -> list[str]:
    """Run the script with a python3 that writes down its arguments and the coordinator."""
    fake = tmp_path / "python3"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "$JAX_COORDINATOR_ADDRESS" > "$RECORD"\n')
    fake.chmod(0o755)
    record = tmp_path / "record"
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "RECORD": str(record),
        "JAX_COORDINATOR_ADDRESS": "",
        **settings,
    }
    subprocess.run(
        ["bash", "scripts/pretrain_ling2.sh", *arguments],
        cwd=repository,
        env=environment,
        check=True,
    )
    return record.read_text().splitlines()


def test_every_argument_is_a_known_setting_and_the_users_come_last(
    repository: Path, tmp_path: Path
) -> None:
    lines = _recorded(repository, tmp_path, "steps=7", "loss_groups=2", STEPS="9")
    assert lines[:3] == ["-m", "ling_trainer", "run"]
    assert lines[-3:-1] == ["steps=7", "loss_groups=2"]
    overrides = lines[3:-1]
    assert "steps=9" in overrides
    names = {text.partition("=")[0] for text in overrides}
    assert names - {"model_name"} <= set(field_paths(RunConfig))
    config = resolve(parse_overrides(overrides))
    assert config.steps == 7
    assert config.model.num_experts == 256
    assert config.loss.mtp_loss_scaling_factor == 0.1
    assert config.loss.moe_z_loss_weight == 3.5e-6
    assert config.optimizer.bias_update == "ling_zero_mean"
    assert config.data.eod_id == config.data.pad_id == 156_892
    assert (config.evaluation.eval_interval, config.evaluation.eval_steps) == (1490, 1)


def test_every_variable_of_the_script_can_be_set_from_outside(
    repository: Path, tmp_path: Path
) -> None:
    text = (repository / "scripts" / "pretrain_ling2.sh").read_text()
    assigned = set(re.findall(r"^ *([A-Z][A-Z0-9_]+)=", text, flags=re.M))
    assert {"MODEL_NAME", "STEPS", "MTP_LOSS_SCALING_FACTOR", "BIAS_UPDATE"} <= assigned
    for name in assigned:
        assert re.search(rf"^ *{name}=\$\{{{name}:-", text, flags=re.M), name
    passed = dict(re.findall(r'^ *([a-z_0-9]+)="\'?\$([A-Z_0-9]+)', text, flags=re.M))
    values = {
        "split": "9,1",
        "lr_decay_style": "constant",
        "bias_update": "megatron",
        "mtp_roll": "plain",
    }
    for setting, variable in passed.items():
        value = values.get(setting, "true" if setting.endswith(("_mask", "_loss")) else "3")
        lines = _recorded(repository, tmp_path, **{variable: value})
        quoted = f"'{value}'" if setting == "split" else value
        assert f"{setting}={quoted}" in lines


def test_the_coordinator_is_the_first_of_the_tpu_process_addresses(
    repository: Path, tmp_path: Path
) -> None:
    lines = _recorded(
        repository, tmp_path, TPU_PROCESS_ADDRESSES="run-0-0.run:8476,run-0-1.run:8476"
    )
    assert lines[-1] == "run-0-0.run:8476"


@pytest.mark.slow
def test_the_script_trains_two_real_steps(repository: Path, tmp_path: Path) -> None:
    settings = {
        "MODEL_NAME": "ling2_tiny",
        "DATASET_TYPE": "synthetic",
        "STEPS": "2",
        "MAX_TARGET_LENGTH": "64",
        "BASE_OUTPUT_DIR": str(tmp_path),
        "RUN_NAME": "two",
        "JAX_PLATFORMS": "cpu",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "scripts/pretrain_ling2.sh", "metrics_port=0"],
        cwd=repository,
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    steps = (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    assert len(steps) == 2
