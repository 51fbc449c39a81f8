"""Grouped-query attention, and the layout of Ling 2.0's parameters."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from hf_models import CONFIGS, random_tensors
from ling_trainer.config import MeshConfig
from ling_trainer.convert import hf_to_params, tensor_shapes
from ling_trainer.hf_config import config_to_hf
from ling_trainer.model.gqa import GroupedQueryAttention
from ling_trainer.model.hf_layout import bias_names
from ling_trainer.model.layers import Tokens
from ling_trainer.model.ling2 import init_params
from ling_trainer.model_config import ModelConfig
from ling_trainer.presets import ling2
from ling_trainer.sharding import make_mesh, param_shardings

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
TOKENS = 12


def config_of(**change: Any) -> ModelConfig:
    return ModelConfig.model_validate(CONFIGS["gqa"] | change)


def attention(config: ModelConfig) -> GroupedQueryAttention:
    return GroupedQueryAttention(config, rngs=nnx.Rngs(0))


def attend(module: GroupedQueryAttention, x: jax.Array, where: Tokens) -> jax.Array:
    """Call the module compiled as one: operation by operation is a hundred compilations."""
    return jax.jit(lambda x: module(x, where), compiler_options=FAST_COMPILE)(x)


def stream(rows: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (rows, TOKENS, 32))


def tokens(positions: Any, documents: Any = None) -> Tokens:
    positions = jnp.asarray(positions)
    valid = jnp.ones(positions.shape, bool)
    return Tokens(positions=positions, documents=documents, valid=valid, loss_groups=1)


def test_a_group_of_queries_reads_the_same_head_of_keys_and_values() -> None:
    """Repeating each shared head of the projection gives attention without sharing."""
    shared, alone = attention(config_of()), attention(config_of(num_key_value_heads=4))
    q, k, v = jnp.split(shared.qkv[...], (4, 6), axis=1)
    whole = jnp.concatenate([q, jnp.repeat(k, 2, axis=1), jnp.repeat(v, 2, axis=1)], axis=1)
    alone.qkv[...], alone.out[...] = whole, shared.out[...]
    x, where = stream(2), tokens(jnp.tile(jnp.arange(TOKENS), (2, 1)))
    np.testing.assert_allclose(attend(shared, x, where), attend(alone, x, where), atol=1e-7)
    order = jnp.concatenate([q, k[:, ::-1], v[:, ::-1]], axis=1)
    shared.qkv[...] = order  # the groups' order is not arbitrary
    difference = attend(shared, x, where) - attend(alone, x, where)
    assert np.abs(np.asarray(difference)).max() > 1e-6


def test_packed_documents_are_those_of_separate_rows() -> None:
    module, x, cut = attention(config_of()), stream(1), 5
    rest = TOKENS - cut
    documents = jnp.asarray([[1] * cut + [2] * rest])
    packed = attend(module, x, tokens([[*range(cut), *range(rest)]], documents))
    for rows in (slice(0, cut), slice(cut, TOKENS)):
        length = x[:, rows].shape[1]
        alone = attend(module, x[:, rows], tokens([range(length)]))
        np.testing.assert_allclose(packed[:, rows], alone, atol=1e-7)


def test_a_token_does_not_see_later_ones() -> None:
    module, x = attention(config_of()), stream(1)
    where = tokens([range(TOKENS)])
    changed = attend(module, x.at[:, 7:].add(1.0), where)
    np.testing.assert_array_equal(attend(module, x, where)[:, :7], changed[:, :7])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads"),
        ({"layer_group_size": 5}, "layer_group_size=5 is of attention_type=hybrid"),
        ({"kv_lora_rank": 16}, "kv_lora_rank=16 is of attention_type=hybrid"),
        ({"attention_type": "hybrid"}, "layer_group_size is not set; attention_type=hybrid"),
    ],
)
def test_settings_of_the_other_attention_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads=1: with attention_type=hybrid every"),
        ({"v_head_dim": 0}, "v_head_dim is not set"),
        ({"num_hidden_layers": 1, "first_k_dense_replace": 1}, "needs at least 2 layers"),
    ],
)
def test_a_hybrid_needs_all_of_its_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate(CONFIGS["hybrid"] | change)


def test_initial_parameters_look_like_converted_ones_and_can_be_sharded() -> None:
    config = config_of()
    initial = jax.eval_shape(lambda: init_params(config, seed=0))
    converted, _ = hf_to_params(random_tensors(config, np.float32), config)
    shapes = [jax.tree.map(lambda x: x.shape, tree) for tree in (initial, converted)]
    assert shapes[0] == shapes[1]
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    spec = param_shardings(initial, mesh)["groups"][0]["attention"]["qkv"].spec
    assert spec == PartitionSpec(None, ("fsdp", "expert"), "tensor", None)


LING_2 = {
    "attention_type": "gqa", "vocab_size": 157_184, "head_dim": 128, "rope_theta": 1e4,
    "num_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "num_shared_experts": 1,
}  # fmt: skip
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
         "intermediate_size", "moe_intermediate_size", "first_k_dense_replace")  # fmt: skip
PUBLISHED = {
    "mini": ((20, 2048, 16, 4, 5120, 512, 1), 16.256),
    "flash": ((32, 4096, 32, 4, 9216, 1024, 1), 102.9),
    "1T": ((80, 8192, 64, 8, 18432, 2048, 4), 999.7),
}


def parameters(config: ModelConfig) -> int:
    biases = set(bias_names(config))
    shapes = tensor_shapes(config)
    return sum(math.prod(shape) for name, shape in shapes.items() if name not in biases)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_tensors_of_ling_2_come_to_the_published_number_of_parameters(name: str) -> None:
    sizes, billions = PUBLISHED[name]
    config = ModelConfig.model_validate(LING_2 | dict(zip(SIZES, sizes, strict=True)))
    digits = 3 if name == "mini" else 1
    assert round(parameters(config) / 1e9, digits) == billions


def test_the_tensors_of_the_teams_ling2_come_to_its_number_of_parameters() -> None:
    config = ModelConfig.model_validate(ling2()["model"])
    assert parameters(config) == 16_595_936_256 + 835_595_008  # backbone, one prediction depth
    assert config_to_hf(config)["moe_shared_expert_intermediate_size"] == 2048
