"""Lightning attention: gated linear attention with one constant decay per head and layer.

B sequences, T tokens, H heads, D head width, C tokens a chunk, N chunks.
Source: Qin et al. 2024 (arXiv 2401.04658); flash-linear-attention's simple_gla for the names.
"""

import math
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax import Array, lax
from jaxtyping import Float, Int

from ling_trainer.model.layers import (
    RMSNorm,
    Tokens,
    normal,
    project,
    rotate_half_split,
)
from ling_trainer.model.products import precision
from ling_trainer.model_config import ModelConfig


@no_type_check
@struct.dataclass
class Retention:
    """Outputs of linear attention and the state after the last token."""

    outputs: Float[Array, "B T H D"]
    state: Float[Array, "B H D D"]


class LightningAttention(nnx.Module):
    """Linear attention with QK-norm, partial RoPE, a group norm and a sigmoid gate.

    Parameters: qkvg [D, 4, H, head_dim] (queries, keys, values and gate as one projection),
    q_norm and k_norm over a head, g_norm over each of group_norm_size groups of the output,
    out [H, head_dim, D].
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        c, heads = config, config.num_attention_heads
        std = c.initializer_range
        self.qkvg = normal(rngs, (c.hidden_size, 4, heads, c.head_dim), std=std)
        self.q_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.g_norm = RMSNorm(heads * c.head_dim, eps=c.rms_norm_eps, groups=c.group_norm_size)
        self.out = normal(rngs, (heads, c.head_dim, c.hidden_size), std=std)
        self.config = config

    def __call__(
        self, x: Float[Array, "B T d"], tokens: Tokens, log_decay: Float[Array, " H"]
    ) -> Float[Array, "B T d"]:
        """Mix earlier tokens, of the same document if `tokens.documents` is given."""
        c = self.config
        qkvg = project("btd,dphe->btphe", x, self.qkvg)
        q, k = (
            rotate_half_split(
                norm(qkvg[:, :, part]), tokens.positions, theta=c.rope_theta, width=c.rotary_dim
            )
            for part, norm in ((0, self.q_norm), (1, self.k_norm))
        )
        mixed = lightning_attention(
            q,
            k,
            qkvg[:, :, 2],
            log_decay=log_decay,
            documents=tokens.documents,
            initial_state=None,
            chunk_size=c.chunk_size,
        ).outputs
        flat = self.g_norm(mixed.reshape(*x.shape[:2], -1)).reshape(mixed.shape)
        gate = jax.nn.sigmoid(qkvg[:, :, 3].astype(jnp.float32))
        gated = (flat.astype(jnp.float32) * gate).astype(x.dtype)
        return project("bthe,hed->btd", gated, self.out)


def log_decays(config: ModelConfig) -> Float[np.ndarray, "L H"]:
    """Return the logarithm of the decay per token of every layer (as if all were lightning).

    -slope_h * (1 - (l - lightning_slope_layer_offset) / (num_hidden_layers - 1) + 1e-5).
    """
    last = max(config.num_hidden_layers - 1, 1)  # gqa, which has no decay, may have one layer
    layers = np.arange(config.num_hidden_layers) - config.lightning_slope_layer_offset
    scales = 1 - layers / last + 1e-5
    return np.asarray(-scales[:, None] * base_slopes(config.num_attention_heads), np.float32)


def base_slopes(heads: int) -> Float[np.ndarray, " H"]:
    """Return ALiBi's slopes: 2^(-8 (i + 1) / heads), interleaved if heads is no power of two.

    Source: Press et al. 2022 (arXiv 2108.12409) section 3 and its released code.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-8 * np.arange(1, 2 * power + 1, 2) / (2 * power))
    return np.concatenate([slopes, between[: heads - power]])


