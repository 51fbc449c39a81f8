"""Auxiliary losses of routers and indexers: which form, and what they weigh in the objective.

R loss groups; L routers; E experts.
"""

from dataclasses import replace
from typing import no_type_check

import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Float, Int

from ling_trainer.config import LossConfig
from ling_trainer.model.outputs import RouterStats
from ling_trainer.schema import ConfigError


@no_type_check  # a pytree also holds shapes, shardings and NumPy arrays
@struct.dataclass
class RunningLoads:
    """What global_aux_loss remembers of the step's earlier micro-batches."""

    loads: Float[Array, "L E"]  # summed over them
    microbatches: Float[Array, ""]


@no_type_check
@struct.dataclass
class Auxiliary:
    """One auxiliary loss of a micro-batch. Only `objective` carries a gradient."""

    objective: Float[Array, ""]  # weighed by the groups' shares, coefficient inside
    contribution: Float[Array, ""]  # mean over groups, coefficient inside
    raw: Float[Array, ""]  # as Megatron logs it: no coefficient, mean over layers


def no_loads(router_bias: Float[Array, "L E"], config: LossConfig) -> RunningLoads | None:
    """Return what global_aux_loss starts a step with; None for the forms that look at nothing."""
    if config.moe_router_load_balancing_type != "global_aux_loss":
        return None
    return RunningLoads(jnp.zeros(router_bias.shape, jnp.float32), jnp.zeros((), jnp.float32))


def with_microbatch(previous: RunningLoads, loads: Int[Array, "L E"]) -> RunningLoads:
    """Return the running loads with one more micro-batch."""
    return RunningLoads(previous.loads + loads, previous.microbatches + 1)


def balance_loss(
    router: RouterStats,
    share: Float[Array, " R"],
    *,
    config: LossConfig,
    previous: RunningLoads | None,
) -> Auxiliary:
    """Return the balance loss in the form of moe_router_load_balancing_type.

    global_aux_loss spreads a group's scores against the mean load of the micro-batches so far:

        E sum_i mean_load_i / (sum_j load_j) * sum_t q_ti / T

    with load and T of this micro-batch and all its groups, t over one group. So each group's is
    about 1/R of the whole, and with R Megatron ranks the gradient too; what is logged is the sum.
    The first micro-batches see fewer tokens, so the order of micro-batches matters.

    Args:
      router: of one micro-batch.
      share: of each group, from `aux_shares`.
      config: form and coefficient.
      previous: the step's earlier micro-batches; for global_aux_loss alone.

    Raises:
      ConfigError: the model does not measure what the form needs.

    Source: Megatron-LM megatron/core/transformer/moe/router.py@d98e8a64, _apply_*aux_loss.
    """
    coefficient = config.load_balance_loss_weight
    match config.moe_router_load_balancing_type:
        case "aux_loss":
            return weigh(router.aux, share, coefficient=coefficient)
        case "seq_aux_loss":
            if router.seq_aux is None:
                raise ConfigError(_unmeasured("seq_aux_loss", "RouterStats.seq_aux"))
            return weigh(router.seq_aux, share, coefficient=coefficient)
        case "global_aux_loss":
            loss = weigh(_global_aux(router, previous), share, coefficient=coefficient)
            return replace(loss, raw=loss.raw * share.shape[0])


def _global_aux(router: RouterStats, previous: RunningLoads | None) -> Float[Array, "R L"]:
    if router.loads is None or router.mean_scores is None or previous is None:
        needs = "RouterStats.loads, RouterStats.mean_scores and running loads"
        raise ConfigError(_unmeasured("global_aux_loss", needs))
    running = with_microbatch(previous, router.loads)
    assigned = jnp.maximum(router.loads.sum(-1, keepdims=True), 1).astype(jnp.float32)
    fractions = running.loads / running.microbatches / assigned  # [L E]
    return fractions.shape[-1] * (fractions * router.mean_scores).sum(-1)


def router_z_loss(
    router: RouterStats, share: Float[Array, " R"], *, config: LossConfig
) -> Auxiliary:
    """Return the routers' z-loss."""
    return weigh(router.z, share, coefficient=config.moe_z_loss_weight)


def indexer_loss(
    value: Float[Array, " R"] | None, share: Float[Array, " R"], *, config: LossConfig
) -> Auxiliary | None:
    """Return the indexers' loss, or None where it is not configured.

    Args:
      value: mean over the layers with an indexer, as MaxText has it.
      share: of each group, from `aux_shares`.
      config: coefficient; 0 is not configured, whatever the model returns.

    Raises:
      ConfigError: it is configured, and the model has no indexer.
    """
    coefficient = config.indexer_loss_scaling_factor
    if not coefficient:
        return None
    if value is None:
        raise ConfigError(
            f"loss.indexer_loss_scaling_factor={coefficient}: the model returns no indexer loss; "
            "set it to 0"
        )
    return weigh(value[:, None], share, coefficient=coefficient)


def weigh(
    value: Float[Array, "R L"], share: Float[Array, " R"], *, coefficient: float
) -> Auxiliary:
    """Sum over layers for the objective, average over them for the raw value."""
    groups, layers = value.shape
    per_group = value.sum(1)
    raw = value.sum() / (groups * max(layers, 1))
    if not coefficient:  # 0 * NaN would be NaN, and XLA keeps the product
        zero = jnp.zeros((), jnp.float32)
        return Auxiliary(zero, zero, raw)
    return Auxiliary(coefficient * jnp.dot(share, per_group), coefficient * per_group.mean(), raw)


def _unmeasured(form: str, needs: str) -> str:
    return (
        f"loss.moe_router_load_balancing_type={form} needs {needs}, which this model does not "
        "measure; use aux_loss"
    )
