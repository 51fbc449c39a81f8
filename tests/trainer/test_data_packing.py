"""Loss masks, positions and documents of a text."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ling_trainer.data.packing import PackedBatch, effective_pad_id, pack
from ling_trainer.data.samples import NO_PAD

EOD, PAD = 9, 8


def packed(text: list[int], **settings: Any) -> PackedBatch:
    defaults = {"eod_id": EOD, "pad_id": PAD, "eod_mask_loss": False, "reset_position_ids": False}
    return pack(np.array(text), **{**defaults, **settings})


def test_a_text_becomes_inputs_and_the_tokens_after_them() -> None:
    batch = packed([1, 2, EOD, 3, 4])
    assert batch.inputs.tolist() == [1, 2, EOD, 3]
    assert batch.targets.tolist() == [2, EOD, 3, 4]
    assert batch.loss_mask.tolist() == [True] * 4
    assert batch.positions.tolist() == [0, 1, 2, 3]


def test_a_document_holds_its_end_and_the_next_one_starts_after_it() -> None:
    batch = packed([1, EOD, EOD, 3, EOD, 5, 6])
    assert batch.segment_ids.tolist() == [1, 1, 2, 3, 3, 4]
    restarted = packed([1, EOD, EOD, 3, EOD, 5, 6], reset_position_ids=True)
    assert restarted.positions.tolist() == [0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("reset", [True, False])
def test_documents_are_numbered_whether_or_not_positions_restart(reset: bool) -> None:
    assert packed([1, EOD, 2, 3], reset_position_ids=reset).segment_ids.tolist() == [1, 1, 2]


def test_eod_mask_loss_takes_the_loss_after_an_end_and_not_of_the_end() -> None:
    batch = packed([1, EOD, 2, 3], eod_mask_loss=True)
    assert batch.loss_mask.tolist() == [True, False, True]


def test_padding_is_masked_by_its_label_and_is_no_document() -> None:
    batch = packed([1, 2, EOD, PAD, PAD])
    assert batch.inputs.tolist() == [1, 2, EOD, 0]
    assert batch.targets.tolist() == [2, EOD, 0, 0]
    assert batch.loss_mask.tolist() == [True, True, False, False]
    assert batch.segment_ids.tolist() == [1, 1, 1, 0]


def test_a_pad_id_that_ends_documents_masks_no_end() -> None:
    pad_id = effective_pad_id(eod_id=EOD, pad_id=EOD)
    assert pad_id == NO_PAD
    assert effective_pad_id(eod_id=EOD, pad_id=PAD) == PAD
    batch = packed([1, EOD, 2, EOD], pad_id=pad_id)
    assert batch.loss_mask.all()
    assert batch.targets.tolist() == [EOD, 2, EOD]
    short = packed([1, EOD, NO_PAD, NO_PAD], pad_id=pad_id)
    assert short.loss_mask.tolist() == [True, False, False]
    assert short.inputs.tolist() == [1, EOD, 0]
    assert short.segment_ids.tolist() == [1, 1, 0]


def test_without_the_extra_token_the_last_position_has_no_target() -> None:
    batch = packed([1, 2, 3], extra_token=False)
    assert batch.inputs.tolist() == [1, 2, 3]
    assert batch.targets.tolist() == [2, 3, 0]
    assert batch.loss_mask.tolist() == [True, True, False]


@given(
    text=hnp.arrays(
        np.int64, st.tuples(st.integers(1, 4), st.integers(2, 20)), elements=st.integers(0, 9)
    ),
    eod_mask_loss=st.booleans(),
    reset=st.booleans(),
)
def test_every_row_is_packed_as_if_it_were_alone(
    text: np.ndarray, eod_mask_loss: bool, reset: bool
) -> None:
    settings: Any = {"eod_mask_loss": eod_mask_loss, "reset_position_ids": reset}
    together = pack(text, eod_id=EOD, pad_id=PAD, **settings)
    for row in range(len(text)):
        alone = packed(text[row].tolist(), **settings)
        for ours, theirs in zip(together, alone, strict=True):
            np.testing.assert_array_equal(ours[row], theirs)


@given(text=st.lists(st.integers(0, 9), min_size=2, max_size=30))
def test_positions_count_from_the_first_token_of_their_document(text: list[int]) -> None:
    batch = packed(text, reset_position_ids=True)
    expected, position = [], 0
    for token in text[:-1]:
        expected.append(position)
        position = 0 if token == EOD else position + 1
    assert batch.positions.tolist() == expected
    kinds = [array.dtype for array in batch]
    assert kinds == [np.int32] * 4 + [np.bool_]
