"""The command line: where settings come from, and what a wrong one says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ling_trainer.cli import main
from ling_trainer.config import RunConfig
from ling_trainer.run_settings import load_config, settings_help
from ling_trainer.schema import ConfigError, field_paths

TINY = ["preset=ling2_tiny", "dataset_type=synthetic", "enable_checkpointing=false"]


def command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m ling_trainer` without the variables of whoever runs the tests."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("LING_")}
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ling_trainer", *arguments],
        env=inherited | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_overrides_beat_the_file_and_the_file_beats_the_preset(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("preset: ling2_tiny\nsteps: 7\nseed: 1\noptimizer: {learning_rate: 1e-4}\n")
    config = load_config([str(path), "steps=9", *TINY[1:]], {})
    assert (config.steps, config.seed) == (9, 1)
    assert config.optimizer.learning_rate == pytest.approx(1e-4)
    assert config.model.hidden_size == 128


def test_the_environments_settings_take_the_files_place():
    environ = {"LING_RUN_CONFIG": json.dumps({"preset": "ling2_tiny", "steps": 7, "seed": 1,
                                              "checkpoint": {"enableCheckpointing": False},
                                              "data": {"datasetType": "synthetic"}})}  # fmt: skip
    config = load_config(["steps=9"], environ)
    assert (config.steps, config.seed) == (9, 1)
    with pytest.raises(ConfigError, match=r"run\.yaml and from LING_RUN_CONFIG"):
        load_config(["run.yaml"], environ)


@pytest.mark.parametrize(
    ("arguments", "environ", "problem"),
    [
        (["a.yaml", "b.yaml"], {}, "a.yaml and from b.yaml"),
        (["nothing.yaml"], {}, "nothing.yaml cannot be read"),
        ([], {"LING_RUN_CONFIG": "{"}, "LING_RUN_CONFIG is not JSON"),
        ([], {"LING_RUN_CONFIG": "[1]"}, "LING_RUN_CONFIG holds a list"),
    ],
)
def test_settings_that_cannot_be_read_say_where_they_come_from(arguments, environ, problem):
    with pytest.raises(ConfigError, match=problem):
        load_config(arguments, environ)


def test_every_wrong_setting_is_a_line_of_its_own_and_ends_with_2_before_jax(tmp_path):
    log = tmp_path / "message"
    done = command(
        "run", *TINY, "steps=0", "hidden_size=wide", "n_group=3", LING_TERMINATION_LOG=str(log)
    )
    assert done.returncode == 2
    problems = [line for line in done.stderr.splitlines() if line.startswith("ling-train:")]
    assert len(problems) == 3 - 1  # rules across fields are checked once the fields are right
    assert any("steps=0" in line for line in problems)
    assert any("model.hidden_size='wide'" in line for line in problems)
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "ling_trainer.config" in imported
    assert not imported & {"jax", "jaxlib", "numpy", "orbax", "flax", "prometheus_client"}
    message = json.loads(log.read_text())
    assert message["reason"] == "InvalidConfig"
    assert "steps=0" in message["message"]


def test_faults_need_the_environments_permission():
    done = command("run", *TINY, "fault.enabled=true")
    assert done.returncode == 2
    assert "LING_ALLOW_FAULT_INJECTION=1" in done.stderr


def test_a_wrong_process_number_is_a_wrong_setting():
    done = command(
        "run", *TINY, LING_COORDINATOR_ADDRESS="h:1", LING_NUM_PROCESSES="2", LING_PROCESS_ID="2"
    )
    assert done.returncode == 2
    assert "this is process 2" in done.stderr


@pytest.mark.parametrize("arguments", [["steps=0"], []])
def test_without_a_verb_settings_are_a_run(arguments):
    done = command(*arguments, LING_RUN_CONFIG='{"preset": "ling2_tiny", "stepz": 1}')
    assert done.returncode == 2
    assert "stepz is not a setting; did you mean steps?" in done.stderr


def test_no_verb_and_no_settings_print_the_usage():
    done = command()
    assert done.returncode == 2
    assert "usage: ling-train" in done.stderr


def test_help_lists_every_setting_with_its_meaning():
    text = settings_help()
    for path in field_paths(RunConfig).values():
        assert f"  {path}" in text
    assert "Largest global gradient norm; 0 does not clip." in text


def test_a_preset_is_printed_as_yaml_that_can_be_a_file(capsys, tmp_path):
    assert main(["presets"]) == 0
    assert "ling2_tiny" in capsys.readouterr().out.split()
    assert main(["presets", "ling2_tiny"]) == 0
    path = tmp_path / "run.yaml"
    path.write_text(capsys.readouterr().out)
    assert yaml.safe_load(path.read_text())["model"]["hidden_size"] == 128
    load_config([str(path), *TINY[1:]], {})


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out.startswith("ling-train ")


def test_data_build_makes_a_dataset_and_says_which_settings_fit(capsys, tmp_path):
    (tmp_path / "text.txt").write_text("Attention is all you need.")
    assert main(["data", "build", "--input", str(tmp_path / "text.txt"),
                 "--output", str(tmp_path / "out")]) == 0  # fmt: skip
    assert "1 documents, 27 tokens" in capsys.readouterr().out
    assert Path(f"{tmp_path}/out.idx").exists()


def test_data_build_names_a_file_that_is_missing_and_ends_with_3(capsys, tmp_path):
    missing = str(tmp_path / "missing.txt")
    assert main(["data", "build", "--input", missing, "--output", str(tmp_path / "out")]) == 3
    assert missing in capsys.readouterr().err
