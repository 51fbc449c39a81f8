"""Forward pass on a validation batch: sums and counts, to be divided once, at the very end.

B sequences, S tokens, K micro-batches of b = B / K; H depths of multi-token prediction.
"""

import math
from collections.abc import Sequence
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import struct
from jax import Array
from jaxtyping import Bool, Float, Int

from ling_trainer.batch import Batch, split_microbatches
from ling_trainer.config import RunConfig
from ling_trainer.head_loss import Logits, Params, head_loss
from ling_trainer.loss import Apply, mtp_targets


@no_type_check  # a pytree also holds shapes, shardings and NumPy arrays
@struct.dataclass
class EvalSums:
    """Cross-entropies and tokens of each row. A row without a token with a loss adds nothing.

    By row, and not by batch, because the host adds them up in float64: neither the number of
    micro-batches nor that of batches then shows in the last digit.
    """

    xent: Float[Array, "K b"]
    tokens: Int[Array, "K b"]
    mtp_xent: Float[Array, "K b H"]
    mtp_tokens: Int[Array, "K b H"]


def eval_step(
    params: Params,
    router_bias: Float[Array, "L E"],
    batch: Batch,
    *,
    apply: Apply,
    logits: Logits,
    config: RunConfig,
) -> EvalSums:
    """Sum the cross-entropy of every row, micro-batch by micro-batch as in training.

    No mode of normalisation is read: whatever calculate_per_token_loss says, an evaluation is a
    sum over all tokens divided by their number (eval_log). No gradient is taken and router biases
    stay as they are.

    Args:
      params: of the model.
      router_bias: one for each expert of each router.
      batch: the global batch; padding rows have no token with a loss.
      apply: the model, configured.
      logits: its output head.
      config: how many micro-batches, and how targets of multi-token prediction are rolled.
    """

    def microbatch(micro: Batch) -> EvalSums:
        outputs = apply(params, router_bias, micro)
        heads = [(outputs.hidden, micro.targets, micro.loss_mask)]
        for depth, hidden in enumerate(outputs.mtp_hidden, start=1):
            shifted = mtp_targets(micro, depth=depth, mtp_roll=config.loss.mtp_roll)
            heads.append((hidden, *shifted))
        sums = [
            _row_sums(
                params, *head, logits=logits, depth=depth, tiling=config.loss.num_vocab_tiling
            )
            for depth, head in enumerate(heads)
        ]
        xent, tokens = (jnp.stack(values, axis=-1) for values in zip(*sums, strict=True))
        return EvalSums(xent[:, 0], tokens[:, 0], xent[:, 1:], tokens[:, 1:])

    micro = split_microbatches(batch, num_microbatches=config.gradient_accumulation_steps)
    return jax.lax.map(microbatch, micro)


def eval_log(batches: Sequence[EvalSums], *, mtp_per_layer_loss_norm: bool) -> dict[str, float]:
    """Return the evaluation's log keys: all of health_metrics.EVALUATED.

    lm_loss = sum of cross-entropies / max(tokens, 1), over all batches: a mean of batch means
    would give a token of a short batch more weight than one of a full batch. mtp_loss has no
    factor and is pooled as learning/raw_mtp_loss is.

    Args:
      batches: on the host (jax.device_get). A value that is not finite stays so.
      mtp_per_layer_loss_norm: average each depth by its own tokens, then the depths; otherwise
        divide the sum over depths by all their tokens.

    Source: Megatron-LM megatron/training/training.py@d98e8a64 (evaluate): sums over iterations.
    """
    xent, tokens = _total([(sums.xent, sums.tokens) for sums in batches])
    mtp_xent, mtp_tokens = _total([(sums.mtp_xent, sums.mtp_tokens) for sums in batches])
    if mtp_per_layer_loss_norm and mtp_xent.size:
        mtp_loss = np.mean(mtp_xent / np.maximum(mtp_tokens, 1))
    else:
        mtp_loss = mtp_xent.sum() / max(mtp_tokens.sum(), 1)
    lm_loss = float(xent / max(tokens, 1))
    return {
        "eval/lm_loss": lm_loss,
        "eval/mtp_loss": float(mtp_loss),
        "eval/perplexity": _exp(lm_loss),
        "eval/total_weights": int(tokens),
    }


def _total(batches: Sequence[tuple[Any, Any]]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Add up sums and counts over batches, micro-batches and rows; depths stay apart."""
    sums = [np.sum(xent, axis=(0, 1), dtype=np.float64) for xent, _ in batches]
    counts = [np.sum(tokens, axis=(0, 1), dtype=np.int64) for _, tokens in batches]
    return np.asarray(np.sum(sums, axis=0)), np.asarray(np.sum(counts, axis=0))


def _row_sums(
    params: Params,
    hidden: Float[Array, "b S D"],
    targets: Int[Array, "b S"],
    mask: Bool[Array, "b S"],
    *,
    logits: Logits,
    depth: int,
    tiling: int,
) -> tuple[Float[Array, " b"], Int[Array, " b"]]:
    """Return the sum of each row's cross-entropies, and its tokens with a loss."""
    head = head_loss(
        params, hidden, targets, mask, mask.astype(jnp.float32),
        logits=logits, depth=depth, z_loss_multiplier=0.0, num_vocab_tiling=tiling,
    )  # fmt: skip
    return head.xent.sum(-1), mask.sum(-1, dtype=jnp.int32)


def _exp(value: float) -> float:
    """Return e to the value, infinity where it overflows."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
