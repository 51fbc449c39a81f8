"""Properties of the one normalisation, for any mask."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ling_trainer.batch import split_microbatches
from ling_trainer.token_weights import aux_shares, group_counts, token_weights

MASKS = arrays(bool, (8, 6), elements=st.booleans())
MICRO = st.sampled_from([1, 2, 4])
GROUPS = st.sampled_from([1, 2])


def _weights(mask: Any, micro: int, **options: Any) -> np.ndarray:
    """Weights in the order of the rows, whatever the number of micro-batches."""
    split = split_microbatches(jnp.asarray(mask), num_microbatches=micro)
    weights = np.asarray(token_weights(split, **options))
    return weights.swapaxes(0, 1).reshape(mask.shape)


@settings(deadline=None, max_examples=30)
@given(mask=MASKS, micro=MICRO, groups=GROUPS)
def test_per_token_weights_sum_to_one_if_there_is_a_token(
    mask: Any, micro: int, groups: int
) -> None:
    weights = _weights(mask, micro, calculate_per_token_loss=True, loss_groups=groups)
    assert weights.sum() == pytest.approx(float(mask.any()), abs=1e-6)
    assert not weights[~mask].any()


@settings(deadline=None, max_examples=30)
@given(mask=MASKS, micro=MICRO, groups=GROUPS)
def test_per_token_weights_do_not_depend_on_micro_batches_or_groups(
    mask: Any, micro: int, groups: int
) -> None:
    whole = _weights(mask, 1, calculate_per_token_loss=True)
    split = _weights(mask, micro, calculate_per_token_loss=True, loss_groups=groups)
    np.testing.assert_array_equal(whole, split)


@settings(deadline=None, max_examples=30)
@given(mask=MASKS, micro=MICRO, groups=GROUPS)
def test_per_micro_batch_weights_give_each_group_with_tokens_the_same(
    mask: Any, micro: int, groups: int
) -> None:
    split = split_microbatches(jnp.asarray(mask), num_microbatches=micro)
    weights = np.asarray(
        token_weights(split, calculate_per_token_loss=False, loss_groups=groups)
    ).reshape(micro, groups, -1)
    counts = np.asarray(group_counts(split, loss_groups=groups))
    np.testing.assert_allclose(weights.sum(-1), (counts > 0) / (micro * groups), atol=1e-6)


@settings(deadline=None, max_examples=30)
@given(mask=MASKS, micro=MICRO, groups=GROUPS, per_token=st.booleans())
def test_shares_sum_to_one_except_without_tokens_in_several_micro_batches(
    mask: Any, micro: int, groups: int, per_token: bool
) -> None:
    split = split_microbatches(jnp.asarray(mask), num_microbatches=micro)
    shares = np.asarray(aux_shares(split, calculate_per_token_loss=per_token, loss_groups=groups))
    assert shares.shape == (micro, groups)
    expected = 0.0 if per_token and micro > 1 and not mask.any() else 1.0
    assert shares.sum() == pytest.approx(expected, abs=1e-6)


@settings(deadline=None, max_examples=30)
@given(mask=MASKS, micro=MICRO, per_token=st.booleans())
def test_padding_columns_change_no_weight(mask: Any, micro: int, per_token: bool) -> None:
    padded = np.pad(mask, ((0, 0), (0, 3)))
    options = {"calculate_per_token_loss": per_token}
    plain = _weights(mask, micro, **options)
    np.testing.assert_array_equal(_weights(padded, micro, **options)[:, :-3], plain)


@settings(deadline=None, max_examples=30)
@given(mask=MASKS, micro=MICRO, per_token=st.booleans())
def test_padding_rows_change_no_weight(mask: Any, micro: int, per_token: bool) -> None:
    padded = np.concatenate([mask, np.zeros_like(mask)])  # 8 more rows: 8 / K for each
    options = {"calculate_per_token_loss": per_token}
    plain = _weights(mask, micro, **options)
    np.testing.assert_array_equal(_weights(padded, micro, **options)[:8], plain)


def test_an_empty_micro_batch_keeps_its_zero_as_in_megatron() -> None:
    mask = jnp.asarray([[[True, True]], [[False, False]]])
    weights = token_weights(mask, calculate_per_token_loss=False)
    np.testing.assert_allclose(weights, [[[0.25, 0.25]], [[0.0, 0.0]]])
    np.testing.assert_allclose(aux_shares(mask, calculate_per_token_loss=False), [[0.5], [0.5]])


def test_rows_that_do_not_split_into_groups_are_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"loss_groups=3 does not divide the 4 rows.*divisor"):
        token_weights(jnp.ones((2, 4, 5), bool), calculate_per_token_loss=False, loss_groups=3)
