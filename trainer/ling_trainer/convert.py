"""Hugging Face's config.json and tensors of BailingMoeV2_5, to and from this model's.

L routers, E experts.
"""

import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from ling_trainer.model.hf_layout import (
    Leaf,
    Tensors,
    bias_names,
    block_leaves,
    depth_leaves,
    model_leaves,
)
from ling_trainer.model.ling2 import Params, layer_layout
from ling_trainer.model_config import ModelConfig
from ling_trainer.presets import Settings

_ARCHITECTURE = "BailingMoeV2_5ForCausalLM"
_REQUIRED = {
    "hidden_act": "silu",
    "use_qkv_bias": False,
    "use_bias": False,
    "tie_word_embeddings": False,
    "rope_scaling": None,
    "rope_interleave": True,
    "use_qk_norm": True,
    "linear_silu": False,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
_SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "intermediate_size",
    "first_k_dense_replace",
    "layer_group_size",
    "group_norm_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_theta",
    "rms_norm_eps",
    "num_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "num_shared_experts",
    "moe_intermediate_size",
    "routed_scaling_factor",
    "num_nextn_predict_layers",
    "initializer_range",
)


def config_from_hf(config: Mapping[str, Any]) -> Settings:
    """Return the settings of section `model` for a Hugging Face config.json.

    The file does not say how lightning attention's decay counts layers. Unless it holds our own
    `lightning_slope_layer_offset`, the offset is 1, as in the modeling code that it names.

    Raises:
      ValueError: another architecture, a missing field, or a feature this model does not have.
    """
    architectures = config.get("architectures")
    if architectures != [_ARCHITECTURE]:
        msg = f"architectures={architectures} cannot be read; only [{_ARCHITECTURE!r}] can"
        raise ValueError(msg)
    problems = [
        f"{name}={config[name]!r} is not supported; it must be {value!r}"
        for name, value in _REQUIRED.items()
        if config.get(name, value) != value
    ]
    missing = [name for name in _SAME_NAME if name not in config]
    if missing:
        problems.append(f"fields are missing: {', '.join(missing)}")
    if problems:
        raise ValueError("config.json: " + "; ".join(problems))
    settings: Settings = {name: config[name] for name in _SAME_NAME}
    for name in ("rope_theta", "routed_scaling_factor"):
        settings[name] = float(settings[name])
    shared = config.get("moe_shared_expert_intermediate_size")
    settings["moe_shared_expert_intermediate_size"] = shared
    settings["partial_rotary_factor"] = _partial_rotary_factor(config)
    settings["lightning_slope_layer_offset"] = config.get("lightning_slope_layer_offset", 1)
    return settings


def hf_to_params(tensors: Tensors, config: ModelConfig) -> tuple[Params, Float[np.ndarray, "L E"]]:
    """Return parameters and router biases, float32, from Hugging Face's tensors.

    Args:
      tensors: every tensor of the checkpoint by name, no more and no less.
      config: of the same architecture; see config_from_hf.

    Raises:
      ValueError: tensors are missing, left over or of another shape; all of them are named.
    """
    _check(tensors, config)

    def tree(leaves: Iterable[Leaf]) -> Params:
        return _nest({leaf.path: leaf.read(tensors) for leaf in leaves})

    def block(layer: int) -> Params:
        return tree(block_leaves(config, layer))

    layout, count = layer_layout(config), config.num_hidden_layers
    params = tree(model_leaves(config))
    params["prefix"] = [block(layer) for layer in range(layout.prefix)]
    end = layout.prefix + layout.groups * layout.group_size
    params["groups"] = [
        jax.tree.map(lambda *xs: np.stack(xs), *map(block, range(first, end, layout.group_size)))
        for first in range(layout.prefix, min(layout.prefix + layout.group_size, end))
    ]
    params["tail"] = [block(layer) for layer in range(end, count)]
    depths = range(config.num_nextn_predict_layers)
    params["mtp"] = [
        tree(depth_leaves(config, depth)) | {"block": block(count + depth)} for depth in depths
    ]
    biases = [np.asarray(tensors[name], np.float32) for name in bias_names(config)]
    return params, np.asarray(biases, np.float32).reshape(-1, config.num_experts)


def params_to_hf(
    params: Params, config: ModelConfig, router_bias: Float[Any, "L E"] | None = None
) -> Tensors:
    """Return Hugging Face's tensors, float32; the inverse of hf_to_params.

    Args:
      params: parameters, or any tree like them, such as their gradients.
      config: of the same architecture.
      router_bias: written too, if given; a gradient has none.
    """
    layout, count = layer_layout(config), config.num_hidden_layers
    tail = layout.prefix + layout.groups * layout.group_size
    blocks = dict(enumerate(params["prefix"])) | dict(enumerate(params["tail"], start=tail))
    for place, stacked in enumerate(params["groups"]):
        for group in range(layout.groups):
            layer = layout.prefix + group * layout.group_size + place
            blocks[layer] = jax.tree.map(lambda x, group=group: x[group], stacked)
    trees = [(params, model_leaves(config))]
    for depth, tree in enumerate(params["mtp"]):
        trees.append((tree, depth_leaves(config, depth)))
        blocks[count + depth] = tree["block"]
    trees += [(tree, block_leaves(config, layer)) for layer, tree in blocks.items()]
    tensors = {
        name: tensor
        for tree, leaves in trees
        for leaf in leaves
        for name, tensor in leaf.write(functools.reduce(operator.getitem, leaf.path, tree))
    }
    if router_bias is not None:
        tensors |= zip(bias_names(config), np.asarray(router_bias, np.float32), strict=True)
    return tensors


def _check(tensors: Tensors, config: ModelConfig) -> None:
    count, depths = config.num_hidden_layers, config.num_nextn_predict_layers
    leaves = list(model_leaves(config))
    for layer in range(count + depths):
        leaves += block_leaves(config, layer)
    for depth in range(depths):
        leaves += depth_leaves(config, depth)
    expected: dict[str, tuple[int, ...]] = {
        name: leaf.tensor_shape(rows)
        for leaf in leaves
        for names in leaf.names
        for name, rows in zip(names, leaf.rows, strict=True)
    }
    expected |= dict.fromkeys(bias_names(config), (config.num_experts,))
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} belongs to no parameter" for name in tensors if name not in expected]
    problems += [
        f"{name} has shape {list(tensors[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if problems:
        shown = "; ".join(problems[:20])
        more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        msg = f"tensors do not fit the configuration: {shown}{more}"
        raise ValueError(msg)


def _partial_rotary_factor(config: Mapping[str, Any]) -> float:
    """Return the rotated share of a head; files that lack it may have rotary_dim (Ling-1T)."""
    head = config["head_dim"]
    factor = config.get("partial_rotary_factor", config.get("rotary_dim", head) / head)
    if round(head * factor) != config["qk_rope_head_dim"]:
        msg = (
            f"config.json: head_dim x partial_rotary_factor = {head * factor:g} differs from "
            f"qk_rope_head_dim={config['qk_rope_head_dim']}; the modeling code has one rotation "
            "table for both kinds of attention, so no such checkpoint can exist"
        )
        raise ValueError(msg)
    return float(factor)


def _nest(flat: Mapping[tuple[str, ...], Any]) -> Params:
    tree: Params = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree
