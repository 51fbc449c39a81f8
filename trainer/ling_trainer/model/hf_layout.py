"""Where Hugging Face's BailingMoeV2 and V2_5 tensors lie in our parameters: a table of leaves.

A torch matrix is [out, in]; ours are [in, out], with heads and experts as dimensions of their
own, and matrices with a common input joined.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from ling_trainer.model_config import ModelConfig

type Tensors = Mapping[str, Shaped[np.ndarray, "..."]]


@dataclass(frozen=True)
class Leaf:
    """One parameter of ours and the tensors it is made of."""

    path: tuple[str, ...]
    names: tuple[tuple[str, ...], ...]  # for each expert (or once): tensors joined along rows
    rows: tuple[int, ...]  # of each joined tensor
    columns: int | None  # None: vectors
    shape: tuple[int, ...]  # of ours
    transposed: bool = True

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """Indices into this parameter of what can be read alone: each expert, or the whole."""
        return [(i,) for i in range(len(self.names))] if len(self.names) > 1 else [()]

    def read(self, tensors: Tensors) -> Float[np.ndarray, "..."]:
        """Join tensors to this parameter."""
        if len(self.names) == 1:
            return self.read_part(tensors, ())
        return np.stack([self.read_part(tensors, part) for part in self.parts])

    def read_part(self, tensors: Tensors, part: tuple[int, ...]) -> Float[np.ndarray, "..."]:
        """Join the tensors of one of `parts`."""
        names = self.names[part[0] if part else 0]
        joined = np.concatenate([tensors[name] for name in names])
        matrix = joined.T if self.transposed else joined
        return matrix.astype(np.float32).reshape(self.shape[len(part) :])

    def write(self, value: Any) -> Iterator[tuple[str, Float[np.ndarray, "..."]]]:
        """Split this parameter into named tensors."""
        for part in self.parts:
            yield from self.write_part(np.asarray(value[part]), part)

    def write_part(
        self, value: Shaped[np.ndarray, "..."], part: tuple[int, ...]
    ) -> Iterator[tuple[str, Float[np.ndarray, "..."]]]:
        """Split one of `parts` into named tensors."""
        whole = self.tensor_shape(sum(self.rows))
        matrix = value.astype(np.float32, copy=False)
        matrix = matrix.reshape(whole[::-1]).T if self.transposed else matrix.reshape(whole)
        tensors = np.split(matrix, np.cumsum(self.rows)[:-1])
        yield from zip(self.names[part[0] if part else 0], tensors, strict=True)

    def tensor_shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of a tensor of so many rows."""
        return (rows,) if self.columns is None else (rows, self.columns)


def bias_names(config: ModelConfig) -> list[str]:
    """Return the tensors of the routers' biases: MoE layers, then prediction depths."""
    first = config.first_k_dense_replace
    last = config.num_hidden_layers + config.num_nextn_predict_layers
    return [f"model.layers.{layer}.mlp.gate.expert_bias" for layer in range(first, last)]


def model_leaves(config: ModelConfig) -> list[Leaf]:
    """Return the leaves outside the blocks."""
    vocab, width = config.vocab_size, config.hidden_size
    embedding = ("model.word_embeddings.weight",)
    return [
        Leaf(("embedding",), (embedding,), (vocab,), width, (vocab, width), transposed=False),
        _vector("norm.scale", "model.norm.weight", width),
        _matrix("head", ["lm_head.weight"], [vocab], width),
    ]


def depth_leaves(config: ModelConfig, depth: int) -> list[Leaf]:
    """Return the leaves of a prediction depth (from 0) besides its block."""
    width, layer = config.hidden_size, f"model.layers.{config.num_hidden_layers + depth}."
    return [
        _vector("enorm.scale", layer + "enorm.weight", width),
        _vector("hnorm.scale", layer + "hnorm.weight", width),
        _matrix("eh_proj", [layer + "eh_proj.weight"], [width], 2 * width),
        _vector("final_norm.scale", layer + "final_layernorm.weight", width),
    ]


def block_leaves(config: ModelConfig, layer: int) -> list[Leaf]:
    """Return the leaves of a block; layers from num_hidden_layers on are prediction depths."""
    name, width = f"model.layers.{layer}.", config.hidden_size
    kinds = {"mla": _mla_leaves, "lightning": _lightning_leaves, "gqa": _gqa_leaves}
    attention = kinds[config.attention_of(layer)]
    after = "post_attention_layernorm.weight"
    return [
        _vector("input_norm.scale", name + "input_layernorm.weight", width),
        _vector("post_attention_norm.scale", name + after, width),
        *attention(config, name + "attention."),
        *_feed_forward_leaves(config, name + "mlp.", moe=config.is_moe(layer)),
    ]