def lightning_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T H D"],
    v: Float[Array, "B T H D"],
    *,
    log_decay: Float[Array, " H"],
    documents: Int[Array, "B T"] | None,
    initial_state: Float[Array, "B H D D"] | None,
    chunk_size: int,
) -> Retention:
    """Compute recurrent_attention chunk by chunk: products inside a chunk, a state between.

    Any T is allowed; the last chunk may be incomplete. A document may begin anywhere: inside a
    chunk other documents are masked, and the state reaches only tokens of the document it holds.

    Args:
      q: queries, not scaled.
      k: keys.
      v: values.
      log_decay: below zero, the same for every token of a head.
      documents: the state is forgotten where the id changes; None: never. An id must not come
        back later in a row.
      initial_state: state before the first token, of its document; None: zeros.
      chunk_size: tokens a chunk; the result does not depend on it.

    Returns: Outputs in the queries' type, state in float32.
    """
    batch, length, heads, width = q.shape
    size = min(chunk_size, length)
    count = -(-length // size)
    exact = precision(q.dtype)
    qc, kc, vc = (_chunks(x.astype(jnp.float32), count, size) for x in (q, k, v))
    qc = qc * width**-0.5
    ids = jnp.zeros((batch, length), jnp.int32) if documents is None else documents
    ids = _chunks(ids, count, size, mode="edge")
    ends = ids[:, :, -1]
    carried = jnp.concatenate([ids[:1, :, 0], ends[:-1]])

    decay = _Decay.of(log_decay, length=length, size=size, count=count)
    same = (ids[:, :, :, None] == ids[:, :, None, :])[:, :, None]
    scores = jnp.einsum("nbihd,nbjhd->nbhij", qc, kc, precision=exact)
    scores = jnp.where(same, scores * decay.within, 0.0)
    inside = jnp.einsum("nbhij,nbjhe->nbihe", scores, vc, precision=exact)

    kept = jnp.where(ids == ends[:, :, None], 1.0, 0.0)[..., None, None]
    keys = kc * kept * decay.to_end[:, None, :, :, None]
    added = jnp.einsum("nbjhd,nbjhe->nbhde", keys, vc, precision=exact)
    survives = jnp.where(ends == carried, 1.0, 0.0)[:, :, None] * decay.whole[:, None]
    state = jnp.zeros(added.shape[1:]) if initial_state is None else initial_state
    state, before = lax.scan(_advance, state, (survives, added))

    reached = jnp.where(ids == carried[:, :, None], 1.0, 0.0)[..., None, None]
    queries = qc * reached * decay.from_start[None, None, :, :, None]
    outputs = inside + jnp.einsum("nbihd,nbhde->nbihe", queries, before, precision=exact)
    outputs = outputs.swapaxes(0, 1).reshape(batch, count * size, heads, width)
    return Retention(outputs[:, :length].astype(q.dtype), state)


def recurrent_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T H D"],
    v: Float[Array, "B T H D"],
    *,
    log_decay: Float[Array, " H"],
    documents: Int[Array, "B T"] | None,
    initial_state: Float[Array, "B H D D"] | None,
) -> Retention:
    """Compute the recurrence that defines lightning attention, one token at a time.

    S_t = exp(log_decay) S_(t-1) + k_t v_t^T, o_t = D^-1/2 q_t^T S_t, with S_(t-1) = 0 where a
    document begins. Slow; lightning_attention is the same function for training.
    """
    batch, length, heads, width = q.shape
    ids = jnp.zeros((batch, length), jnp.int32) if documents is None else documents
    starts = jnp.concatenate([jnp.zeros((batch, 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    keep = jnp.where(starts[..., None], 0.0, jnp.exp(log_decay))
    exact = lax.Precision.HIGHEST

    def token(state: Array, xs: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        qt, kt, vt, kept = xs
        added = jnp.einsum("bhd,bhe->bhde", kt, vt, precision=exact)
        state = state * kept[..., None, None] + added
        return state, jnp.einsum("bhd,bhde->bhe", qt * width**-0.5, state, precision=exact)

    state = initial_state
    if state is None:
        state = jnp.zeros((batch, heads, width, width), jnp.float32)
    qs, ks, vs, keeps = (x.astype(jnp.float32).swapaxes(0, 1) for x in (q, k, v, keep))
    state, outputs = lax.scan(token, state, (qs, ks, vs, keeps))
    return Retention(outputs.swapaxes(0, 1).astype(q.dtype), state)


@no_type_check
@struct.dataclass
class _Decay:
    within: Float[Array, "H C C"]  # from token j to token i >= j of a chunk
    from_start: Float[Array, "C H"]  # from the state before a chunk to its token i
    to_end: Float[Array, "N C H"]  # from token j to the end of its chunk
    whole: Float[Array, "N H"]  # over a chunk

    @classmethod
    def of(cls, log_decay: Array, *, length: int, size: int, count: int) -> "_Decay":
        place = np.arange(size)
        distance = place[:, None] - place
        # Masked before the exponential: exp(|g| C) overflows, and inf * 0 is NaN in gradients.
        within = jnp.exp(log_decay[:, None, None] * np.maximum(distance, 0))
        within = jnp.where(distance >= 0, within, 0.0)
        sizes = np.minimum(size, length - size * np.arange(count))
        after = np.maximum(sizes[:, None] - 1 - place, 0)
        return cls(
            within=within,
            from_start=jnp.exp(log_decay * (place + 1)[:, None]),
            to_end=jnp.exp(log_decay * after[..., None]),
            whole=jnp.exp(log_decay * sizes[:, None]),
        )


def _chunks(x: Array, count: int, size: int, mode: str = "constant") -> Array:
    missing = count * size - x.shape[1]
    x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), mode=mode)
    return x.reshape(x.shape[0], count, size, *x.shape[2:]).swapaxes(0, 1)


def _advance(state: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
    survives, added = chunk
    return state * survives[..., None, None] + added, state
