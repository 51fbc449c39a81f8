"""Multi-head latent attention. B sequences, S tokens, D hidden width, H heads.

Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1; BailingMoeV2_5's modeling file for the norms.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from ling_trainer.model.layers import (
    RMSNorm,
    Tokens,
    normal,
    project,
    rotate_interleaved,
)
from ling_trainer.model.products import precision
from ling_trainer.model_config import ModelConfig

# The norms of the compressed streams have this epsilon in the reference, not rms_norm_eps.
_LATENT_EPS = 1e-6


class MultiHeadLatentAttention(nnx.Module):
    """Causal attention whose keys and values come from one low-rank latent per token.

    The rotated part of the key is shared by all heads. Parameters: q [D, H, nope + rope], or
    q_a [D, q_lora], q_a_norm and q_b [q_lora, H, nope + rope]; kv_a [D, kv_lora + rope],
    kv_a_norm, kv_b [kv_lora, H, nope + v]; out [H, v, D].
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        c, std = config, config.initializer_range
        heads, query = c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
        if c.q_lora_rank is None:
            self.q = normal(rngs, (c.hidden_size, heads, query), std=std)
        else:
            self.q_a = normal(rngs, (c.hidden_size, c.q_lora_rank), std=std)
            self.q_a_norm = RMSNorm(c.q_lora_rank, eps=_LATENT_EPS)
            self.q_b = normal(rngs, (c.q_lora_rank, heads, query), std=std)
        self.kv_a = normal(rngs, (c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim), std=std)
        self.kv_a_norm = RMSNorm(c.kv_lora_rank, eps=_LATENT_EPS)
        key_value = c.qk_nope_head_dim + c.v_head_dim
        self.kv_b = normal(rngs, (c.kv_lora_rank, heads, key_value), std=std)
        self.out = normal(rngs, (heads, c.v_head_dim, c.hidden_size), std=std)
        self.config = config

    def __call__(self, x: Float[Array, "B S D"], tokens: Tokens) -> Float[Array, "B S D"]:
        """Attend to earlier tokens, of the same document if `tokens.documents` is given."""
        c, nope = self.config, self.config.qk_nope_head_dim
        q = self._queries(x)
        latent = project("bsd,dr->bsr", x, self.kv_a)
        shared = latent[:, :, None, c.kv_lora_rank :]
        latent = self.kv_a_norm(latent[..., : c.kv_lora_rank])
        key_value = project("bsr,rhe->bshe", latent, self.kv_b)
        k, v = key_value[..., :nope], key_value[..., nope:]
        turned = rotate_interleaved(q[..., nope:], tokens.positions, theta=c.rope_theta)
        shared = rotate_interleaved(shared, tokens.positions, theta=c.rope_theta)
        shared = jnp.broadcast_to(shared, turned.shape)
        q = jnp.concatenate([q[..., :nope], turned], axis=-1)
        k = jnp.concatenate([k, shared], axis=-1)
        mixed = causal_attention(q, k, v, documents=tokens.documents)
        return project("bshv,hvd->bsd", mixed, self.out)

    def _queries(self, x: Float[Array, "B S D"]) -> Float[Array, "B S H d"]:
        if self.config.q_lora_rank is None:
            return project("bsd,dhe->bshe", x, self.q)
        latent = self.q_a_norm(project("bsd,dr->bsr", x, self.q_a))
        return project("bsr,rhe->bshe", latent, self.q_b)


def causal_attention(
    q: Float[Array, "B S H d"],
    k: Float[Array, "B S H d"],
    v: Float[Array, "B S H v"],
    *,
    documents: Int[Array, "B S"] | None,
) -> Float[Array, "B S H v"]:
    """Return softmax(q k / sqrt(d)) v over earlier tokens and the token itself.

    Scores and softmax are float32. All scores of a row exist at once: S^2 memory per head.

    Args:
      q: queries, rotated but not scaled.
      k: keys.
      v: values; their width may differ from the keys'.
      documents: tokens with different ids do not see each other; None: only causality masks.
    """
    scores = jnp.einsum(
        "bqhd,bkhd->bhqk",
        q,
        k,
        precision=precision(q.dtype),
        preferred_element_type=jnp.float32,
    )
    scores = scores * q.shape[-1] ** -0.5
    scores = jnp.where(_visible(q.shape[1], documents), scores, -jnp.inf)
    shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bhqk,bkhv->bqhv", shares, v, precision=precision(v.dtype))


def _visible(length: int, documents: Int[Array, "B S"] | None) -> Bool[Array, "B 1 S S"]:
    causal = jnp.tril(jnp.ones((1, 1, length, length), bool))
    if documents is None:
        return causal
    return causal & (documents[:, None, :, None] == documents[:, None, None, :])