def _lightning_leaves(config: ModelConfig, name: str) -> list[Leaf]:
    width, heads, head = config.hidden_size, config.num_attention_heads, config.head_dim
    inner = heads * head
    qkvg = [name + "query_key_value.weight", name + "g_proj.weight"]
    return [
        _matrix("attention.qkvg", qkvg, [3 * inner, inner], width, (width, 4, heads, head)),
        _vector("attention.q_norm.scale", name + "query_layernorm.weight", head),
        _vector("attention.k_norm.scale", name + "key_layernorm.weight", head),
        _vector("attention.g_norm.scale", name + "g_norm.weight", inner),
        _matrix("attention.out", [name + "dense.weight"], [width], inner, (heads, head, width)),
    ]


def _gqa_leaves(config: ModelConfig, name: str) -> list[Leaf]:
    width, heads, head = config.hidden_size, config.num_attention_heads, config.head_dim
    together = heads + 2 * config.key_value_heads
    qkv, out = [name + "query_key_value.weight"], [name + "dense.weight"]
    return [
        _matrix("attention.qkv", qkv, [together * head], width, (width, together, head)),
        _vector("attention.q_norm.scale", name + "query_layernorm.weight", head),
        _vector("attention.k_norm.scale", name + "key_layernorm.weight", head),
        _matrix("attention.out", out, [width], heads * head, (heads, head, width)),
    ]


def _mla_leaves(config: ModelConfig, name: str) -> list[Leaf]:
    c, width, heads = config, config.hidden_size, config.num_attention_heads
    query, value = c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
    pair, latent = c.qk_nope_head_dim + value, c.kv_lora_rank
    down, rope = name + "kv_a_proj_with_mqa.weight", c.qk_rope_head_dim

    def queries(path: str, tensor: str, inputs: int) -> Leaf:
        return _matrix(path, [name + tensor], [heads * query], inputs, (inputs, heads, query))

    if c.q_lora_rank is None:
        leaves = [queries("attention.q", "q_proj.weight", width)]
    else:
        leaves = [
            _matrix("attention.q_a", [name + "q_a_proj.weight"], [c.q_lora_rank], width),
            _vector("attention.q_a_norm.scale", name + "q_a_layernorm.weight", c.q_lora_rank),
            queries("attention.q_b", "q_b_proj.weight", c.q_lora_rank),
        ]
    up, out = [name + "kv_b_proj.weight"], [name + "dense.weight"]
    return [
        *leaves,
        _matrix("attention.kv_a", [down], [latent + rope], width),
        _vector("attention.kv_a_norm.scale", name + "kv_a_layernorm.weight", latent),
        _matrix("attention.kv_b", up, [heads * pair], latent, (latent, heads, pair)),
        _matrix("attention.out", out, [width], heads * value, (heads, value, width)),
    ]


def _feed_forward_leaves(config: ModelConfig, name: str, *, moe: bool) -> list[Leaf]:
    width = config.hidden_size
    if not moe:
        return _swiglu_leaves("mlp", name, width, config.intermediate_size)
    experts, inner = config.num_experts, config.moe_intermediate_size
    each = [f"{name}experts.{e}." for e in range(experts)]
    pairs = tuple((n + "gate_proj.weight", n + "up_proj.weight") for n in each)
    downs = tuple((n + "down_proj.weight",) for n in each)
    gate_up, down = (experts, width, 2 * inner), (experts, inner, width)
    leaves = [
        _matrix("mlp.router", [name + "gate.weight"], [experts], width),
        Leaf(("mlp", "experts", "gate_up"), pairs, (inner, inner), width, gate_up),
        Leaf(("mlp", "experts", "down"), downs, (width,), inner, down),
    ]
    if config.num_shared_experts:
        shared = name + "shared_experts."
        leaves += _swiglu_leaves("mlp.shared", shared, width, config.shared_expert_width)
    return leaves


def _swiglu_leaves(path: str, name: str, width: int, inner: int) -> list[Leaf]:
    gate_up = [name + "gate_proj.weight", name + "up_proj.weight"]
    return [
        _matrix(path + ".gate_up", gate_up, [inner, inner], width),
        _matrix(path + ".down", [name + "down_proj.weight"], [width], inner),
    ]


def _matrix(
    path: str,
    names: Sequence[str],
    rows: Sequence[int],
    columns: int,
    shape: tuple[int, ...] | None = None,
) -> Leaf:
    whole = shape or (columns, sum(rows))
    return Leaf(tuple(path.split(".")), (tuple(names),), tuple(rows), columns, whole)


def _vector(path: str, name: str, width: int) -> Leaf:
    keys = tuple(path.split("."))
    return Leaf(keys, ((name,),), (width,), None, (width,), transposed=False)
