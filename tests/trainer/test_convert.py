"""Hugging Face's config.json and tensors."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from ling_trainer import convert
from ling_trainer.model import ling2
from ling_trainer.model_config import ModelConfig
from ling_trainer.presets import ling2_tiny

FOLDER = Path(__file__).parents[1] / "golden" / "ling" / "ling_v2_5_tiny"


@pytest.fixture
def hf_config() -> dict[str, Any]:
    return json.loads((FOLDER / "config.json").read_text())


@pytest.fixture
def tensors() -> dict[str, Any]:
    return load_file(FOLDER / "model.safetensors")


def read(hf_config: dict[str, Any]) -> ModelConfig:
    return ModelConfig.model_validate(convert.config_from_hf(hf_config), strict=True)


def test_tensors_survive_the_way_there_and_back_bit_by_bit(
    hf_config: dict[str, Any], tensors: dict[str, Any]
) -> None:
    config = read(hf_config)
    back = convert.params_to_hf(*reversed_arguments(convert.hf_to_params(tensors, config), config))
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor)


def reversed_arguments(pair: tuple[Any, Any], config: ModelConfig) -> tuple[Any, Any, Any]:
    params, router_bias = pair
    return params, config, router_bias


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_hidden_layers": 7, "first_k_dense_replace": 1, "layer_group_size": 3},
        {"num_hidden_layers": 3, "layer_group_size": 2, "first_k_dense_replace": 3},
        {"q_lora_rank": None, "num_nextn_predict_layers": 0, "num_shared_experts": 0},
        {"num_nextn_predict_layers": 2, "first_k_dense_replace": 0},
    ],
)
def test_converted_trees_look_like_initial_ones(change: dict[str, Any]) -> None:
    config = ModelConfig.model_validate(ling2_tiny()["model"] | change)
    expected = jax.eval_shape(lambda: ling2.init_params(config, seed=0))
    numbers = np.random.default_rng(0)
    drawn = jax.tree.map(lambda x: numbers.normal(size=x.shape).astype(np.float32), expected)
    bias = numbers.normal(size=(config.num_routers, config.num_experts)).astype(np.float32)
    tensors = convert.params_to_hf(drawn, config, bias)
    params, router_bias = convert.hf_to_params(tensors, config)
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, params, drawn)
    np.testing.assert_array_equal(router_bias, bias)


def test_missing_left_over_and_misshapen_tensors_are_all_named(
    hf_config: dict[str, Any], tensors: dict[str, Any]
) -> None:
    del tensors["model.norm.weight"]
    tensors["model.layers.9.surprise"] = np.zeros(3)
    tensors["lm_head.weight"] = np.zeros((256, 63))
    with pytest.raises(ValueError, match=r"model\.norm\.weight is missing") as error:
        convert.hf_to_params(tensors, read(hf_config))
    assert "model.layers.9.surprise belongs to no parameter" in str(error.value)
    assert "lm_head.weight has shape [256, 63], not [256, 64]" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["BailingMoeV3ForCausalLM"]}, "architectures="),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling="),
        ({"partial_rotary_factor": 1.0}, "qk_rope_head_dim=8"),
    ],
)
def test_a_config_this_model_cannot_be_is_refused(
    hf_config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        convert.config_from_hf(hf_config | change)


def test_missing_fields_of_a_config_are_named(hf_config: dict[str, Any]) -> None:
    del hf_config["n_group"], hf_config["kv_lora_rank"]
    with pytest.raises(ValueError, match="fields are missing: kv_lora_rank, n_group"):
        convert.config_from_hf(hf_config)


def test_fields_that_tensors_do_not_depend_on_may_be_missing(hf_config: dict[str, Any]) -> None:
    del hf_config["initializer_range"], hf_config["num_nextn_predict_layers"]
    config = read(hf_config)
    assert (config.initializer_range, config.num_nextn_predict_layers) == (0.006, 0)


def test_rotary_dim_stands_in_for_a_missing_partial_rotary_factor(
    hf_config: dict[str, Any],
) -> None:
    del hf_config["partial_rotary_factor"]
    settings = convert.config_from_hf(hf_config | {"rotary_dim": 8})
    assert settings["partial_rotary_factor"] == 0.5


def test_slope_offset_is_hugging_faces_unless_the_file_says_otherwise(
    hf_config: dict[str, Any],
) -> None:
    assert convert.config_from_hf(hf_config)["lightning_slope_layer_offset"] == 1
    ours = hf_config | {"lightning_slope_layer_offset": 0}
    assert convert.config_from_hf(ours)["lightning_slope_layer_offset"] == 0
