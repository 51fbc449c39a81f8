"""One optimizer step as a pure function: batch to new state and report. Start reading here.

L routers (MoE layers, then multi-token prediction blocks); E experts; K micro-batches.
"""

from dataclasses import replace
from enum import IntEnum
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array
from jaxtyping import Float, Int

from ling_trainer.accumulate import accumulate
from ling_trainer.auxiliaries import RunningLoads, no_loads, with_microbatch
from ling_trainer.batch import Batch, split_microbatches
from ling_trainer.config import RunConfig
from ling_trainer.head_loss import Logits, Params
from ling_trainer.loss import Apply, LossTerms, microbatch_loss
from ling_trainer.optimizer import clip_factor, global_norm, router_bias_update
from ling_trainer.report import StepReport, count_zeros, num_elements
from ling_trainer.schedule import full_batches, learning_rate
from ling_trainer.token_weights import aux_shares, token_weights


@no_type_check  # a pytree also holds shapes, shardings and NumPy arrays
@struct.dataclass
class TrainState:
    """What a checkpoint holds, the data position apart."""

    step: Int[Array, ""]  # finished steps
    params: Params
    opt_state: Any
    router_bias: Float[Array, "L E"]  # outside params: no gradient, decay or clipping reaches it


class Poison(IntEnum):
    """What a drill spoils."""

    NONE = 0
    NAN_LOSS = 1
    INF_LOSS = 2
    NAN_GRADIENT = 3


def init_state(
    params: Params,
    router_bias: Float[Array, "L E"],
    tx: optax.GradientTransformationExtraArgs,
) -> TrainState:
    """Return the state before the first step; works under jax.eval_shape."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=tx.init(params),
        router_bias=router_bias,
    )


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    apply: Apply,
    logits: Logits,
    tx: optax.GradientTransformationExtraArgs,
    config: RunConfig,
    poison: Int[Array, ""] | None = None,
) -> tuple[TrainState, StepReport]:
    """Run one step.

    A step whose loss or raw gradient norm is not finite, and a step without a token with a loss,
    change neither parameters, optimizer state nor router biases; the step counts all the same, so
    data and learning rate move on.

    Args:
      state: may be donated.
      batch: the global batch; row i belongs to micro-batch i mod K.
      apply: the model, configured.
      logits: its output head.
      tx: from `make_optimizer(config.optimizer)`.
      config: static under jit (it hashes).
      poison: a value of `Poison`, for drills; None leaves the drill out of the program.

    Returns:
      The state after the step, and its report (still on device).
    """
    terms, grads = loss_and_gradients(
        state.params, state.router_bias, batch, apply=apply, logits=logits, config=config
    )
    if poison is not None:
        terms, grads = _poisoned(terms, grads, poison)
    total_weights = batch.loss_mask.sum(dtype=jnp.int32)
    return apply_gradients(state, terms, grads, total_weights=total_weights, tx=tx, config=config)


def loss_and_gradients(
    params: Params,
    router_bias: Float[Array, "L E"],
    batch: Batch,
    *,
    apply: Apply,
    logits: Logits,
    config: RunConfig,
) -> tuple[LossTerms, Params]:
    """Return the step's terms and its float32 gradients, normalised and not clipped.

    Args: see `train_step`.
    """
    num_microbatches, loss = config.num_microbatches_of(batch.loss_mask.shape[0]), config.loss
    micro = split_microbatches(batch, num_microbatches=num_microbatches)
    # MaxText's tunix accumulation averages each micro-batch, like Megatron without the flag.
    per_token = loss.calculate_per_token_loss and not loss.use_tunix_gradient_accumulation
    weights = token_weights(
        micro.loss_mask, calculate_per_token_loss=per_token, loss_groups=loss.loss_groups
    )
    shares = aux_shares(
        micro.loss_mask, calculate_per_token_loss=per_token, loss_groups=loss.loss_groups
    )

    def grad_fn(
        params: Params, slices: Any, previous: RunningLoads | None
    ) -> tuple[LossTerms, Params, RunningLoads | None]:
        grads, terms = jax.grad(microbatch_loss, has_aux=True)(
            params, router_bias, *slices, apply=apply, logits=logits, config=loss,
            num_microbatches=num_microbatches, previous=previous,
        )  # fmt: skip
        return terms, grads, with_microbatch(previous, terms.loads) if previous else None

    return accumulate(
        grad_fn, params, (micro, weights, shares),
        num_microbatches=num_microbatches, carry=no_loads(router_bias, loss),
    )  # fmt: skip


def apply_gradients(
    state: TrainState,
    terms: LossTerms,
    grads: Params,
    *,
    total_weights: Int[Array, ""],
    tx: optax.GradientTransformationExtraArgs,
    config: RunConfig,
) -> tuple[TrainState, StepReport]:
    """Clip, update parameters and router biases if the step counts, and report.

    Args: see `train_step`.
      terms: of the whole step.
      grads: normalised, not clipped.
      total_weights: tokens with a loss.
    """
    optim = config.optimizer
    offloaded = optim.optimizer_memory_host_offload
    if offloaded:  # where it comes back to is told by the program's output shardings
        opt_state = jax.device_put(state.opt_state, jax.memory.Space.Device)
        state = replace(state, opt_state=opt_state)
    lm_loss, z_loss, token_avg = _reported_lm(terms, total_weights, config)
    loss = lm_loss + z_loss + terms.moe_lb_loss + terms.moe_z_loss + terms.mtp_loss
    if terms.indexer_loss is not None:
        loss += terms.indexer_loss
    raw_norm, rate = global_norm(grads), _learning_rate(config, state.step)
    factor = clip_factor(raw_norm, threshold=optim.gradient_clipping_threshold)
    is_finite = jnp.isfinite(loss) & jnp.isfinite(raw_norm)
    new_state = _updated(state, terms, grads, factor=factor, rate=rate, tx=tx, config=config)
    new_state = _choose(is_finite & (total_weights > 0), new_state, state)
    new_state = replace(new_state, step=state.step + 1)
    report = StepReport(
        step=new_state.step,
        terms=terms,
        loss=loss,
        lm_loss=lm_loss,
        z_loss=z_loss,
        lm_loss_token_avg=token_avg,
        total_weights=total_weights,
        raw_grad_norm=raw_norm,
        grad_norm=raw_norm * factor,
        param_norm=global_norm(new_state.params),
        learning_rate=rate,
        zeros_by_row=None if offloaded else count_zeros(grads),
        is_finite=is_finite,
        num_grad_elements=num_elements(grads),
        router_bias_mean=_mean_of_routers(state.router_bias.mean(-1)),
        router_bias_std=_mean_of_routers(state.router_bias.std(-1)),
    )
    return new_state, report


def _updated(
    state: TrainState,
    terms: LossTerms,
    grads: Params,
    *,
    factor: Float[Array, ""],
    rate: Float[Array, ""],
    tx: optax.GradientTransformationExtraArgs,
    config: RunConfig,
) -> TrainState:
    """Update parameters by their clipped gradients, then the routers' biases by their counts."""
    clipped = jax.tree.map(lambda g: g * factor, grads)
    updates, opt_state = tx.update(clipped, state.opt_state, state.params, learning_rate=rate)
    router_bias = router_bias_update(
        state.router_bias,
        terms.expert_counts,
        rate=config.optimizer.routed_bias_update_rate,
        bias_update=config.optimizer.bias_update,
    )
    params = optax.apply_updates(state.params, updates)
    return replace(state, params=params, opt_state=opt_state, router_bias=router_bias)


