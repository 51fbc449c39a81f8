"""StepReport: what one step tells the outside, and its log keys."""

import math
from dataclasses import dataclass
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Bool, Float, Int

from ling_trainer.health_metrics import NonFinite, Signal, mtp_depth_loss
from ling_trainer.loss import LossTerms

INT32_MAX = 2**31 - 1


@no_type_check  # a pytree also holds shapes, shardings and NumPy arrays
@struct.dataclass
class StepReport:
    """Values of one step, on device until `jax.device_get`."""

    step: Int[Array, ""]  # the step just finished; the first is 1
    terms: LossTerms
    loss: Float[Array, ""]  # sum of every reported part
    lm_loss: Float[Array, ""]
    z_loss: Float[Array, ""]
    lm_loss_token_avg: Float[Array, ""]
    total_weights: Int[Array, ""]
    raw_grad_norm: Float[Array, ""]
    grad_norm: Float[Array, ""]
    param_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]
    zeros_by_row: Int[Array, " rows"] | None  # see count_zeros; None where they are not counted
    is_finite: Bool[Array, ""]  # loss and raw_grad_norm
    num_grad_elements: int = struct.field(pytree_node=False)  # over 2^31: no int32
    router_bias_mean: Float[Array, ""] | None  # of the biases of this step; None without a router
    router_bias_std: Float[Array, ""] | None  # over a router's experts, averaged over routers


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteStep:
    """Why a step does not count: what was not finite, how, and its value."""

    signal: Signal
    kind: NonFinite
    value: float


def count_zeros(tree: Any) -> Int[Array, " rows"]:
    """Count the elements equal to 0, as int32 partial counts whose sum may exceed 2^31.

    Each leaf is counted over its longest run of trailing dimensions with fewer than 2^31
    elements: one stacked expert leaf alone can hold more, and JAX has no int64 by default.
    -0.0 is a zero; NaN is none. Add the rows up as Python integers.

    Raises:
      ValueError: the last dimension of a leaf alone has 2^31 elements or more.
    """
    return jnp.concatenate([_count_leaf(x) for x in jax.tree.leaves(tree)])


def _count_leaf(x: Array) -> Int[Array, " rows"]:
    kept = x.ndim
    while kept and math.prod(x.shape[kept - 1 :]) <= INT32_MAX:
        kept -= 1
    if kept == x.ndim > 0:
        msg = f"a last dimension of {x.shape[-1]} elements overflows an int32 count; reshape it"
        raise ValueError(msg)
    counts = jnp.sum(x == 0, axis=tuple(range(kept, x.ndim)), dtype=jnp.int32)
    return counts.reshape(-1)


def num_elements(tree: Any) -> int:
    """Return the number of elements of all leaves, as a Python integer."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def to_log(report: StepReport) -> dict[str, float | int]:
    """Return the report under its log keys: those of health_metrics but perf/* and eval/*.

    What is None in the report (a router's statistics without a router, the indexer's loss where it
    is not configured, zeros of the gradients where they are not counted) has no key.

    Args:
      report: on the host (jax.device_get). A value that is not finite stays so.
    """
    terms = report.terms
    lm_loss, raw_grad_norm = float(report.lm_loss), float(report.raw_grad_norm)
    return {
        "learning/loss": float(report.loss),
        "learning/lm_loss": lm_loss,
        "learning/lm_loss_token_avg": float(report.lm_loss_token_avg),
        "learning/objective": float(terms.objective),
        "learning/z_loss": float(report.z_loss),
        "learning/moe_lb_loss": float(terms.moe_lb_loss),
        "learning/load_balancing_loss": float(terms.load_balancing_loss),
        "learning/moe_z_loss": float(terms.moe_z_loss),
        "learning/raw_moe_z_loss": float(terms.raw_moe_z_loss),
        "learning/mtp_loss": float(terms.mtp_loss),
        "learning/raw_mtp_loss": float(terms.raw_mtp_loss),
        "learning/total_weights": int(report.total_weights),
        "learning/grad_norm": float(report.grad_norm),
        "learning/raw_grad_norm": raw_grad_norm,
        "learning/param_norm": float(report.param_norm),
        "learning/learning_rate": float(report.learning_rate),
        "learning/is_nan": int(math.isnan(lm_loss)),
        "learning/is_inf": int(math.isinf(lm_loss)),
        "learning/grad_is_nonfinite": int(not math.isfinite(raw_grad_norm)),
        **_zeros(report),
        **_optional(report),
    }


def _zeros(report: StepReport) -> dict[str, int]:
    """Return the zeros of the gradients and what they are of; a ratio needs both, or neither."""
    if report.zeros_by_row is None:
        return {}
    return {
        "learning/num_zeros": sum(np.asarray(report.zeros_by_row).tolist()),
        "learning/num_grad_elements": report.num_grad_elements,
    }


def _optional(report: StepReport) -> dict[str, float]:
    """Return the keys whose presence depends on the model and the configuration."""
    terms = report.terms
    values = {
        "learning/indexer_loss": terms.indexer_loss,
        "learning/router_bias_mean": report.router_bias_mean,
        "learning/router_bias_std": report.router_bias_std,
        "learning/router_topk_weight_mean": terms.router_topk_weight_mean,
        "learning/router_probs_std": terms.router_probs_std,
    }
    depths = np.asarray(terms.mtp_depth_losses)
    values |= {str(mtp_depth_loss(d).log_key): x for d, x in enumerate(depths, start=1)}
    return {key: float(value) for key, value in values.items() if value is not None}


def nonfinite(report: StepReport) -> NonFiniteStep | None:
    """Say what of the step was not finite, the loss before the gradient; None for a good step.

    Args:
      report: on the host (jax.device_get).
    """
    signals = (
        (Signal.NON_FINITE_LOSS, float(report.loss)),
        (Signal.NON_FINITE_GRADIENT, float(report.raw_grad_norm)),
    )
    for signal, value in signals:
        if not math.isfinite(value):
            kind = NonFinite.NAN if math.isnan(value) else NonFinite.INF
            return NonFiniteStep(signal=signal, kind=kind, value=value)
    return None
