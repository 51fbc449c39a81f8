"""What must not change a step of Ling2: where documents and rows lie, and padding.

Attention resets and positions restart, so a document is the same wherever it lies. Compared are
every loss term, the experts' counts as integers, and every gradient. Scanned against unrolled
layers and rematerialisation are in test_model_float64.py, meshes in test_equivalences_sharded.py.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ling_trainer.batch import Batch
from ling_trainer.model import ling2
from ling_trainer.model_config import ModelConfig
from ling_trainer.presets import ling2_tiny
from ling_trainer.step import loss_and_gradients

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
ROWS, LENGTH = 4, 24
# Chunks of lightning attention end inside documents. One norm group over all heads, or rounding is
# divided by a group that happens to be nearly 0.
MODEL = ModelConfig.model_validate(
    ling2_tiny()["model"]
    | {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "first_k_dense_replace": 0,
        "num_attention_heads": 4, "head_dim": 8, "group_norm_size": 1, "intermediate_size": 32,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "initializer_range": 0.2, "chunk_size": 8,
    }
)  # fmt: skip
# float32 sums in another order; one unit in the last place of every weight does as much.
TERMS, GRADIENTS = 2e-6, 1e-5


@dataclass(frozen=True)
class Document:
    tokens: np.ndarray
    targets: np.ndarray
    mask: np.ndarray


@st.composite
def documents(draw: st.DrawFn) -> list[Document]:
    """Four documents, of which any two fit in a row."""
    numbers = np.random.default_rng(draw(st.integers(0, 1000)))
    lengths = [draw(st.integers(1, LENGTH // 2)) for _ in range(4)]
    return [
        Document(
            tokens=numbers.integers(0, MODEL.vocab_size, n),
            targets=numbers.integers(0, MODEL.vocab_size, n),
            mask=numbers.random(n) < draw(st.sampled_from([0.2, 1.0])),
        )
        for n in lengths
    ]


def lay_out(rows: list[list[Document]], *, noise: int = 0) -> Batch:
    """Pack documents into rows; what padding holds is noise."""
    numbers = np.random.default_rng(noise)
    shape = (len(rows), LENGTH)
    inputs, targets = (numbers.integers(0, MODEL.vocab_size, shape) for _ in range(2))
    positions, segments = np.zeros(shape, int), np.zeros(shape, int)
    mask = np.zeros(shape, bool)
    for row, packed in enumerate(rows):
        start = 0
        for number, document in enumerate(packed, 1):
            place = slice(start, start := start + len(document.tokens))
            inputs[row, place], targets[row, place] = document.tokens, document.targets
            positions[row, place] = np.arange(len(document.tokens))
            segments[row, place], mask[row, place] = number, document.mask
    fields = {"inputs": inputs, "targets": targets, "positions": positions}
    arrays = fields | {"segment_ids": segments, "loss_mask": mask}
    return Batch(**{name: jnp.asarray(array) for name, array in arrays.items()})


@pytest.fixture(scope="module")
def step(step_config: Any) -> Any:
    """(batch) -> terms and gradients, coefficients 1 and router biases that are not 0."""
    config = step_config(
        loss={
            "z_loss_multiplier": 1.0,
            "load_balance_loss_weight": 1.0,
            "moe_z_loss_weight": 1.0,
            "mtp_loss_scaling_factor": 1.0,
        }
    )
    apply = partial(
        ling2.apply, config=MODEL, loss_groups=1, mtp_roll="segment", reset_attention_mask=True
    )
    numbers = np.random.default_rng(1)
    shape = (MODEL.num_routers, MODEL.num_experts)
    bias = jnp.asarray(numbers.normal(0, 0.05, shape), jnp.float32)
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: (
            numbers.uniform(0.7, 1.3, x.shape)
            if path[-1].key == "scale"
            else numbers.normal(0, MODEL.initializer_range, x.shape)
        ).astype(np.float32),
        jax.eval_shape(lambda: ling2.init_params(MODEL, seed=0)),
    )
    run = jax.jit(
        partial(loss_and_gradients, apply=apply, logits=ling2.logits, config=config),
        compiler_options=FAST_COMPILE,
    )
    return lambda batch: jax.device_get(run(params, bias, batch))


def assert_equal(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(found[0].expert_counts, expected[0].expert_counts)
    assert expected[0].expert_counts.sum() > 0
    for (a, b), tolerance in zip(zip(found, expected, strict=True), (TERMS, GRADIENTS),
                                 strict=True):  # fmt: skip
        for (path, x), y in zip(
            jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
        ):
            error, scale = np.abs(x - y).max(initial=0), np.abs(y).max(initial=1e-6)
            assert error <= tolerance * scale, (jax.tree_util.keystr(path), error, scale)


@pytest.mark.slow
@settings(deadline=None, max_examples=4, derandomize=True)
@given(texts=documents())
def test_packed_documents_equal_documents_in_rows_of_their_own(step: Any, texts: Any) -> None:
    first, second, third, fourth = texts
    packed = lay_out([[first, second], [third, fourth], [], []])
    assert_equal(step(packed), step(lay_out([[first], [second], [third], [fourth]])))


@pytest.mark.slow
@settings(deadline=None, max_examples=4, derandomize=True)
@given(texts=documents(), order=st.permutations(range(4)))
def test_the_order_of_documents_changes_nothing(step: Any, texts: Any, order: list[int]) -> None:
    a, b, c, d = (texts[i] for i in order)
    first = lay_out([[texts[0], texts[1]], [texts[2], texts[3]], [], []])
    assert_equal(step(lay_out([[b], [], [a], [d, c]])), step(first))


@pytest.mark.slow
@settings(deadline=None, max_examples=4, derandomize=True)
@given(texts=documents(), order=st.permutations(range(ROWS)), noise=st.integers(1, 9))
def test_the_order_of_rows_and_what_padding_holds_change_nothing(
    step: Any, texts: Any, order: list[int], noise: int
) -> None:
    rows = [[texts[0], texts[1]], [texts[2]], [texts[3]], []]
    other = lay_out([rows[i] for i in order], noise=noise)
    assert_equal(step(other), step(lay_out(rows)))


@pytest.mark.slow
def test_rows_of_padding_change_nothing(step: Any) -> None:
    numbers = np.random.default_rng(5)
    rows = [
        [
            Document(
                tokens=numbers.integers(0, 64, n),
                targets=numbers.integers(0, 64, n),
                mask=numbers.random(n) < 0.5,
            )
            for n in lengths
        ]
        for lengths in ((9, 15), (20,))
    ]
    assert_equal(step(lay_out([*rows, [], []])), step(lay_out(rows)))


MASKS = arrays(bool, (8, 32), elements=st.booleans())


@settings(deadline=None, max_examples=6, derandomize=True)
@given(mask=MASKS)
def test_per_token_the_lm_term_does_not_depend_on_micro_batches(
    mask: np.ndarray, toy_gradients: Any
) -> None:
    # The toy's padding is segment 0, so that any mask can be had; W sees the language model only.
    each = [toy_gradients("ling_trainer", mask.astype(int), micro=k) for k in (1, 2, 4)]
    for terms, grads in each[1:]:
        assert abs(terms.lm - each[0][0].lm) < 1e-5
        np.testing.assert_allclose(grads["W"], each[0][1]["W"], atol=2e-6)
