"""Parameters and router biases on disk as Orbax stores them, written and read a slice at a time.

Orbax saves and restores whole arrays. Converting a model that no machine holds needs slices, so
this writes and reads Orbax's own layout (zarr arrays in one OCDBT store, and `_METADATA`) by
TensorStore. What it writes, Orbax restores; what a run saved, it reads.
Source of the layout: orbax-checkpoint 0.12.8 checkpoint/_src/{metadata/tree.py,serialization}.
"""

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import tensorstore as ts
from etils import epath
from jaxtyping import Float

type Keys = tuple[str | int, ...]

_CHUNK_BYTES = 64 * 2**20
_UNWRITTEN_BYTES = 64 * 2**20  # what may wait to be written
_STEP = 2**20  # elements a turn of a checksum


class ParameterWriter:
    """Write float32 arrays in any order, each element once.

    Use as a context manager: leaving it, nothing is being written any more.
    """

    def __init__(
        self,
        directory: epath.Path,
        shapes: Mapping[Keys, tuple[int, ...]],
        leading: Mapping[Keys, int],
    ) -> None:
        """Make the store.

        Args:
          directory: to make; of an Orbax item.
          shapes: of every array by its path in the tree; lists have integers for keys.
          leading: how many first coordinates each write to an array names.
        """
        directory.mkdir()
        self._directory, self._shapes = directory, dict(shapes)
        context = ts.Context()  # one, so that what is written at once is committed at once
        opening = {
            path: ts.open(_spec(directory, path) | _create(shape, leading[path]), context=context)
            for path, shape in shapes.items()
        }
        self._arrays = {path: array.result() for path, array in opening.items()}
        self._sums = dict.fromkeys(shapes, 0)
        self._writes: list[tuple[int, Any]] = []

    def write(self, path: Keys, index: tuple[int, ...], value: Float[np.ndarray, "..."]) -> None:
        """Write array[index]; `index` are the first coordinates, () for the whole."""
        shape = self._shapes[path]
        place = int(np.ravel_multi_index(index, shape[: len(index)])) if index else 0
        self._sums[path] += slice_checksum(value, start=place * value.size)
        target = self._arrays[path][index] if index else self._arrays[path]
        self._writes.append((value.nbytes, target.write(value)))
        if sum(size for size, _ in self._writes) > _UNWRITTEN_BYTES:
            self._wait()

    def close(self) -> dict[str, int]:
        """Finish, and return each array's checksum by its name, as checksum.py computes it."""
        self._wait()
        (self._directory / "_METADATA").write_text(json.dumps(_metadata(self._shapes)))
        return {leaf_name(path): total % 2**32 for path, total in self._sums.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for write in self._writes:
            with contextlib.suppress(OSError, ValueError):  # close() would have raised them
                write[1].result()

    def _wait(self) -> None:
        for _, write in self._writes:
            write.result()
        self._writes.clear()


class ParameterReader:
    """Read arrays of an Orbax item: slices of them, nothing more."""

    def __init__(self, directory: epath.Path, prefix: Keys = ()) -> None:
        self._directory, self._prefix, self._context = directory, prefix, ts.Context()
        self._arrays: dict[Keys, ts.TensorStore] = {}

    def shape(self, path: Keys) -> tuple[int, ...]:
        """Return an array's shape."""
        return tuple(self._open(path).shape)

    def slices(self, path: Keys, leading: int) -> bool:
        """Tell whether array[i, j, ...] of so many coordinates is stored apart from the rest."""
        chunk = self._open(path).chunk_layout.read_chunk.shape
        return chunk is not None and all(size == 1 for size in chunk[:leading])

    def read(self, path: Keys, index: tuple[Any, ...] = ()) -> Float[np.ndarray, "..."]:
        """Read array[index]; `index` are coordinates or slices, () for the whole."""
        array = self._open(path)
        return np.asarray((array[index] if index else array).read().result())

    def _open(self, path: Keys) -> ts.TensorStore:
        if path not in self._arrays:
            spec = _spec(self._directory, (*self._prefix, *path))
            opening = ts.open(spec | {"open": True}, read=True, context=self._context)
            self._arrays[path] = opening.result()
        return self._arrays[path]


def leaf_name(path: Keys) -> str:
    """Write a path with dots, as checksum.leaf_name does."""
    return ".".join(map(str, path))


def slice_checksum(value: Float[np.ndarray, "..."], *, start: int) -> int:
    """Return the part of checksum.leaf_checksums that a run of elements adds; parts add up.

    Args:
      value: elements that follow each other in the array, in C order.
      start: place of the first one in the flattened array.
    """
    bits = np.ascontiguousarray(value, np.float32).reshape(-1).view(np.uint32)
    total = 0
    for first in range(0, bits.size, _STEP):
        part = bits[first : first + _STEP]
        places = np.arange(start + first, start + first + part.size, dtype=np.uint64)
        weights = (2 * places + 1).astype(np.uint32)
        total += int((part * weights).sum(dtype=np.uint32))
    return total % 2**32


def _spec(directory: epath.Path, path: Keys) -> dict[str, Any]:
    where = f"{directory}/"
    local = {"driver": "file", "path": f"{Path(where).absolute()}/"}
    base = where if "://" in where else local
    kvstore = {"driver": "ocdbt", "base": base, "path": leaf_name(path) + "/"}
    return {"driver": "zarr", "kvstore": kvstore}


def _create(shape: tuple[int, ...], leading: int) -> dict[str, Any]:
    """Return the part of a spec that makes an array, in chunks of no more than one write."""
    chunk = [1] * leading + [max(size, 1) for size in shape[leading:]]
    if leading < len(shape):
        row = math.prod(chunk[leading + 1 :]) * 4
        chunk[leading] = min(chunk[leading], max(1, _CHUNK_BYTES // row))
    compressor = {"id": "zstd", "level": 1}
    metadata = {
        "shape": list(shape), "chunks": chunk, "dtype": "<f4", "compressor": compressor,
    }  # fmt: skip
    return {"metadata": metadata, "create": True}


def _metadata(shapes: Mapping[Keys, tuple[int, ...]]) -> dict[str, Any]:
    """Return what Orbax's StandardCheckpointHandler keeps of a tree; 1 is a list, 2 a dict."""
    tree = {
        str(tuple(map(str, path))): {
            "key_metadata": [
                {"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in path
            ],
            "value_metadata": {
                "value_type": "np.ndarray",
                "skip_deserialize": False,
                "write_shape": list(shape),
            },
        }
        for path, shape in shapes.items()
    }
    return {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
