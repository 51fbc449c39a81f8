"""Compare the tensors of two checkpoints, one pair at a time."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Shaped

from ling_trainer.hf_files import HfTensors

_STEP = 2**20  # elements a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One tensor of the report.

    Attributes:
      name: Hugging Face's.
      shape: on the side that has it.
      status: equal and different compare every element; missing is not in the Hugging Face
        directory, left over not among the parameters.
      max_difference: of the elements, in float32; NaN where one is NaN or the shapes differ.
      cosine: of the angle between both, as vectors; 1 where both are zero, NaN where not finite.
    """

    name: str
    shape: tuple[int, ...]
    status: Literal["equal", "different", "missing", "left over"]
    max_difference: float = math.nan
    cosine: float = math.nan

    def __str__(self) -> str:
        shape = f"{list(self.shape)}"
        return f"{self.name:<64} {shape:<20} {self.status:<9} " + (
            ""
            if self.status in {"missing", "left over"}
            else f"{self.max_difference:.3e} {self.cosine:.9f}"
        )


HEADING = f"{'tensor':<64} {'shape':<20} {'status':<9} max difference, cosine"


def compare(
    ours: Iterable[tuple[str, Shaped[np.ndarray, "..."]]], theirs: HfTensors
) -> Iterator[Row]:
    """Compare every tensor of ours with the Hugging Face directory's of the same name."""
    seen: set[str] = set()
    for name, tensor in ours:
        seen.add(name)
        if name not in theirs:
            yield Row(name=name, shape=tensor.shape, status="missing")
            continue
        yield _row(name, tensor, theirs[name])
    for name in theirs:
        if name not in seen:
            yield Row(name=name, shape=theirs.shape(name), status="left over")


def _row(name: str, a: Shaped[np.ndarray, "..."], b: Shaped[np.ndarray, "..."]) -> Row:
    shape = a.shape
    if shape != b.shape:
        return Row(name=name, shape=shape, status="different")
    difference, products, equal = 0.0, np.zeros(3), True
    a, b = np.ascontiguousarray(a).reshape(-1), b.reshape(-1)
    for start in range(0, a.size, _STEP):
        x = a[start : start + _STEP].astype(np.float32)
        y = b[start : start + _STEP].astype(np.float32)
        equal &= bool(np.array_equal(x.view(np.uint32), y.view(np.uint32)))
        x, y = x.astype(np.float64), y.astype(np.float64)
        with np.errstate(invalid="ignore"):  # of infinities
            gaps = np.where(x == y, 0.0, np.abs(x - y))
            difference = float(np.maximum(difference, gaps.max()))
            products += (x @ y, x @ x, y @ y)
    dot, xx, yy = products
    norm = np.sqrt(xx * yy)
    with np.errstate(invalid="ignore"):
        cosine = float(dot / norm if norm else xx == yy)
    return Row(
        name=name,
        shape=shape,
        status="equal" if equal else "different",
        max_difference=difference,
        cosine=cosine,
    )
