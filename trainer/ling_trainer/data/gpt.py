"""Megatron's sample order: documents in random order, cut into samples, shuffled again.

L is the sequence length, x is 1 where a sample carries one extra token (inputs and targets then
come from one text of L + x tokens) and else 0, T the tokens of an epoch, E the epochs. As in
Megatron every sequence of the .idx counts as a document here.

Source: Megatron-LM megatron/core/datasets/gpt_dataset.py, helpers.cpp and
blended_megatron_dataset_config.py@d98e8a64.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

type SplitName = Literal["train", "valid", "test"]
type Ints = npt.NDArray[np.integer[Any]]

SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")
_INT32_MAX = np.iinfo(np.int32).max
_UINT32_MAX = np.iinfo(np.uint32).max
_SEPARATE_BELOW = 0.80


@dataclass(frozen=True, eq=False)
class GPTIndex:
    """The order of one split's samples.

    Attributes:
      document_index: int32 [E * documents], documents in reading order.
      sample_index: int32 (int64 if it must) [num_samples + 1, 2]. Sample j goes from pair j, a
        position in document_index and an offset in that document, to pair j + 1.
      shuffle_index: uint32 (int64 if it must) [num_samples]; sample i of the run is shuffle[i].
      num_epochs: E.
    """

    document_index: Ints
    sample_index: Ints
    shuffle_index: Ints
    num_epochs: int

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.shuffle_index)


def split_documents(split: str, num_documents: int, name: SplitName) -> range:
    """Find the documents of one split.

    Args:
      split: shares of train, validation and test such as "969,30,1"; any positive scale.
      num_documents: sequences in the .idx.
      name: which split.

    Returns:
      The documents; empty where the share is 0 or rounds to none.

    Raises:
      ValueError: split does not hold one to three numbers with a positive sum.
    """
    shares = [_number(share) for share in re.findall(r"[.0-9]+", split)]
    if not 1 <= len(shares) <= len(SPLITS) or not sum(shares) > 0:
        raise ValueError(
            f"data.split={split!r} is not one to three shares with a positive sum; "
            "write it like 999,1,0"
        )
    vector = np.array([*shares, 0.0, 0.0][: len(SPLITS)])
    # Megatron's own arithmetic, step by step: another order of the same sums may round elsewhere.
    fractions: list[float] = (vector / vector.sum()).tolist()
    low = 0.0
    for fraction, candidate in zip(fractions, SPLITS, strict=True):
        high = low + fraction
        if candidate == name and high > low:
            return range(round(low * num_documents), round(high * num_documents))
        low = high
    return range(0)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # such as 1.2.3
        return math.nan


def build_index(
    lengths: npt.NDArray[np.int32],
    documents: npt.NDArray[np.int32],
    *,
    num_samples: int | None,
    sequence_length: int,
    seed: int,
    extra_token: bool = True,
    drop_last_partial: bool = True,
) -> GPTIndex:
    """Order the samples of a split exactly as Megatron's GPTDataset does.

    All random draws come from one RandomState(seed): the document order first, then the shuffle.
    If the last epoch gives less than 80 % of its samples, it is shuffled by itself and comes last.

    Args:
      lengths: int32 [S], tokens of every sequence in the .idx.
      documents: int32 [documents], the split's.
      num_samples: samples that are needed; the result has at least as many. None: one epoch.
      sequence_length: L.
      seed: 0 <= seed < 2**32.
      extra_token: x.
      drop_last_partial: False keeps a last sample that is shorter than L (validation).

    Raises:
      ValueError: the documents hold at most one token, or make no sample at all, or the seed is
        too large.
    """
    if not 0 <= seed <= _UINT32_MAX:
        raise ValueError(f"data.data_shuffle_seed={seed} is not below 2**32; choose a lower one")
    extra = int(extra_token)
    per_epoch = int(lengths[documents].sum(dtype=np.int64))
    if per_epoch <= 1:
        raise ValueError(f"{len(documents)} documents hold {per_epoch} tokens; name more data")
    needed = 0 if num_samples is None else num_samples * sequence_length + extra
    epochs = max(1, -(-needed // per_epoch))
    first = ((epochs - 1) * per_epoch - extra) // sequence_length  # samples of all but the last
    threshold = int(_SEPARATE_BELOW * ((per_epoch - extra) // sequence_length))
    separate = epochs > 1 and num_samples is not None and num_samples - first < threshold

    random = np.random.RandomState(seed)
    document_index = _document_index(documents, epochs, separate=separate, random=random)
    sample_index = build_sample_index(
        lengths,
        document_index,
        sequence_length=sequence_length,
        extra_token=extra_token,
        drop_last_partial=drop_last_partial,
    )
    total = len(sample_index) - 1
    if total == 0:
        raise ValueError(
            f"{per_epoch} tokens do not make one sample of {sequence_length + extra}; shorten "
            "data.max_target_length, give the split a larger share, or add documents"
        )
    shuffle_index = _shuffle_index(first if separate else total, total, random=random)
    return GPTIndex(document_index, sample_index, shuffle_index, epochs)


def _document_index(
    documents: npt.NDArray[np.int32], epochs: int, *, separate: bool, random: np.random.RandomState
) -> Ints:
    runs = (epochs - 1, 1) if separate else (epochs,)
    return np.concatenate([_shuffled(np.tile(documents, run), random) for run in runs])


def build_sample_index(
    lengths: npt.NDArray[np.int32],
    document_index: Ints,
    *,
    sequence_length: int,
    extra_token: bool,
    drop_last_partial: bool,
) -> Ints:
    """Find where each sample starts: boundary k is where k * L tokens are used up.

    Boundary k lies in the first document by whose end k * L + x tokens have been read, so with
    x = 0 it may lie at the very end of a document. Empty documents hold no boundary but the first.

    Returns:
      [num_samples + 1, 2], position in document_index and offset, as in GPTIndex.
    """
    extra = int(extra_token)
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    tokens = int(ends[-1]) - extra
    if drop_last_partial:
        count = tokens // sequence_length
    else:
        # float32 as in Megatron: above 2**24 tokens this may be one off.
        count = int(np.ceil(np.float32(tokens) / np.float32(sequence_length)))
    widest = max(len(document_index), int(lengths.max()))
    index = np.zeros((count + 1, 2), np.int32 if widest <= _INT32_MAX else np.int64)
    used = np.arange(1, count + 1, dtype=np.int64) * sequence_length
    last = len(document_index) - 1
    position = np.minimum(np.searchsorted(ends, used + extra, side="left"), last)
    offset = used - (ends[position] - lengths[document_index[position]])
    # A partial last sample ends with the last document, whatever is missing to L.
    offset[used > tokens] = max(int(lengths[document_index[last]]) - extra, 0)
    index[1:, 0] = position
    index[1:, 1] = offset
    return index


def _shuffle_index(first: int, total: int, *, random: np.random.RandomState) -> Ints:
    """Shuffle [0, first), then [first, total)."""
    dtype = np.uint32 if total < _UINT32_MAX - 1 else np.int64
    parts = [np.arange(first, dtype=dtype)]
    if first < total:
        parts.append(np.arange(first, total, dtype=dtype))
    return np.concatenate([_shuffled(part, random) for part in parts])


def _shuffled(values: Ints, random: np.random.RandomState) -> Ints:
    """Shuffle as `random.shuffle` does; NumPy is a third faster on its widest integers."""
    wide = values.astype(np.intp)
    random.shuffle(wide)
    return wide.astype(values.dtype)
