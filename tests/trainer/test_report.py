"""Counting zeros: exact, also beyond 2^31."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling_trainer.report import INT32_MAX, count_zeros, num_elements


def test_golden_zeros_are_counted_exactly(maxtext: Any, show_golden: Any) -> None:
    small = maxtext.small
    tree = {"a": small["num_zeros/a"], "b": small["num_zeros/b"]}
    counted = int(np.asarray(count_zeros(jax.tree.map(jnp.asarray, tree))).sum())
    # The reference runs without flushing denormals; XLA on this CPU may flush 1e-45 to zero.
    flushed = int(jnp.asarray([1e-45], jnp.float32)[0] == 0)
    show_golden("maxtext/small.npz (num_zeros)", cases="1/1", worst=0.0, tolerance=0.0)
    assert counted == int(small["num_zeros/expected"]) + flushed


def test_negative_zero_is_a_zero_and_nan_is_none() -> None:
    x = jnp.asarray([[0.0, -0.0, jnp.nan], [jnp.inf, 1.0, 0.0]])
    assert np.asarray(count_zeros({"x": x, "s": jnp.float32(0.0)})).sum() == 4


@pytest.mark.parametrize("shape", [(5, 1 << 15, 1 << 15), (3, 2, 1 << 20, 1 << 10), (1 << 31, 1)])
def test_no_partial_count_can_reach_two_to_the_31(shape: tuple[int, ...]) -> None:
    counts = jax.eval_shape(count_zeros, jax.ShapeDtypeStruct(shape, jnp.float32))
    total = num_elements(jax.ShapeDtypeStruct(shape, jnp.float32))
    assert total > INT32_MAX  # the leaf as a whole would overflow
    assert counts.dtype == jnp.int32
    assert total // counts.shape[0] <= INT32_MAX


@pytest.mark.slow
def test_five_times_two_to_the_30_zeros_are_counted_as_python_integers() -> None:
    """A broadcast zero: counted for real, without 20 GiB of memory."""

    @jax.jit
    def count(zero: Any) -> Any:
        return count_zeros(jnp.broadcast_to(zero, (5, 1 << 15, 1 << 15)))

    rows = np.asarray(count(jnp.float32(0.0))).tolist()
    assert sum(rows) == 5 << 30


def test_a_last_dimension_beyond_int32_is_refused() -> None:
    with pytest.raises(ValueError, match="overflows an int32 count"):
        jax.eval_shape(count_zeros, jax.ShapeDtypeStruct((2, 1 << 31), jnp.float32))
