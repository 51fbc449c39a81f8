"""Products with weights: the values are an einsum's, and a weight's gradient stays float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling_trainer.model.products import product, ragged_product

CASES = {
    "...d,df->...f": ((3, 5, 8), (8, 6)),
    "bsd,dhe->bshe": ((3, 5, 8), (8, 2, 6)),
    "bshv,hvd->bsd": ((3, 5, 2, 6), (2, 6, 8)),
    "td,edf->tef": ((15, 8), (4, 8, 6)),
    "ragged": ((15, 8), (4, 8, 6)),
}
SIZES = jnp.asarray([4, 0, 9, 2])


def plain(equation: str, x: Any, w: Any) -> Any:
    if equation == "ragged":
        return jnp.einsum("td,tdf->tf", x, jnp.repeat(w, SIZES, axis=0, total_repeat_length=15))
    return jnp.einsum(equation, x, w)


def ours(equation: str, x: Any, w: Any) -> Any:
    return ragged_product(x, w, SIZES) if equation == "ragged" else product(equation, x, w)


def drawn(equation: str, dtype: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    x, w = (rng.normal(size=shape) for shape in CASES[equation])
    return jnp.asarray(x, dtype), jnp.asarray(w, jnp.float32)


def pulled_back(f: Any, equation: str, x: Any, w: Any) -> tuple[Any, Any, Any]:
    y, pull = jax.vjp(lambda x, w: f(equation, x, w), x, w)
    cotangent = jnp.asarray(np.random.default_rng(2).normal(size=y.shape), jnp.bfloat16)
    return y, *pull(cotangent.astype(y.dtype))


@pytest.mark.parametrize("equation", CASES)
def test_a_float32_product_and_its_gradients_are_those_of_the_einsum(equation: str) -> None:
    operands = drawn(equation, "float32")
    found, expected = (pulled_back(f, equation, *operands) for f in (ours, plain))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("equation", CASES)
def test_a_bfloat16_product_rounds_everything_but_its_weights_gradient(equation: str) -> None:
    x, w = drawn(equation, "bfloat16")
    y, d_x, d_w = pulled_back(ours, equation, x, w)
    assert (y.dtype, d_x.dtype, d_w.dtype) == ("bfloat16", "bfloat16", "float32")
    rounded = w.astype(jnp.bfloat16).astype(jnp.float32)
    exact = pulled_back(plain, equation, x.astype(jnp.float32), rounded)
    np.testing.assert_allclose(y.astype(jnp.float32), exact[0], rtol=2**-7, atol=2**-7)
    # From the same bfloat16 operands and cotangent: one that was rounded is off by 2^-9.
    np.testing.assert_allclose(d_w, exact[2], rtol=1e-5, atol=1e-5)
