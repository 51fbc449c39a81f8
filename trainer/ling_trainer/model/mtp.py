"""Multi-token prediction: one more block for each token further ahead, and the rolls it needs.

B sequences, S tokens, D hidden width.
Source: DeepSeek-V3 (arXiv 2412.19437) section 2.2; Megatron-LM
megatron/core/transformer/multi_token_prediction.py@d98e8a64.
"""

from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int, Shaped

from ling_trainer.model.block import Block
from ling_trainer.model.layers import RMSNorm, Tokens, normal, project
from ling_trainer.model.router import LayerStats
from ling_trainer.model_config import ModelConfig

type Roll = Literal["segment", "plain"]


class PredictionDepth(nnx.Module):
    """Predict one token further than the states that come in.

    h' = final_norm(block(eh_proj [enorm(E[next token]) | hnorm(h)])); the block is MLA (gqa, if
    the backbone is) with a mixture of experts. Parameters: enorm, hnorm, eh_proj [2D, D], block,
    final_norm.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(width, eps=eps)
        self.hnorm = RMSNorm(width, eps=eps)
        self.eh_proj = normal(rngs, (2 * width, width), std=config.initializer_range)
        attention = config.attention_of(config.num_hidden_layers)
        self.block = Block(config, attention=attention, feed_forward="moe", rngs=rngs)
        self.final_norm = RMSNorm(width, eps=eps)

    def __call__(
        self,
        hidden: Float[Array, "B S D"],
        embedded: Float[Array, "B S D"],
        tokens: Tokens,
        expert_bias: Float[Array, " E"],
    ) -> tuple[Float[Array, "B S D"], LayerStats | None]:
        """Return normalised float32 states, from which the next depth and the head both start.

        Args:
          hidden: normalised states of the depth before; depth 1 takes the backbone's.
          embedded: embeddings, in the compute type, of the tokens one further ahead.
          tokens: positions, documents and validity as in the backbone.
          expert_bias: of this depth's router.
        """
        joined = [self.enorm(embedded), self.hnorm(hidden.astype(embedded.dtype))]
        x = project("bsd,de->bse", jnp.concatenate(joined, axis=-1), self.eh_proj)
        x, stats = self.block(x, tokens, expert_bias, None)
        return self.final_norm(x, jnp.float32), stats


def roll(
    x: Shaped[Array, "B S"], segment_ids: Int[Array, "B S"], *, shift: int, fill: int, by: Roll
) -> Shaped[Array, "B S"]:
    """Shift left within each document (by="segment") or each row (by="plain")."""
    if by == "segment":
        return roll_within_segments(x, segment_ids, shift=shift, fill=fill)
    return roll_plain(x, shift=shift, fill=fill)


def roll_within_segments(
    x: Shaped[Array, "B S"], segment_ids: Int[Array, "B S"], *, shift: int, fill: int
) -> Shaped[Array, "B S"]:
    """Shift left by `shift` without crossing a document.

    Args:
      x: tokens, labels or a mask.
      segment_ids: the documents; 0 is padding.
      shift: 1 <= shift < S.
      fill: value in padding, and where the source lies in another document or past the row.

    Raises:
      ValueError: shift outside [1, S).

    Example: [A0 A1 A2 B0 B1], shift 1 -> [A1 A2 fill B1 fill].
    """
    source = roll_plain(segment_ids, shift=shift, fill=0)
    inside = (source == segment_ids) & (segment_ids != 0)
    return jnp.where(inside, roll_plain(x, shift=shift, fill=fill), jnp.asarray(fill, x.dtype))


def roll_plain(x: Shaped[Array, "B S"], *, shift: int, fill: int) -> Shaped[Array, "B S"]:
    """Shift rows left by `shift`, across documents; the last `shift` places become `fill`.

    Raises:
      ValueError: shift outside [1, S).
    """
    length = x.shape[1]
    if not 1 <= shift < length:
        msg = f"shift={shift} is outside [1, {length}), the sequence's length; predict less far"
        raise ValueError(msg)
    return jnp.pad(x[:, shift:], ((0, 0), (0, shift)), constant_values=fill)
