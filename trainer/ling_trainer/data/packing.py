"""Tokens of a sample to what a step consumes: inputs, targets, positions, documents, loss mask.

Source: Megatron-LM megatron/core/datasets/gpt_dataset.py@d98e8a64
(_get_ltor_masks_and_position_ids, __getitem__).
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ling_trainer.data.gpt import NO_PAD


class PackedBatch(NamedTuple):
    """The fields of batch.Batch as numpy arrays, before they go to devices.

    A type of its own keeps JAX out of the processes that only read data.

    Attributes:
      inputs: int32 [..., S].
      targets: int32 [..., S].
      positions: int32 [..., S].
      segment_ids: int32 [..., S], documents from 1 in each row; 0 is padding.
      loss_mask: bool [..., S].
    """

    inputs: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    segment_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]


def effective_pad_id(*, eod_id: int, pad_id: int) -> int:
    """Choose the id that is masked as padding: pad_id, or none (-1) if it is eod_id as well.

    Masking a pad id that is also the end of a document would take the loss from every end of
    document; Ling2's is.
    """
    return NO_PAD if pad_id == eod_id else pad_id


def pack(
    text: npt.NDArray[np.integer[Any]],
    *,
    eod_id: int,
    pad_id: int,
    eod_mask_loss: bool,
    reset_position_ids: bool,
    extra_token: bool = True,
) -> PackedBatch:
    """Turn texts into a batch.

    A position has loss unless its target is padding or, with eod_mask_loss, its input ends a
    document: the end itself is predicted, what follows it is not. Documents are numbered from 1 in
    each row; the token that ends one belongs to it.

    Args:
      text: [..., S + 1], or [..., S] without the extra token; the last position then has no
        target.
      eod_id: token that ends a document.
      pad_id: token that counts as padding, as a target and as an input; NO_PAD for none. Ids
        equal to it become 0.
      eod_mask_loss: no loss where the input is eod_id.
      reset_position_ids: count positions from each document's start, not from the row's.
      extra_token: whether text has the S + 1st token.

    Returns:
      The batch, each field [..., S].
    """
    if extra_token:
        inputs, targets = text[..., :-1], text[..., 1:]
    else:
        inputs = text
        targets = np.concatenate([text[..., 1:], np.full_like(text[..., :1], pad_id)], axis=-1)
    loss_mask = targets != pad_id
    if eod_mask_loss:
        loss_mask &= inputs != eod_id

    starts = np.zeros(inputs.shape, bool)
    starts[..., 1:] = inputs[..., :-1] == eod_id
    segment_ids = 1 + np.cumsum(starts, axis=-1, dtype=np.int32)
    index = np.broadcast_to(np.arange(inputs.shape[-1], dtype=np.int32), inputs.shape)
    positions = index.copy()
    if reset_position_ids:
        positions -= np.maximum.accumulate(np.where(starts, index, 0), axis=-1)
    padding = inputs == pad_id
    return PackedBatch(
        inputs=np.where(padding, 0, inputs).astype(np.int32),
        targets=np.where(targets == pad_id, 0, targets).astype(np.int32),
        positions=positions,
        segment_ids=np.where(padding, 0, segment_ids).astype(np.int32),
        loss_mask=loss_mask,
    )
