"""Model outputs and token weights to one micro-batch's loss. No mode flag is read here.

b sequences, S tokens, D hidden width, V vocabulary; R loss groups (virtual Megatron ranks: R
consecutive equal blocks of rows); H depths of multi-token prediction; L routers; E experts.
"""

from collections.abc import Callable
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Bool, Float, Int

from ling_trainer.auxiliaries import (
    RunningLoads,
    balance_loss,
    indexer_loss,
    router_z_loss,
)
from ling_trainer.batch import Batch
from ling_trainer.config import LossConfig
from ling_trainer.head_loss import Logits, Params, head_loss
from ling_trainer.model.mtp import Roll, roll
from ling_trainer.model.outputs import ModelOutputs
from ling_trainer.token_weights import group_counts

# Parameters, router biases [L E] and a batch to hidden states and auxiliaries.
type Apply = Callable[[Params, Array, Batch], ModelOutputs]


@no_type_check  # a pytree also holds shapes, shardings and NumPy arrays
@struct.dataclass
class LossTerms:
    """What is reported of a micro-batch, scaled so that `+` over all of them gives the step's.

    Language model terms are weighted by the token weights; auxiliaries are plain means over
    micro-batches and groups, while the objective weighs them by their shares.
    """

    objective: Float[Array, ""]  # what the gradient is the derivative of
    lm: Float[Array, ""]  # cross-entropy alone
    z: Float[Array, ""]  # the head's z-loss, coefficient inside
    xent_sum: Float[Array, ""]  # lm and z before weighting, for the token average
    z_sum: Float[Array, ""]
    mtp_loss: Float[Array, ""]  # factor inside; raw_ without
    raw_mtp_loss: Float[Array, ""]
    mtp_depth_losses: Float[Array, " H"]  # each depth by its own tokens, no factor
    moe_lb_loss: Float[Array, ""]  # coefficient inside, summed over routers
    load_balancing_loss: Float[Array, ""]  # no coefficient, mean over routers
    moe_z_loss: Float[Array, ""]
    raw_moe_z_loss: Float[Array, ""]
    expert_counts: Int[Array, "L E"]
    # None where the model or the configuration has no such thing.
    loads: Int[Array, "L E"] | None = None  # of a plain top-k; kept for global_aux_loss
    indexer_loss: Float[Array, ""] | None = None  # coefficient inside
    router_topk_weight_mean: Float[Array, ""] | None = None  # mean over routers
    router_probs_std: Float[Array, ""] | None = None


def microbatch_loss(
    params: Params,
    router_bias: Float[Array, "L E"],
    batch: Batch,
    weights: Float[Array, "b S"],
    share: Float[Array, " R"],
    *,
    apply: Apply,
    logits: Logits,
    config: LossConfig,
    num_microbatches: int,
    previous: RunningLoads | None = None,
) -> tuple[Float[Array, ""], LossTerms]:
    """Return the objective to differentiate and the terms to report.

        objective = sum(weights * (xent + z)) + sum_r share_r * aux_r
        aux_r = mtp_r + balance_r + router_z_r, and indexer_r where it is configured

    Args:
      params: what the gradient is taken of.
      router_bias: one for each expert of each router; no gradient.
      batch: one micro-batch.
      weights: of each token, from `token_weights`.
      share: of each loss group, from `aux_shares`.
      apply: the model; its router statistics have one row for each loss group.
      logits: the output head.
      config: coefficients, and how depths of multi-token prediction are pooled.
      num_microbatches: what reported auxiliaries are averaged over.
      previous: the step's earlier micro-batches; for global_aux_loss alone.
    """
    outputs = apply(params, router_bias, batch)
    head = head_loss(
        params, outputs.hidden, batch.targets, batch.loss_mask, weights,
        logits=logits, depth=0, z_loss_multiplier=config.z_loss_multiplier,
        num_vocab_tiling=config.num_vocab_tiling,
    )  # fmt: skip
    mtp = _mtp_loss(params, outputs.mtp_hidden, batch, share, logits=logits, config=config)
    router = outputs.router
    balance = balance_loss(router, share, config=config, previous=previous)
    router_z = router_z_loss(router, share, config=config)
    indexer = indexer_loss(outputs.indexer_loss, share, config=config)
    objective = head.objective + mtp.objective + balance.objective + router_z.objective
    if indexer:
        objective += indexer.objective
    terms = LossTerms(
        objective=objective,
        lm=jnp.sum(weights * head.xent),
        z=jnp.sum(weights * head.z),
        xent_sum=head.xent.sum(),
        z_sum=head.z.sum(),
        mtp_loss=mtp.contribution / num_microbatches,
        raw_mtp_loss=mtp.raw / num_microbatches,
        mtp_depth_losses=mtp.depths / num_microbatches,
        moe_lb_loss=balance.contribution / num_microbatches,
        load_balancing_loss=balance.raw / num_microbatches,
        moe_z_loss=router_z.contribution / num_microbatches,
        raw_moe_z_loss=router_z.raw / num_microbatches,
        expert_counts=router.expert_counts,
        loads=router.loads if previous else None,
        indexer_loss=indexer.contribution / num_microbatches if indexer else None,
        router_topk_weight_mean=_mean_over_routers(router.topk_weight, num_microbatches),
        router_probs_std=_mean_over_routers(router.probs_std, num_microbatches),
    )
    return objective, jax.lax.stop_gradient(terms)


