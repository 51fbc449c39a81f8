"""The learning rate of a step: Megatron's schedules, in float32.

t is the schedule's position in steps, from 0. Each curve is written with the steps that are left
until its end, or done since its beginning, both exact integers: 1 - t / T would leave nothing of
the last steps' digits in float32.
"""

import math
from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from ling_trainer.optimizer_config import OptimizerConfig
from ling_trainer.ramp_up import BatchSizes


def learning_rate(
    config: OptimizerConfig,
    step: Int[Array, ""],
    *,
    fraction: Float[Array, ""] | float = 0.0,
) -> Float[Array, ""]:
    """Return the rate of the update after `step` finished steps: 0 for the first with warm-up.

        t <= warmup_steps:     lr_warmup_init + (peak - lr_warmup_init) t / warmup_steps
        constant:              peak
        t > schedule's end:    min_lr
        inverse-square-root:   max(min_lr, peak sqrt(max(warmup_steps, 1) / max(t, 1)))
        otherwise:             min_lr + c (peak - min_lr)

    The end is learning_rate_schedule_steps. r is the share of the decay that is done, counted from
    the end of the warm-up; for WSD, from wsd_decay_steps before the end, and c is 1 until then:

        linear      c = 1 - r             cosine      c = (1 + cos(pi r)) / 2
        exponential c = 2 * 0.5^r - 1     minus_sqrt  c = 1 - sqrt(r)

    Args:
      config: the schedule.
      step: the whole part of t; below 2^24.
      fraction: the rest of t, in [0, 1), where steps are not of the same size.

    Source: Megatron-LM megatron/core/optimizer_param_scheduler.py@d98e8a64, get_lr.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    rate = _after_warmup(config, step, fraction)
    if not warmup:
        return rate
    t = step.astype(jnp.float32) + fraction
    rising = config.lr_warmup_init + (peak - config.lr_warmup_init) * (t / warmup)
    return jnp.where(t <= warmup, rising, rate)


def full_batches(
    sizes: BatchSizes, step: Int[Array, ""]
) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """Return how many full batches the samples of the first `step` steps make.

    That is where a schedule is while the batch size ramps up: Megatron's counts samples, and its
    iterations are turned into samples by the full batch size.

    Returns:
      The whole part, and the rest in [0, 1).

    Source: Megatron-LM megatron/training/training.py@d98e8a64, get_optimizer_param_scheduler.
    """
    full = sizes.full.batch_size
    # In full batches and samples: what is before each stage, and what each of its steps adds.
    rows = [
        (stage.first_step, *divmod(stage.first_sample, full), *divmod(stage.batch_size, full))
        for stage in sizes.stages
    ]
    table = jnp.asarray(rows, jnp.int32)
    place = jnp.searchsorted(table[:, 0], step, side="right") - 1
    first_step, whole, rest, whole_each, rest_each = table[place]
    since = step - first_step
    more, samples = jnp.divmod(rest + since * rest_each, full)
    return whole + since * whole_each + more, samples.astype(jnp.float32) / full


def _after_warmup(
    config: OptimizerConfig, step: Int[Array, ""], fraction: Float[Array, ""] | float
) -> Float[Array, ""]:
    """Return the rate at t = step + fraction, taking t to be past the warm-up."""
    peak, floor, end = config.learning_rate, config.min_lr, config.learning_rate_schedule_steps
    if config.lr_decay_style == "constant" or end is None:  # the others have an end
        return jnp.asarray(peak, jnp.float32)
    match config.lr_decay_style:
        case "inverse-square-root":
            t = step.astype(jnp.float32) + fraction
            start = max(config.warmup_steps, 1)
            rate = jnp.maximum(floor, peak * jnp.sqrt(start / jnp.maximum(t, 1.0)))
        case "WSD":
            begin = end - (config.wsd_decay_steps or 0)
            share = _share_of_peak(config.lr_wsd_decay_style, step, fraction, begin=begin, end=end)
            rate = floor + share * (peak - floor)
        case "linear" | "cosine" as curve:
            share = _share_of_peak(curve, step, fraction, begin=config.warmup_steps, end=end)
            rate = floor + share * (peak - floor)
    return jnp.where((end - step) - fraction < 0, floor, rate)


def _share_of_peak(
    curve: Literal["linear", "cosine", "exponential", "minus_sqrt"],
    step: Int[Array, ""],
    fraction: Float[Array, ""] | float,
    *,
    begin: int,
    end: int,
) -> Float[Array, ""]:
    """Return c: 1 up to `begin`, 0 from `end` on, the curve between."""
    done = jnp.maximum((step - begin).astype(jnp.float32) + fraction, 0.0) / (end - begin)
    left = jnp.maximum((end - step).astype(jnp.float32) - fraction, 0.0) / (end - begin)
    match curve:
        case "linear":
            share = left
        case "cosine":  # (1 + cos(pi r)) / 2
            share = jnp.square(jnp.sin(0.5 * math.pi * left))
        case "exponential":  # 2^(1 - r) - 1
            share = jnp.expm1(math.log(2) * left)
        case "minus_sqrt":  # 1 - sqrt(r)
            share = left / (1.0 + jnp.sqrt(done))
    return jnp.where(done > 0, share, 1.0)
