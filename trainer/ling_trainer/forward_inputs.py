"""Token ids and documents from .npy files, checked, as a batch. B sequences, S tokens."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from ling_trainer.batch import Batch
from ling_trainer.data.index_file import DataError

type Ids = Int[np.ndarray, "B S"]


def read_ids(path: Path, *, what: str) -> Ids:
    """Read integers [B, S]; a row alone may be [S].

    Args:
      path: of a .npy file.
      what: for messages.

    Raises:
      DataError: the file is missing or damaged, or holds something else.
    """
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path} cannot be read as .npy: {error}; save {what} with numpy.save"
        ) from error
    if not isinstance(array, np.ndarray):  # .npz
        raise DataError(f"{path} holds several arrays; save {what} alone, with numpy.save")
    if not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"{path} holds {array.dtype}; {what} are integers")
    if array.ndim not in {1, 2} or not array.size:
        raise DataError(f"{path} has shape {list(array.shape)}; {what} are [B, S] or [S]")
    return np.atleast_2d(array)


def make_batch(
    tokens: Ids,
    segment_ids: Ids | None,
    *,
    vocab_size: int,
    depths: int,
    tokens_name: str,
    segments_name: str,
) -> Batch:
    """Check ids, and make the batch that a training step would have of them.

    Each position's target is the next token of its document. Positions restart in each.

    Args:
      tokens: ids; anything within the vocabulary where padding is.
      segment_ids: 0 is padding, equal ids a document, which is in one piece; None: each row is
        one document without padding.
      vocab_size: of the model.
      depths: of multi-token prediction.
      tokens_name: of tokens in messages.
      segments_name: of segment_ids.

    Raises:
      DataError: an id is out of range, shapes differ, a document is in two pieces, or rows are
        too short to have a target at each depth.
    """
    if tokens.shape[1] < depths + 2:
        raise DataError(
            f"{tokens_name} has rows of {tokens.shape[1]} tokens; a model that predicts "
            f"{1 + depths} tokens ahead needs {depths + 2} or more"
        )
    _check_range(tokens, vocab_size, f"{tokens_name}: tokens", f"vocab_size={vocab_size}")
    segments = np.ones_like(tokens) if segment_ids is None else segment_ids
    if segments.shape != tokens.shape:
        raise DataError(
            f"{segments_name} has shape {list(segments.shape)} and {tokens_name} "
            f"{list(tokens.shape)}; they must be equal"
        )
    _check_range(segments, 2**31, f"{segments_name}: segment_ids", "2^31")
    begins = _document_begins(segments, segments_name)
    place = np.arange(tokens.shape[1])
    targets = np.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    has_next = np.pad(~begins[:, 1:], ((0, 0), (0, 1)))
    return Batch(
        inputs=jnp.asarray(tokens, jnp.int32),
        targets=jnp.asarray(targets, jnp.int32),
        positions=jnp.asarray(place - np.maximum.accumulate(begins * place, axis=1), jnp.int32),
        segment_ids=jnp.asarray(segments, jnp.int32),
        loss_mask=jnp.asarray(has_next & (segments != 0)),
    )


def _check_range(ids: Ids, end: int, what: str, end_name: str) -> None:
    wrong = np.argwhere((ids < 0) | (ids >= end))
    if len(wrong):
        row, column = wrong[0]
        raise DataError(
            f"{what}[{row}, {column}]={ids[row, column]} is outside [0, {end_name}); "
            f"{len(wrong)} ids are"
        )


def _document_begins(segments: Ids, name: str) -> np.ndarray:
    """Mark the first token of each run of equal ids."""
    begins = np.ones(segments.shape, bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    for row, (ids, first) in enumerate(zip(segments, begins, strict=True)):
        found, runs = np.unique(ids[first & (ids != 0)], return_counts=True)
        if (runs > 1).any():
            raise DataError(
                f"{name}: segment_ids[{row}] has document {found[runs > 1][0]} in {runs.max()} "
                "pieces; give each document of a row an id of its own"
            )
    return begins
