"""Tokens of a sample to what a step consumes: inputs, targets, positions, documents, loss mask.

Source: Megatron-LM megatron/core/datasets/gpt_dataset.py@d98e8a64
(_get_ltor_masks_and_position_ids, __getitem__).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ling_trainer.data.samples import NO_PAD, Sample
from ling_trainer.data_config import DataConfig


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


def effective_pad_id(*, eod_id: int, pad_id: int, allow_ambiguous: bool = False) -> int:
    """Choose the id that is masked as padding: pad_id, or none (-1) if it is eod_id as well.

    Masking a pad id that is also the end of a document takes the loss from every end of document
    and turns it into token 0; Ling2's is. allow_ambiguous does it all the same.
    """
    return NO_PAD if pad_id == eod_id and not allow_ambiguous else pad_id


def pack_samples(samples: Sequence[Sample], data: DataConfig) -> PackedBatch:
    """Turn samples into the rows of a batch, by the rules of the configuration."""
    first = [sample.first_text for sample in samples if sample.first_text is not None]
    return pack(
        np.stack([sample.text for sample in samples]),
        eod_id=data.eod_id,
        pad_id=effective_pad_id(
            eod_id=data.eod_id,
            pad_id=data.pad_id,
            allow_ambiguous=data.allow_ambiguous_pad_tokens,
        ),
        eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids,
        extra_token=data.add_extra_token_to_sequence,
        lengths=[sample.lengths for sample in samples] if data.inter_document_masking else None,
        first_text=np.stack(first) if first else None,
    )


def padding_row(sequence_length: int) -> PackedBatch:
    """Return a row without a token: no document, no loss.

    Returns:
      A batch of one row, each field [1, S].
    """
    zeros = np.zeros((1, sequence_length), np.int32)
    return PackedBatch(
        inputs=zeros,
        targets=zeros,
        positions=np.arange(sequence_length, dtype=np.int32)[None],
        segment_ids=zeros,
        loss_mask=np.zeros((1, sequence_length), np.bool_),
    )


def pack(
    text: npt.NDArray[np.integer[Any]],
    *,
    eod_id: int,
    pad_id: int,
    eod_mask_loss: bool,
    reset_position_ids: bool,
    extra_token: bool = True,
    lengths: Sequence[npt.NDArray[np.integer[Any]]] | None = None,
    first_text: npt.NDArray[np.integer[Any]] | None = None,
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
      lengths: for each row of [rows, S + x], tokens of its documents as they were cut from the
        .idx; documents and positions then follow these instead of eod_id.
      first_text: as text; positions whose target is padding there have no loss either. Megatron
        keeps the loss mask of the first sample a process reads, padding included, for all others
        (NVIDIA/Megatron-LM#6981); this is for runs that are compared with such a one.

    Returns:
      The batch, each field [..., S].
    """
    inputs, targets = _shift(text, pad_id, extra_token=extra_token)
    loss_mask = targets != pad_id
    if eod_mask_loss:
        loss_mask &= inputs != eod_id
    if first_text is not None:
        loss_mask &= _shift(first_text, pad_id, extra_token=extra_token)[1] != pad_id

    starts = np.zeros(inputs.shape, bool)
    if lengths is None:
        starts[..., 1:] = inputs[..., :-1] == eod_id
    else:
        for row, cuts in zip(starts, lengths, strict=True):
            bounds = document_bounds(cuts, sequence_length=len(row), extra_token=extra_token)
            row[bounds[(bounds > 0) & (bounds < len(row))]] = True
    segment_ids = 1 + np.cumsum(starts, axis=-1, dtype=np.int32)
    index = np.broadcast_to(np.arange(inputs.shape[-1], dtype=np.int32), inputs.shape)
    positions = index.copy()
    if reset_position_ids or lengths is not None:
        positions -= np.maximum.accumulate(np.where(starts, index, 0), axis=-1)
    padding = inputs == pad_id
    return PackedBatch(
        inputs=np.where(padding, 0, inputs).astype(np.int32),
        targets=np.where(targets == pad_id, 0, targets).astype(np.int32),
        positions=positions,
        segment_ids=np.where(padding, 0, segment_ids).astype(np.int32),
        loss_mask=loss_mask,
    )


def document_bounds(
    lengths: npt.NDArray[np.integer[Any]], *, sequence_length: int, extra_token: bool
) -> npt.NDArray[np.int32]:
    """Find where the documents of a sample's inputs begin and end.

    The extra token is no input, and padding belongs to the last document.

    Args:
      lengths: tokens of each cut of the text, the extra token included; 0 for empty documents.
      sequence_length: S.
      extra_token: whether the text has the S + 1st token.

    Returns:
      int32 [n + 1], from 0 to S: Megatron's cu_seqlens.
    """
    inputs = [int(length) for length in lengths]
    if extra_token and inputs:
        inputs[-1] -= 1
        if inputs[-1] <= 0:
            inputs.pop()
    bounds = np.cumsum([0, *inputs], dtype=np.int32)
    if bounds[-1] < sequence_length:
        bounds = bounds if len(bounds) > 1 else np.zeros(2, np.int32)
        bounds[-1] = sequence_length
    return bounds


def _shift(
    text: npt.NDArray[np.integer[Any]], pad_id: int, *, extra_token: bool
) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.integer[Any]]]:
    """Split texts into inputs and targets."""
    if extra_token:
        return text[..., :-1], text[..., 1:]
    last = np.full_like(text[..., :1], pad_id)
    return text, np.concatenate([text[..., 1:], last], axis=-1)
