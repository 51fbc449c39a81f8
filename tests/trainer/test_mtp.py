"""The rolls of multi-token prediction."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ling_trainer.model.mtp import roll, roll_plain, roll_within_segments

IDS = jnp.asarray([[10, 11, 12, 20, 21, 30]])
SEGMENTS = jnp.asarray([[1, 1, 1, 2, 2, 0]])


def test_roll_within_segments_fills_where_a_document_ends() -> None:
    once = roll_within_segments(IDS, SEGMENTS, shift=1, fill=-7)
    np.testing.assert_array_equal(once, [[11, 12, -7, 21, -7, -7]])
    twice = roll_within_segments(IDS, SEGMENTS, shift=2, fill=-7)
    np.testing.assert_array_equal(twice, [[12, -7, -7, -7, -7, -7]])


def test_plain_roll_crosses_documents_and_fills_the_end_of_the_row() -> None:
    np.testing.assert_array_equal(roll_plain(IDS, shift=2, fill=0), [[12, 20, 21, 30, 0, 0]])
    np.testing.assert_array_equal(
        roll(IDS, SEGMENTS, shift=1, fill=0, by="plain"), [[11, 12, 20, 21, 30, 0]]
    )


def test_a_rolled_mask_is_still_a_mask() -> None:
    mask = jnp.asarray([[True, True, False, True, True, True]])
    rolled = roll(mask, SEGMENTS, shift=1, fill=0, by="segment")
    np.testing.assert_array_equal(rolled, [[True, False, False, True, False, False]])
    assert rolled.dtype == jnp.bool_


@pytest.mark.parametrize("shift", [-1, 0, 6])
def test_a_shift_outside_the_row_is_refused(shift: int) -> None:
    with pytest.raises(ValueError, match=rf"shift={shift} is outside \[1, 6\)"):
        roll_within_segments(IDS, SEGMENTS, shift=shift, fill=0)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    first=st.integers(1, 2),
    second=st.integers(1, 2),
)
def test_rolling_twice_is_rolling_once_further(
    lengths: list[int], first: int, second: int
) -> None:
    segments = np.zeros((1, 30), int)
    segments[0, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    ids = jnp.arange(100, 130)[None]
    steps = roll_within_segments(ids, jnp.asarray(segments), shift=first, fill=0)
    steps = roll_within_segments(steps, jnp.asarray(segments), shift=second, fill=0)
    once = roll_within_segments(ids, jnp.asarray(segments), shift=first + second, fill=0)
    np.testing.assert_array_equal(steps, once)
