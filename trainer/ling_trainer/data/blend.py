"""Megatron's blends: how many samples each dataset gives, and in which turn.

D datasets, w their weights normalised to sum 1, N the samples of the blend. At sample i the turn
is the dataset's that lags most behind its share: argmax of w * max(i, 1) - used; the first of
equals.

Source: Megatron-LM megatron/core/datasets/blended_megatron_dataset_builder.py, blended_dataset.py,
helpers.cpp@d98e8a64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_MAX_DATASETS = 32766
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Blend:
    """What a data path names.

    Attributes:
      prefixes: of the .bin/.idx pairs, in order; the same may occur twice.
      weights: one a prefix as written, or None: as the datasets are long.
      index_folders: folders of ready-made indices, one a prefix; None: indices are built.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    index_folders: tuple[str, ...] | None = None


@dataclass(frozen=True, eq=False)
class BlendIndex:
    """Whose turn it is.

    Attributes:
      dataset_index: int16 [N], the dataset of each sample.
      dataset_sample_index: int64 [N], the sample's number in its dataset.
    """

    dataset_index: npt.NDArray[np.int16]
    dataset_sample_index: npt.NDArray[np.int64]

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.dataset_index)


def parse_blend(text: str, *, with_index_folders: bool = False) -> Blend:
    """Read a data path: `prefix`, `prefix;prefix` or `prefix,weight;prefix,weight`.

    A single prefix with a weight is a blend of one, which is not the same as no blend: Megatron
    asks it for 0.5 % more samples.

    Args:
      text: as in data.dataset_path. What follows the last comma is a weight if it is a number.
      with_index_folders: each prefix is written `npy_dir|prefix`.

    Raises:
      ValueError: no or too many prefixes, weights for some of them only, or one that is not
        positive; a missing or superfluous npy_dir.
    """
    members = [member.strip() for member in text.split(";") if member.strip()]
    if not 1 <= len(members) <= _MAX_DATASETS:
        raise ValueError(
            f"{text!r} names {len(members)} datasets; name 1 to {_MAX_DATASETS} as "
            "prefix,weight;prefix,weight"
        )
    parsed = [_weighted(member) for member in members]
    weights = [weight for _, weight in parsed if weight is not None]
    if weights and len(weights) < len(members):
        missing = next(path for path, weight in parsed if weight is None)
        raise ValueError(f"{missing!r} has no weight and others have; give all a weight, or none")
    if any(not (weight > 0 and math.isfinite(weight)) for weight in weights):
        raise ValueError(f"weights {weights} must be positive; leave out what has none")
    folders, prefixes = [], []
    for path, _ in parsed:
        folder, bar, prefix = path.rpartition("|")
        if bool(bar) != with_index_folders:
            form = "npy_dir|prefix" if with_index_folders else "a prefix without '|'"
            raise ValueError(f"{path!r} must be {form} for this dataset_type; write it so")
        folders.append(folder)
        prefixes.append(prefix)
    return Blend(
        tuple(prefixes),
        tuple(weights) or None,
        tuple(folders) if with_index_folders else None,
    )


def _weighted(member: str) -> tuple[str, float | None]:
    path, comma, number = member.rpartition(",")
    if comma:
        try:
            return path.strip(), float(number)
        except ValueError:  # a comma of the path itself
            pass
    return member, None


def normalize(weights: Sequence[float]) -> list[float]:
    """Divide by the sum, in float64 as Megatron does; twice is not always once."""
    array = np.array(weights, np.float64)
    return (array / np.sum(array)).tolist()


def member_sizes(weights: Sequence[float], num_samples: int, *, surplus: float = 0.0) -> list[int]:
    """Compute how many samples each dataset is asked for: at least num_samples together.

    Args:
      weights: normalised.
      num_samples: of the blend.
      surplus: share that is added, so that the turns never ask for more than there is.
    """
    return [math.ceil(math.ceil(num_samples * weight) * (1 + surplus)) for weight in weights]


def build_blend_index(weights: Sequence[float], num_samples: int) -> BlendIndex:
    """Give num_samples turns by weight; weights are normalised here once more, as in Megatron."""
    shares = normalize(weights)
    turns = np.empty(num_samples, np.int16)
    used = [0.0] * len(shares)
    for start in range(0, num_samples, _BLOCK):
        stop = min(start + _BLOCK, num_samples)
        turns[start:stop] = _turns(shares, used, start, stop)
    return _numbered(turns, len(shares))


def build_exhaustive_blend_index(lengths: Sequence[int]) -> BlendIndex:
    """Give each dataset as many turns as it has samples; who has none left is passed over."""
    total = sum(lengths)
    shares = [length / total for length in lengths]
    turns = np.empty(total, np.int16)
    members = list(range(len(lengths)))
    used = [0.0] * len(lengths)
    start = 0
    while start < total:
        # Nobody runs out before that many turns.
        stop = min(start + min(lengths[d] - int(used[d]) for d in members), start + _BLOCK)
        left = [used[d] for d in members]
        found = _turns([shares[d] for d in members], left, start, stop)
        turns[start:stop] = [members[place] for place in found]
        for d, count in zip(members, left, strict=True):
            used[d] = count
        members = [d for d in members if used[d] < lengths[d]]
        start = stop
    return _numbered(turns, len(lengths))


def _turns(shares: list[float], used: list[float], start: int, stop: int) -> list[int]:
    """Choose the turns of samples start to stop - 1; `used` is counted on."""
    # A plain loop: each turn depends on the one before, and NumPy costs more than it saves on the
    # few numbers of one. It takes about a microsecond a sample, once where a cache keeps it.
    turns: list[int] = []
    for i in range(start, stop):
        place, turn, most = i or 1, 0, -math.inf
        for dataset, share in enumerate(shares):
            lag = share * place - used[dataset]
            if lag > most:
                turn, most = dataset, lag
        used[turn] += 1.0
        turns.append(turn)
    return turns


def _numbered(turns: npt.NDArray[np.int16], num_datasets: int) -> BlendIndex:
    """Number each dataset's samples from 0 in the order of their turns."""
    numbers = np.empty(len(turns), np.int64)
    for dataset in range(num_datasets):
        mine = np.flatnonzero(turns == dataset)
        numbers[mine] = np.arange(len(mine))
    return BlendIndex(turns, numbers)