def _learning_rate(config: RunConfig, step: Int[Array, ""]) -> Float[Array, ""]:
    """Return the rate of a step; Megatron's schedules count samples, in full batches here."""
    if not (sizes := config.ramp_up):
        return learning_rate(config.optimizer, step)
    whole, fraction = full_batches(sizes, step)
    return learning_rate(config.optimizer, whole, fraction=fraction)


def _reported_lm(
    terms: LossTerms, total_weights: Int[Array, ""], config: RunConfig
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Return lm_loss and z_loss by the loss mode, and lm_loss averaged over all tokens."""
    tokens = jnp.maximum(total_weights, 1).astype(jnp.float32)
    token_avg = terms.xent_sum / tokens
    if config.loss.use_tunix_gradient_accumulation:
        return token_avg, terms.z_sum / tokens, token_avg
    return terms.lm, terms.z, token_avg


def _mean_of_routers(value: Float[Array, " L"]) -> Float[Array, ""] | None:
    return value.mean() if value.size else None


def _choose(condition: Array, new: TrainState, old: TrainState) -> TrainState:
    """Select a whole state; what is not chosen may hold NaN."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def _poisoned(terms: LossTerms, grads: Params, poison: Int[Array, ""]) -> tuple[LossTerms, Params]:
    """Spoil the loss or the gradients as asked; with Poison.NONE every value stays bitwise."""

    def spoil(value: Array) -> Array:
        infinite = jnp.where(poison == Poison.INF_LOSS, jnp.inf, value)
        return jnp.where(poison == Poison.NAN_LOSS, jnp.nan, infinite)

    terms = replace(terms, lm=spoil(terms.lm), xent_sum=spoil(terms.xent_sum))
    hit = poison == Poison.NAN_GRADIENT
    return terms, jax.tree.map(lambda g: jnp.where(hit, jnp.nan, g), grads)