def mtp_targets(
    batch: Batch, *, depth: int, mtp_roll: Roll
) -> tuple[Int[Array, "b S"], Bool[Array, "b S"]]:
    """Return target and mask of the depth-th prediction: at t those of position t + depth.

    The mask is the rolled loss mask; with mtp_roll=segment it also ends at each document's end.

    Source: Megatron-LM megatron/core/transformer/multi_token_prediction.py@d98e8a64.
    """
    segments = batch.segment_ids
    targets = roll(batch.targets, segments, shift=depth, fill=0, by=mtp_roll)
    mask = roll(batch.loss_mask, segments, shift=depth, fill=0, by=mtp_roll)
    return targets, mask & (segments != 0) if mtp_roll == "segment" else mask


@no_type_check  # a pytree also holds shapes, shardings and NumPy arrays
@struct.dataclass
class _MtpLoss:
    objective: Float[Array, ""]
    contribution: Float[Array, ""]
    raw: Float[Array, ""]
    depths: Float[Array, " H"]


def _mtp_loss(
    params: Params,
    hiddens: tuple[Float[Array, "b S D"], ...],
    batch: Batch,
    share: Float[Array, " R"],
    *,
    logits: Logits,
    config: LossConfig,
) -> _MtpLoss:
    """Average each group over its own tokens, depth by depth or all depths pooled."""
    if not hiddens:
        zero = jnp.zeros((), jnp.float32)
        return _MtpLoss(zero, zero, zero, jnp.zeros((0,), jnp.float32))
    groups, factor = share.shape[0], config.mtp_loss_scaling_factor
    shifted = [
        mtp_targets(batch, depth=depth, mtp_roll=config.mtp_roll)
        for depth in range(1, len(hiddens) + 1)
    ]
    masks = jnp.stack([mask for _, mask in shifted])  # [H b S]
    counts = group_counts(masks, loss_groups=groups)  # [H R]
    own = jnp.maximum(counts, 1).astype(jnp.float32)
    pooled = jnp.broadcast_to(jnp.maximum(counts.sum(0), 1), counts.shape).astype(jnp.float32)
    divisors = own * len(hiddens) if config.mtp_per_layer_loss_norm else pooled
    objective, sums = jnp.zeros((), jnp.float32), []
    for index, (hidden, (targets, mask)) in enumerate(zip(hiddens, shifted, strict=True)):
        per_row = jnp.repeat(factor * share / divisors[index], mask.shape[0] // groups)
        head = head_loss(
            params, hidden, targets, mask, jnp.where(mask, per_row[:, None], 0.0),
            logits=logits, depth=index + 1, z_loss_multiplier=0.0,
            num_vocab_tiling=config.num_vocab_tiling,
        )  # fmt: skip
        objective += head.objective
        sums.append(head.xent.reshape(groups, -1).sum(-1))
    summed = jnp.stack(sums)  # [H R]
    raw = (summed / divisors).sum(0).mean()
    return _MtpLoss(objective, factor * raw, raw, (summed / own).mean(1))


def _mean_over_routers(value: Float[Array, " L"] | None, num: int) -> Float[Array, ""] | None:
    return None if value is None else value.mean() / num
