"""A forward pass over given tokens, row by row: logits, each token's loss, and gradients.

For checking weights, so float32 throughout and nothing that a training step adds: no auxiliary
losses, no micro-batches. The objective is

    mean lm_loss + mtp_loss_scaling_factor * mean over depths of (mean mtp_d_loss)

with each mean over the tokens of all rows that have a target, and the depth's own.

B sequences, S tokens, V vocabulary, L routers, E experts; H heads: the language model's, then one
for each depth of multi-token prediction.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Bool, Float, Int

from ling_trainer.batch import Batch
from ling_trainer.head_loss import cross_entropy
from ling_trainer.loss import mtp_targets
from ling_trainer.model import ling2
from ling_trainer.model.ling2 import Params
from ling_trainer.model.mtp import Roll
from ling_trainer.model_config import ModelConfig


@no_type_check  # a pytree also holds shapes and NumPy arrays
@struct.dataclass
class Targets:
    """What each head is to predict at each position; leaves [H, B, S]."""

    ids: Int[Array, "H B S"]
    mask: Bool[Array, "H B S"]  # positions that have a target
    weights: Float[Array, "H B S"]  # of each token's loss in the objective


@no_type_check
@struct.dataclass
class RowOutputs:
    """What the heads say of one row."""

    logits: tuple[Float[Array, "S V"], ...]  # one for each head
    losses: Float[Array, "H S"]  # 0 where there is no target


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanLosses:
    """Means over the tokens of all rows.

    Attributes:
      by_head: the language model's, then each depth's, without factor.
      num_tokens: that each is the mean over.
      total: what the gradients are the derivative of.
    """

    by_head: tuple[float, ...]
    num_tokens: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardProgram:
    """The compiled computation of one row.

    Attributes:
      call: (params, router_bias, Batch, Targets[, sums of gradients]), one row of each, to
        RowOutputs[, sums]; the sums are donated.
      with_gradients: whether it adds up gradients.
      memory_bytes: that its arguments, results and temporaries take together.
    """

    call: Callable[..., Any]
    with_gradients: bool
    memory_bytes: int


def token_targets(batch: Batch, *, depths: int, mtp_loss_scaling_factor: float) -> Targets:
    """Return the targets of every head; none is in another document or row.

    Args:
      batch: all rows, targets and loss mask being the next token's.
      depths: of multi-token prediction.
      mtp_loss_scaling_factor: weight of their mean in the objective.
    """
    shifted = [
        mtp_targets(batch, depth=depth, mtp_roll="segment") for depth in range(1, depths + 1)
    ]
    ids = jnp.stack([batch.targets, *(ids for ids, _ in shifted)])
    mask = jnp.stack([batch.loss_mask, *(mask for _, mask in shifted)])
    factors = np.asarray([1.0] + [mtp_loss_scaling_factor / max(depths, 1)] * depths)
    counts = np.maximum(np.asarray(mask.sum((1, 2))), 1)
    weights = jnp.asarray(factors / counts, jnp.float32)
    return Targets(ids, mask, jnp.where(mask, weights[:, None, None], 0.0))


def abstract_weights(config: ModelConfig) -> tuple[Params, Any]:
    """Return shapes and types of the parameters and router biases."""
    params = jax.eval_shape(lambda: ling2.init_params(config, seed=0))
    return params, jax.eval_shape(lambda: ling2.init_router_bias(config))


def compile_forward(
    config: ModelConfig, batch: Batch, targets: Targets, *, mtp_roll: Roll, with_gradients: bool
) -> ForwardProgram:
    """Compile the computation of one row, from shapes alone.

    Args:
      config: the architecture; the compute type is float32 whatever it says.
      batch: all rows.
      targets: of token_targets, all rows.
      mtp_roll: which tokens prediction depths read.
      with_gradients: whether to compute gradients too. Each layer's activations are then
        computed twice, to keep only its inputs in between.
    """
    policy = "full" if with_gradients else "none"
    config = config.model_copy(update={"dtype": "float32", "remat_policy": policy})
    row = functools.partial(_row, config=config, mtp_roll=mtp_roll)
    params, bias = abstract_weights(config)
    arguments = (params, bias, *jax.eval_shape(lambda b, t: _take_row(b, t, 0), batch, targets))
    if with_gradients:
        jitted = jax.jit(functools.partial(_add_gradients, row), donate_argnums=4)
        compiled = jitted.lower(*arguments, params).compile()
    else:
        compiled = jax.jit(lambda *inputs: row(*inputs)[1]).lower(*arguments).compile()
    return ForwardProgram(
        call=compiled, with_gradients=with_gradients, memory_bytes=_memory_bytes(compiled)
    )


def run_forward(
    program: ForwardProgram,
    params: Params,
    router_bias: Float[Array, "L E"],
    batch: Batch,
    targets: Targets,
    *,
    mtp_loss_scaling_factor: float,
    write: Callable[[int, RowOutputs], None],
) -> tuple[MeanLosses, Params | None]:
    """Compute every row.

    Args:
      program: of the rows' length.
      params: float32, on the device; see ling2.
      router_bias: of every router.
      batch: all rows.
      targets: of token_targets, all rows.
      mtp_loss_scaling_factor: as given to token_targets.
      write: called with the number of each row and its outputs, on the host.

    Returns:
      The losses, and the gradients of their total if the program has them.
    """
    sums = jax.tree.map(jnp.zeros_like, params) if program.with_gradients else None
    totals = np.zeros(targets.ids.shape[0])
    for index in range(batch.inputs.shape[0]):
        row = _take_row(batch, targets, index)
        if sums is None:
            outputs = program.call(params, router_bias, *row)
        else:
            outputs, sums = program.call(params, router_bias, *row, sums)
        outputs = jax.device_get(outputs)
        totals += outputs.losses.sum(-1, dtype=np.float64)
        write(index, outputs)
    counts = np.asarray(targets.mask.sum((1, 2)))
    means = totals / np.maximum(counts, 1)
    ahead = means[1:].mean() if len(means) > 1 else 0.0
    losses = MeanLosses(
        by_head=tuple(means.tolist()),
        num_tokens=tuple(counts.tolist()),
        total=float(means[0] + mtp_loss_scaling_factor * ahead),
    )
    return losses, sums


def _take_row(batch: Batch, targets: Targets, index: int) -> tuple[Batch, Targets]:
    """Return row `index` alone: leaves [1, S] and [H, 1, S]."""
    one = slice(index, index + 1)
    return jax.tree.map(lambda x: x[one], batch), jax.tree.map(lambda x: x[:, one], targets)


def _memory_bytes(compiled: jax.stages.Compiled) -> int:
    """Return what a program takes at once, donated arguments once; 0 where XLA does not say."""
    used = compiled.memory_analysis()
    if used is None:
        return 0
    arguments, results = used.argument_size_in_bytes, used.output_size_in_bytes
    return arguments + results + used.temp_size_in_bytes - used.alias_size_in_bytes


def _row(
    params: Params,
    router_bias: Float[Array, "L E"],
    batch: Batch,
    targets: Targets,
    *,
    config: ModelConfig,
    mtp_roll: Roll,
) -> tuple[Float[Array, ""], RowOutputs]:
    """Return one row's part of the objective, and its outputs; leaves [1, S] and [H, 1, S]."""
    found = ling2.apply(
        params,
        router_bias,
        batch,
        config=config,
        loss_groups=1,
        mtp_roll=mtp_roll,
        reset_attention_mask=True,
    )
    logits = [
        ling2.logits(params, hidden, depth)
        for depth, hidden in enumerate((found.hidden, *found.mtp_hidden))
    ]
    ids = jnp.where(targets.mask, targets.ids, 0)
    losses = jnp.stack([cross_entropy(x, y)[0] for x, y in zip(logits, ids, strict=True)])
    losses = jnp.where(targets.mask, losses, 0.0)
    outputs = RowOutputs(tuple(x[0] for x in logits), losses[:, 0])
    return jnp.sum(targets.weights * losses), outputs


def _add_gradients(
    row: Callable[..., Any], params: Params, *arguments: Any
) -> tuple[RowOutputs, Params]:
    """Add one row's gradients to the sums, which come last."""
    *inputs, sums = arguments
    (_, outputs), gradients = jax.value_and_grad(row, has_aux=True)(params, *inputs)
    return outputs, jax.tree.map(jnp.add, sums, gradients)
