"""From Hugging Face to a run and back, by real processes."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from hf_models import CONFIGS, random_tensors, write_hf
from ling_trainer.cli import main
from ling_trainer.hf_config import config_to_hf
from ling_trainer.model_config import ModelConfig

pytestmark = pytest.mark.slow


def test_a_run_that_learns_nothing_gives_back_the_hugging_face_tensors_it_began_with(
    launch: Any, tmp_path: Path
) -> None:
    config = ModelConfig.model_validate(CONFIGS["wide shared expert"] | {"vocab_size": 512})
    tensors = random_tensors(config, "float32")
    source = write_hf(tmp_path / "hf", tensors, config_to_hf(config), shards=2)
    assert main(["convert", "hf-to-ling", str(source), str(tmp_path / "ling")]) == 0
    model = yaml.safe_load((tmp_path / "ling" / "model.yaml").read_text())["model"]
    settings = {
        "steps": 2,
        "model": model,
        "learning_rate": 1e-30,  # less than half a unit in the last place of any weight
        "routed_bias_update_rate": 0.0,
        "load_parameters_path": str(tmp_path / "ling"),
    }
    run = launch("from-hf", settings)
    assert run.wait() == [0], run.output()
    back = tmp_path / "back"
    assert main(["convert", "ling-to-hf", str(run.run_directory), str(back)]) == 0
    found = load_file(back / "model.safetensors")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].tobytes() == tensor.tobytes(), name
