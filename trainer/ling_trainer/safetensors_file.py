"""The safetensors format: a JSON header, then raw arrays; read and written one tensor at a time.

The library reads by mmap, whose pages count as the process's memory, and writes whole
dictionaries. Here a tensor is in memory while it is used, whatever the file's size.
Source: https://github.com/huggingface/safetensors README.md, section Format (release 0.8.0).
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType({
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
})  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit


class TensorFileError(ValueError):
    """A safetensors file, or the directory it is in, is damaged or holds what cannot be read."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says of one tensor: its shape, type, and bytes from `start` in the file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int

    @property
    def num_bytes(self) -> int:
        """Length of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read what tensors a file holds, and check that the file is as long as they are.

    Raises:
      TensorFileError: the file is missing, truncated, no safetensors, or has an unknown type.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
                raise TensorFileError(
                    f"{path}: {size} bytes do not hold the header of a safetensors file; it is "
                    "truncated or of another format, get it again"
                )
            header = json.loads(file.read(length))
            infos = {n: _info(e, 8 + length) for n, e in header.items() if n != "__metadata__"}
    except OSError as error:
        raise TensorFileError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, TensorFileError):
            raise
        raise TensorFileError(f"{path}: the header is damaged ({error}); get it again") from error
    end = max((info.start + info.num_bytes for info in infos.values()), default=8 + length)
    if end != size:
        raise TensorFileError(
            f"{path}: {size} bytes, but its header describes {end}; it is "
            f"{'truncated' if size < end else 'damaged'}, get it again"
        )
    return infos


def _info(entry: Mapping[str, Any], data: int) -> TensorInfo:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {entry['dtype']} is not known")
    start, end = entry["data_offsets"]
    info = TensorInfo(tuple(map(int, entry["shape"])), DTYPES[entry["dtype"]], data + start)
    if end - start != info.num_bytes or start < 0:
        raise ValueError(f"data_offsets {[start, end]} do not fit shape {entry['shape']}")
    return info


def read_tensor(path: Path, info: TensorInfo) -> Shaped[np.ndarray, "..."]:
    """Read one tensor, in the type it is stored in.

    Raises:
      TensorFileError: the file cannot be read, or is shorter than it was.
    """
    try:
        with path.open("rb") as file:
            file.seek(info.start)
            data = bytearray(info.num_bytes)
            count = file.readinto(data)
    except OSError as error:
        raise TensorFileError(f"{path}: cannot be read ({error.strerror or error})") from error
    if count != info.num_bytes:
        raise TensorFileError(f"{path}: ends {info.num_bytes - count} bytes early; get it again")
    return np.frombuffer(data, info.dtype).reshape(info.shape)


class TensorWriter:
    """Write a file whose tensors are known by shape and type beforehand, in any order.

    Use as a context manager. Leaving it without an error checks that all were written.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
        metadata: Mapping[str, str] = MappingProxyType({"format": "pt"}),
    ) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        position, starts = 0, {}
        for name, (shape, dtype) in tensors.items():
            starts[name] = TensorInfo(shape, dtype, position)
            end = position + starts[name].num_bytes
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [position, end],
            }
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # aligns the data
        self._data = 8 + len(text)
        self._infos = starts
        self._left = {name: info.num_bytes for name, info in starts.items()}
        self._path = path
        with path.open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(self._data + position)

    def write(self, name: str, value: Shaped[np.ndarray, "..."]) -> None:
        """Write one tensor; its shape and type must be those announced."""
        info = self._infos[name]
        if value.shape != info.shape or value.dtype != info.dtype:
            raise ValueError(
                f"{name} is {value.dtype}{list(value.shape)}; "
                f"{info.dtype}{list(info.shape)} was announced"
            )
        self._write_at(name, 0, value)

    def write_row(self, name: str, row: int, value: Shaped[np.ndarray, "..."]) -> None:
        """Write one row of a tensor's first dimension; each row once."""
        info = self._infos[name]
        if value.shape != info.shape[1:] or value.dtype != info.dtype or row >= info.shape[0]:
            raise ValueError(
                f"row {row} of {name} is {value.dtype}{list(value.shape)}; "
                f"{info.dtype}{list(info.shape)} was announced"
            )
        self._write_at(name, row * value.nbytes, value)

    def _write_at(self, name: str, offset: int, value: Shaped[np.ndarray, "..."]) -> None:
        with self._path.open("r+b") as file:  # each time: a large model has a thousand files
            file.seek(self._data + self._infos[name].start + offset)
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        self._left[name] -= value.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return
        unfinished = sum(left != 0 for left in self._left.values())
        if unfinished:
            raise ValueError(f"{self._path}: {unfinished} tensors were never written whole")
        with self._path.open("r+b") as file:
            os.fsync(file.fileno())
