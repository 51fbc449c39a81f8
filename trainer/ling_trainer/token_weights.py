"""The one place where a loss is normalised, before the backward pass and never after.

K micro-batches, b sequences each, S tokens; D loss groups (virtual Megatron ranks): the rows of a
micro-batch are D consecutive equal blocks.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int


def token_weights(
    mask: Bool[Array, "K b S"], *, calculate_per_token_loss: bool, loss_groups: int = 1
) -> Float[Array, "K b S"]:
    """Return the weight of every token's cross-entropy in the step's loss.

    With W the tokens of the step and n_kd those of group (k, d), a token with a loss weighs

        1 / max(W, 1)                per token
        1 / (K D max(n_kd, 1))       per micro-batch

    so that the language model loss is a dot product and micro-batches simply add up. The weights
    of an empty group are 0 and are not handed to the others: Megatron counts an empty
    micro-batch as a loss of 0 at full weight, and the sum is then below 1.

    Args:
      mask: positions with a loss.
      calculate_per_token_loss: Megatron's flag; False averages inside each group first.
      loss_groups: D.

    Raises:
      ValueError: loss_groups does not divide b.

    Source: Megatron-LM megatron/core/pipeline_parallel/schedules.py@d98e8a64, forward_step.
    Example: masks of 3 and 1 tokens in two micro-batches weigh 1/4 each per token; per
      micro-batch 1/6 for the three and 1/2 for the one.
    """
    if calculate_per_token_loss:
        return mask / jnp.maximum(mask.sum(), 1).astype(jnp.float32)
    counts = group_counts(mask, loss_groups=loss_groups)
    per_token = 1.0 / (counts.size * jnp.maximum(counts, 1).astype(jnp.float32))
    rows = jnp.repeat(per_token, mask.shape[1] // loss_groups, axis=1)
    return jnp.where(mask, rows[:, :, None], 0.0)


def aux_shares(
    mask: Bool[Array, "K b S"], *, calculate_per_token_loss: bool, loss_groups: int = 1
) -> Float[Array, "K D"]:
    """Return what an auxiliary loss of each group counts in the step's objective.

    An auxiliary loss (balance, router z, multi-token prediction) is a mean already, so it is
    multiplied by its group's share:

        W_kd / W       per token
        1 / (K D)      per micro-batch, for an empty group too

    The shares add up to 1 and are not the sums of `token_weights`: those are 0 for an empty
    group, whose router still has tokens to balance. One micro-batch of one group has share 1 in
    both modes, even without a token with a loss; more of them have 0 in a step without any.

    Args:
      mask: positions with a loss.
      calculate_per_token_loss: see `token_weights`.
      loss_groups: D.

    Raises:
      ValueError: loss_groups does not divide b.
    """
    counts = group_counts(mask, loss_groups=loss_groups)
    uniform = jnp.full(counts.shape, 1.0 / counts.size, jnp.float32)
    if not calculate_per_token_loss:
        return uniform
    total = counts.sum()
    empty = uniform if counts.shape[0] == 1 else jnp.zeros_like(uniform)
    return jnp.where(total > 0, counts / jnp.maximum(total, 1).astype(jnp.float32), empty)


def group_counts(mask: Bool[Array, "K b S"], *, loss_groups: int) -> Int[Array, "K D"]:
    """Count the tokens with a loss of each group.

    Raises:
      ValueError: loss_groups does not divide b.
    """
    num_microbatches, rows, length = mask.shape
    if rows % loss_groups:
        msg = (
            f"loss_groups={loss_groups} does not divide the {rows} rows of a micro-batch; choose "
            "a divisor, or a global batch that is a multiple of micro-batches x loss_groups"
        )
        raise ValueError(msg)
    grouped = mask.reshape(num_microbatches, loss_groups, rows // loss_groups * length)
    return grouped.sum(-1, dtype=jnp.int32)
