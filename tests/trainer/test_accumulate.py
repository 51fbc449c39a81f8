"""Accumulation: plain sums in float32 and int32, whatever the micro-batches compute in."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling_trainer.accumulate import accumulate


def test_512_micro_batches_in_bfloat16_sum_without_stalling() -> None:
    def grad_fn(params: Any, microbatch: Any, carry: Any) -> Any:
        grads = jax.tree.map(lambda p: (p * microbatch).astype(jnp.bfloat16), params)
        return {"loss": microbatch, "tokens": jnp.int32(1)}, grads, carry

    params = {"w": jnp.ones((3,), jnp.bfloat16)}
    ones = jnp.ones((512,), jnp.bfloat16)
    terms, grads = jax.jit(lambda: accumulate(grad_fn, params, ones, num_microbatches=512))()
    assert grads["w"].dtype == jnp.float32
    np.testing.assert_array_equal(grads["w"], 512.0)
    assert float(terms["loss"]) == 512.0
    assert terms["tokens"].dtype == jnp.int32
    assert int(terms["tokens"]) == 512
    stalled = jax.lax.fori_loop(0, 512, lambda _, s: s + jnp.bfloat16(1), jnp.bfloat16(0))
    assert float(stalled) == 256.0  # what a bfloat16 carry would have given


@pytest.mark.slow
def test_512_micro_batches_of_a_bfloat16_model_equal_one_of_all_rows(
    product: Any, toy: Any, step_config: Any, maxtext: Any
) -> None:
    modules = product("ling_trainer")
    segments = np.tile(maxtext.inputs["seg_uneven"], (64, 1))
    rows = np.tile(np.arange(8), 64)
    batch = toy.batch(modules, maxtext.inputs["seg_uneven"], rows)
    assert batch.inputs.shape == (512, 32)
    assert (np.asarray(batch.segment_ids) == segments).all()
    grads = {}
    for micro, dtype in ((512, jnp.bfloat16), (512, jnp.float32), (1, jnp.float32)):
        config = step_config(
            gradient_accumulation_steps=micro, data={"global_batch_size": 512},
            loss={"mtp_loss_scaling_factor": 0.0},
        )  # fmt: skip
        model = toy.build(modules, dtype=dtype)
        run = jax.jit(
            modules.step.loss_and_gradients, static_argnames=("apply", "logits", "config")
        )
        grads[micro, dtype] = run(toy.params, toy.bias, batch, config=config, **model)[1]["W"]
    exact = np.asarray(grads[1, jnp.float32])
    scale = np.abs(exact).max()
    # 512 float32 additions round by some 20 x 2^-24 of the sum.
    np.testing.assert_allclose(grads[512, jnp.float32], exact, atol=1e-5 * scale)
    # A stalled sum would be short by half; bfloat16 rounding of each summand averages out.
    np.testing.assert_allclose(grads[512, jnp.bfloat16], exact, atol=1e-2 * scale)


def test_the_carry_passes_from_one_micro_batch_to_the_next() -> None:
    def grad_fn(params: Any, microbatch: Any, carry: Any) -> Any:
        seen = carry + microbatch
        return seen, params * microbatch, seen

    numbers = jnp.asarray([1.0, 10.0, 100.0])
    terms, grads = accumulate(
        grad_fn, jnp.float32(2.0), numbers, num_microbatches=3, carry=jnp.float32(0.0)
    )
    assert float(terms) == 1 + 11 + 111
    assert float(grads) == 222.0


def test_a_batch_that_was_not_split_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(8, 2\) does not hold num_microbatches=4"):
        accumulate(lambda *a: a, {}, jnp.zeros((8, 2)), num_microbatches=4)
