"""Sum (terms, gradients) over micro-batches: scan and add. Knows nothing of losses."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

type Params = Any
type GradFn[T, C] = Callable[[Params, Any, C], tuple[T, Params, C]]


def accumulate[T, C](
    grad_fn: GradFn[T, C],
    params: Params,
    microbatches: Any,
    *,
    num_microbatches: int,
    carry: C = (),
) -> tuple[T, Params]:
    """Return the sums of what `grad_fn` returns for each micro-batch.

    Sums of floating-point values are float32 whatever `grad_fn` computes in: in bfloat16,
    256 + 1 is 256 and a sum over many micro-batches stalls. Integers are summed as int32.

    Args:
      grad_fn: (params, micro-batch, carry) -> (terms, gradients, carry); terms and gradients are
        already normalised so that plain addition gives the step's values.
      params: passed on unchanged.
      microbatches: arrays whose first dimension is K, one micro-batch a slice.
      num_microbatches: K.
      carry: what one micro-batch tells the next (running expert counts); the last is dropped.
        Its arrays keep their shapes and types, so the caller starts it in float32 or int32.

    Raises:
      ValueError: an array of `microbatches` has another first dimension.
    """
    for leaf in jax.tree.leaves(microbatches):
        if leaf.shape[0] != num_microbatches:
            msg = (
                f"an array of shape {leaf.shape} does not hold num_microbatches="
                f"{num_microbatches} slices; split the batch first"
            )
            raise ValueError(msg)
    first = jax.tree.map(lambda x: x[0], microbatches)
    terms, grads, _ = jax.eval_shape(grad_fn, params, first, carry)
    zeros = jax.tree.map(_zeros, (terms, grads))

    def add(sums: tuple[T, Params, C], microbatch: Any) -> tuple[tuple[T, Params, C], None]:
        terms, grads, carry = grad_fn(params, microbatch, sums[2])
        summed = jax.tree.map(lambda a, x: a + x.astype(a.dtype), sums[:2], (terms, grads))
        return (*summed, carry), None

    (terms, grads, _), _ = jax.lax.scan(add, (*zeros, carry), microbatches)
    return terms, grads


def _zeros(like: jax.ShapeDtypeStruct) -> Array:
    floating = jnp.issubdtype(like.dtype, jnp.floating)
    return jnp.zeros(like.shape, jnp.float32 if floating else jnp.int32)
