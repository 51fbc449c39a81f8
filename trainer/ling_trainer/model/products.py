"""Products of activations with weights: every use of a weight matrix is one of these.

Weights are float32. A product runs in the activations' type, and the gradient of its weight leaves
it as float32: in bfloat16 it would be rounded on each device before devices and micro-batches are
summed, and so would the sums.

T rows, D width in, F width out, E experts.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Shaped

# Axes of a ragged product [T D] x [E D F] -> [T F], of its rows' gradient, [T F] x [E D F] ->
# [T D], and of its weight's, [T D] x [T F] -> [E D F].
_ROWS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
_ROWS_BACK = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
_WEIGHT_BACK = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def precision(dtype: DTypeLike) -> lax.Precision:
    """Return the precision of a product: float32 means float32 on accelerators too."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def weight(stored: Shaped[Array, "..."], dtype: DTypeLike) -> Shaped[Array, "..."]:
    """Return a stored weight as the compute type; every product takes its weight from here."""
    return stored.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(
    equation: str, x: Shaped[Array, "..."], stored: Shaped[Array, "..."]
) -> Shaped[Array, "..."]:
    """Multiply activations by a weight (an einsum) in the activations' type.

    Args:
      equation: activations, weight -> result. Not valid where a dimension is in only one of them.
      x: activations.
      stored: the weight.
    """
    return jnp.einsum(equation, x, weight(stored, x.dtype), precision=precision(x.dtype))


def _product_forward(equation: str, x: Array, stored: Array) -> tuple[Array, tuple[Array, Array]]:
    return product(equation, x, stored), (x, stored)


def _product_backward(
    equation: str, kept: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    (x, stored), exact = kept, precision(gradient.dtype)
    operands, result = equation.split("->")
    rows, matrix = operands.split(",")
    back = f"{result},{matrix}->{rows}"
    d_x = jnp.einsum(back, gradient, weight(stored, gradient.dtype), precision=exact)
    d_stored = jnp.einsum(
        f"{rows},{result}->{matrix}",
        x,
        gradient,
        precision=exact,
        preferred_element_type=jnp.float32,
    )
    return d_x, d_stored.astype(stored.dtype)


@jax.custom_vjp
def ragged_product(
    x: Float[Array, "T D"], stored: Float[Array, "E D F"], group_sizes: Int[Array, " E"]
) -> Float[Array, "T F"]:
    """Multiply rows by their expert's weight, in the rows' type.

    Args:
      x: rows, sorted by expert.
      stored: the experts' weights.
      group_sizes: rows of each expert; their sum is T.
    """
    exact = precision(x.dtype)
    return lax.ragged_dot_general(x, weight(stored, x.dtype), group_sizes, _ROWS, precision=exact)


def _ragged_forward(
    x: Array, stored: Array, group_sizes: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return ragged_product(x, stored, group_sizes), (x, stored, group_sizes)


def _ragged_backward(
    kept: tuple[Array, Array, Array], gradient: Array
) -> tuple[Array, Array, None]:
    (x, stored, group_sizes), exact = kept, precision(gradient.dtype)
    d_x = lax.ragged_dot_general(
        gradient, weight(stored, gradient.dtype), group_sizes, _ROWS_BACK, precision=exact
    )
    d_stored = lax.ragged_dot_general(
        x, gradient, group_sizes, _WEIGHT_BACK,
        precision=exact, preferred_element_type=jnp.float32,
    )  # fmt: skip
    return d_x, d_stored.astype(stored.dtype), None


product.defvjp(_product_forward, _product_backward)
ragged_product.defvjp(_ragged_forward, _ragged_backward)
