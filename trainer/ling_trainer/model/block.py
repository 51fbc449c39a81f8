"""One pre-norm residual block: attention, then feed-forward. B sequences, S tokens, D width."""

from typing import Literal

from flax import nnx
from jax import Array
from jaxtyping import Float

from ling_trainer.model.gla import LightningAttention
from ling_trainer.model.gqa import GroupedQueryAttention
from ling_trainer.model.layers import RMSNorm, SwiGLU, Tokens
from ling_trainer.model.mla import MultiHeadLatentAttention
from ling_trainer.model.moe import MixtureOfExperts
from ling_trainer.model.router import LayerStats
from ling_trainer.model_config import AttentionKind, ModelConfig

type FeedForward = Literal["dense", "moe"]


class Block(nnx.Module):
    """x += attention(norm(x)); x += feed_forward(norm(x)).

    Parameters: input_norm, attention, post_attention_norm, mlp.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        attention: AttentionKind,
        feed_forward: FeedForward,
        rngs: nnx.Rngs,
    ) -> None:
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(width, eps=eps)
        match attention:
            case "mla":
                self.attention = MultiHeadLatentAttention(config, rngs=rngs)
            case "lightning":
                self.attention = LightningAttention(config, rngs=rngs)
            case "gqa":
                self.attention = GroupedQueryAttention(config, rngs=rngs)
        self.post_attention_norm = RMSNorm(width, eps=eps)
        match feed_forward:
            case "dense":
                std = config.initializer_range
                self.mlp = SwiGLU(width, config.intermediate_size, std=std, rngs=rngs)
            case "moe":
                self.mlp = MixtureOfExperts(config, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        tokens: Tokens,
        expert_bias: Float[Array, " E"],
        log_decay: Float[Array, " H"] | None,
    ) -> tuple[Float[Array, "B S D"], LayerStats | None]:
        """Apply the block.

        Args:
          x: the residual stream, in the compute type.
          tokens: positions, documents and validity.
          expert_bias: of this layer's router; only a mixture of experts reads it.
          log_decay: of this layer's heads; only lightning attention needs it.

        Returns: The stream, and the router's statistics (None for a dense layer).
        """
        normed = self.input_norm(x)
        if isinstance(self.attention, LightningAttention):
            assert log_decay is not None  # noqa: S101 - our own bug
            x = x + self.attention(normed, tokens, log_decay)
        else:
            x = x + self.attention(normed, tokens)
        normed = self.post_attention_norm(x)
        if isinstance(self.mlp, MixtureOfExperts):
            y, stats = self.mlp(normed, tokens, expert_bias)
            return x + y, stats
        return x + self.mlp(normed), None
