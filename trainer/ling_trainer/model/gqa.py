"""Grouped-query attention, of Ling 2.0. B sequences, S tokens, D width, H heads, K key heads.

Source: Ainslie et al. 2023 (arXiv 2305.13245); inclusionAI/Ling-V2
models/modeling_bailing_moe_v2.py for norms, rotation and the order of the projection.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from ling_trainer.model.layers import RMSNorm, Tokens, normal, project, rotate_half_split
from ling_trainer.model.mla import causal_attention
from ling_trainer.model_config import ModelConfig


class GroupedQueryAttention(nnx.Module):
    """Causal attention in which H / K consecutive query heads share a head of keys and values.

    Queries and keys are normalised over a head, then rotated in part. Parameters: qkv
    [D, H + 2 K, head_dim] (all queries, all keys, all values), q_norm, k_norm,
    out [H, head_dim, D].
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        c, heads = config, config.num_attention_heads
        std, together = c.initializer_range, heads + 2 * c.key_value_heads
        self.qkv = normal(rngs, (c.hidden_size, together, c.head_dim), std=std)
        self.q_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.out = normal(rngs, (heads, c.head_dim, c.hidden_size), std=std)
        self.config = config

    def __call__(self, x: Float[Array, "B S D"], tokens: Tokens) -> Float[Array, "B S D"]:
        """Attend to earlier tokens, of the same document if `tokens.documents` is given."""
        c, heads, shared = (
            self.config,
            self.config.num_attention_heads,
            self.config.key_value_heads,
        )
        qkv = project("bsd,dhe->bshe", x, self.qkv)
        q, k, v = jnp.split(qkv, (heads, heads + shared), axis=2)
        q, k = (
            rotate_half_split(norm(z), tokens.positions, theta=c.rope_theta, width=c.rotary_dim)
            for z, norm in ((q, self.q_norm), (k, self.k_norm))
        )
        k, v = (jnp.repeat(z, heads // shared, axis=2) for z in (k, v))
        mixed = causal_attention(q, k, v, documents=tokens.documents)
        return project("bshe,hed->bsd", mixed, self.out)
