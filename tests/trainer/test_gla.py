"""Lightning attention: golden, and chunked against the recurrence that defines it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from ling_trainer.model.gla import (
    base_slopes,
    lightning_attention,
    log_decays,
    recurrent_attention,
)
from ling_trainer.model_config import ModelConfig
from ling_trainer.presets import ling2_tiny

FILE = Path(__file__).parents[1] / "golden" / "ling" / "op_lightning" / "lightning.safetensors"
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture(scope="module")
def op() -> dict[str, np.ndarray]:
    return load_file(FILE)


def compiled(f: Callable[..., Any], *inputs: Any, **arguments: Any) -> Any:
    """Call it compiled as one: operation by operation is a hundred compilations."""
    return jax.jit(lambda *x: f(*x, **arguments), compiler_options=FAST_COMPILE)(*inputs)


def relative(found: Any, expected: Any) -> float:
    return float(np.abs(np.asarray(found) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("chunk_size", [16, 64, 256])
def test_golden_op_lightning_forward_and_vjp(
    op: dict[str, np.ndarray], chunk_size: int, show_golden: Callable[..., None]
) -> None:
    def f(q: Any, k: Any, v: Any, h0: Any) -> Any:
        out = lightning_attention(
            q, k, v, log_decay=jnp.asarray(op["slope"]), documents=None, initial_state=h0,
            chunk_size=chunk_size,
        )  # fmt: skip
        return out.outputs, out.state

    inputs = tuple(jnp.asarray(op[name]) for name in ("q", "k", "v", "h0"))

    def both(inputs: Any, cotangents: Any) -> Any:
        value, vjp = jax.vjp(f, *inputs)
        return value, vjp(cotangents)

    (o, state), gradients = compiled(both, inputs, (op["do"], op["dfinal_state"]))
    errors = [relative(o, op["o"]), relative(state, op["final_state"])]
    names = ("dq", "dk", "dv", "dh0")
    errors += [relative(g, op[n]) for g, n in zip(gradients, names, strict=True)]
    cases = f"o, state, 4 gradients, chunks of {chunk_size}"
    show_golden("op_lightning", cases=cases, worst=max(errors), tolerance=5e-6)
    assert max(errors) <= 5e-6


def test_golden_op_lightning_packed_documents(
    op: dict[str, np.ndarray], show_golden: Callable[..., None]
) -> None:
    bounds = op["cu_seqlens"]
    documents = np.searchsorted(bounds, np.arange(bounds[-1]), side="right")[None]
    row = [jnp.asarray(op[name][:1]) for name in ("q", "k", "v")]
    out = compiled(
        lightning_attention, *row, log_decay=jnp.asarray(op["slope"]),
        documents=jnp.asarray(documents), initial_state=None, chunk_size=64,
    )  # fmt: skip
    worst = relative(out.outputs, op["packed_o_row0"])
    show_golden("op_lightning", cases="packed documents", worst=worst, tolerance=5e-6)
    assert worst <= 5e-6


@pytest.mark.parametrize("heads", [4, 6, 16, 32, 64])
def test_golden_base_slopes_for_any_number_of_heads(op: dict[str, np.ndarray], heads: int) -> None:
    np.testing.assert_allclose(base_slopes(heads), op[f"slopes_base_H{heads}"], rtol=1e-6)


def test_decay_of_a_layer_follows_the_layer_offset() -> None:
    config = ModelConfig.model_validate(ling2_tiny()["model"])
    shifted = config.model_copy(update={"lightning_slope_layer_offset": 1})
    np.testing.assert_allclose(log_decays(shifted)[1:], log_decays(config)[:-1], rtol=1e-6)
    np.testing.assert_allclose(log_decays(config)[0], -base_slopes(4) * (1 + 1e-5), rtol=1e-6)


def case(length: int, bounds: tuple[int, ...], strength: float = 0.2) -> SimpleNamespace:
    keys = jax.random.split(jax.random.key(length), 4)
    q, k, v, do = (jax.random.normal(key, (2, length, 3, 8)) for key in keys)
    documents = None
    if bounds:
        one = np.searchsorted(bounds, np.arange(length), side="right") + 1
        documents = jnp.asarray(np.stack([one, one[::-1].max() + 1 - one[::-1]]))
    decay = -strength * jnp.asarray(base_slopes(3))
    return SimpleNamespace(q=q, k=k, v=v, do=do, decay=decay, documents=documents)


@pytest.mark.parametrize(
    ("length", "bounds", "chunk_size"),
    [
        (1, (), 8),
        (7, (), 8),
        (64, (), 16),
        (67, (), 16),
        (67, (1, 8, 9, 30), 1),
        (67, (1, 8, 9, 30), 16),
        (67, (1, 8, 9, 30), 128),
        (48, (16, 32), 16),
        (40, (39,), 8),
    ],
)
def test_chunked_equals_the_recurrence_forward_and_backward(
    length: int, bounds: tuple[int, ...], chunk_size: int
) -> None:
    c = case(length, bounds)

    def chunked(q: Any, k: Any, v: Any, g: Any) -> Any:
        return lightning_attention(
            q, k, v, log_decay=g, documents=c.documents, initial_state=None, chunk_size=chunk_size
        ).outputs

    def naive(q: Any, k: Any, v: Any, g: Any) -> Any:
        return recurrent_attention(
            q, k, v, log_decay=g, documents=c.documents, initial_state=None
        ).outputs

    def both(f: Callable[..., Any]) -> Any:
        value, vjp = jax.vjp(f, c.q, c.k, c.v, c.decay)
        return value, vjp(c.do)

    outcomes = jax.device_get(compiled(lambda: (both(chunked), both(naive))))
    (found, gradients), (expected, expected_gradients) = outcomes
    assert relative(found, expected) <= 5e-6
    for a, b in zip(gradients, expected_gradients, strict=True):
        assert np.abs(a - b).max() <= 2e-5 * max(float(np.abs(b).max()), 1.0)


def test_state_after_an_incomplete_chunk_equals_the_recurrences() -> None:
    c = case(67, (1, 8, 9, 30))
    arguments: dict[str, Any] = {
        "log_decay": c.decay, "documents": c.documents, "initial_state": None,
    }  # fmt: skip
    found = compiled(lightning_attention, c.q, c.k, c.v, chunk_size=16, **arguments)
    expected = compiled(recurrent_attention, c.q, c.k, c.v, **arguments)
    assert relative(found.state, expected.state) <= 5e-6


def test_strong_decay_over_a_long_chunk_has_finite_gradients() -> None:
    c = case(256, (), strength=2.0)

    def total(q: Any, g: Any) -> Any:
        return lightning_attention(
            q, c.k, c.v, log_decay=g, documents=None, initial_state=None, chunk_size=256
        ).outputs.sum()

    gradients = compiled(jax.grad(total, (0, 1)), c.q, c.decay)
    assert all(np.isfinite(g).all() for g in gradients)


def test_bfloat16_inputs_keep_the_state_in_float32() -> None:
    c = case(67, ())
    half = [x.astype(jnp.bfloat16) for x in (c.q, c.k, c.v)]
    arguments: dict[str, Any] = {
        "log_decay": c.decay, "documents": None, "initial_state": None,
    }  # fmt: skip
    found = compiled(lightning_attention, *half, chunk_size=16, **arguments)
    full = [x.astype(jnp.float32) for x in half]
    assert (found.outputs.dtype, found.state.dtype) == (jnp.bfloat16, jnp.float32)
    expected = compiled(recurrent_attention, *full, **arguments)
    assert relative(found.state, expected.state) <= 5e-6
