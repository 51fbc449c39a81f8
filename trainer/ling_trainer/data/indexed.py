"""Megatron's indexed dataset: a .bin of raw tokens beside an .idx that says where sequences lie.

The .idx, little-endian: magic (9 bytes), version u64, dtype code u8, S sequences u64, D document
entries u64, length i32[S], byte pointer i64[S], document index i64[D], and in multimodal files
mode i8[S]. Document d is the sequences document_indices[d] to document_indices[d + 1] - 1.

Source: Megatron-LM megatron/core/datasets/indexed_dataset.py@d98e8a64.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

type Tokens = npt.NDArray[Any]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
"""The dtype codes of the format."""


class DataError(ValueError):
    """Input data that cannot be used; the message says where it is wrong and what to do."""


def bad_byte(path: Path, byte: int, problem: str, remedy: str) -> DataError:
    """Build the DataError for a file that goes wrong at a byte."""
    return DataError(f"{path}, byte {byte}: {problem}; {remedy}")


def index_path(prefix: Path) -> Path:
    """Name the .idx of a dataset prefix; the prefix itself may hold dots."""
    return prefix.parent / f"{prefix.name}.idx"


def bin_path(prefix: Path) -> Path:
    """Name the .bin of a dataset prefix."""
    return prefix.parent / f"{prefix.name}.bin"


def optimal_dtype(vocab_size: int) -> np.dtype[Any]:
    """Choose the token dtype as Megatron does: uint16 if vocab_size < 65500, else int32."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


@dataclass(frozen=True, eq=False)
class IndexedDataset:
    """A .bin/.idx pair, memory-mapped and checked. Make one with `open`.

    Attributes:
      prefix: path of the two files without their endings.
      sequence_lengths: int32 [S], tokens.
      sequence_pointers: int64 [S], bytes into the .bin.
      document_indices: int64 [D]; the first is 0, the last S.
      sequence_modes: int8 [S] in a multimodal file, else None.
      tokens: every token of the .bin, one after the other.
    """

    prefix: Path
    sequence_lengths: npt.NDArray[np.int32]
    sequence_pointers: npt.NDArray[np.int64]
    document_indices: npt.NDArray[np.int64]
    sequence_modes: npt.NDArray[np.int8] | None
    tokens: Tokens

    @classmethod
    def open(cls, prefix: str | os.PathLike[str]) -> Self:
        """Map a pair of files and check that they are whole and belong together.

        Raises:
          DataError: a file is missing, truncated, of another format, or the two disagree. It
            names the file and the byte.
        """
        prefix = Path(prefix)
        dtype, arrays = _read_index(index_path(prefix))
        tokens = _map_tokens(bin_path(prefix), dtype, arrays.lengths)
        return cls(prefix, arrays.lengths, arrays.pointers, arrays.documents, arrays.modes, tokens)

    def __len__(self) -> int:
        """Count the sequences."""
        return len(self.sequence_lengths)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a token."""
        return self.tokens.dtype

    def read(self, sequence: int, *, offset: int = 0, length: int | None = None) -> Tokens:
        """Read tokens of a sequence: a view of the mapped file, clipped to the sequence.

        Args:
          sequence: 0 <= sequence < len(self).
          offset: first token, counted from the sequence's own start.
          length: tokens to read; None reads to the end.
        """
        start = int(self.sequence_pointers[sequence]) // self.dtype.itemsize
        size = int(self.sequence_lengths[sequence])
        end = size if length is None else min(offset + length, size)
        return self.tokens[start + min(offset, size) : start + end]


@dataclass(frozen=True, eq=False)
class _IndexArrays:
    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]
    modes: npt.NDArray[np.int8] | None


def _file_size(path: Path) -> int:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); dataset_path is the path of a .bin/.idx "
            "pair without the endings, and both files must be there"
        ) from error
    if not path.is_file():
        raise DataError(f"{path}: is not a file; name the prefix of a .bin/.idx pair")
    return size


def _map(path: Path, dtype: npt.DTypeLike, offset: int, count: int) -> npt.NDArray[Any]:
    if count == 0:  # an empty range cannot be mapped
        return np.empty(0, dtype)
    # A plain view: slicing a memmap costs several times as much, and a sample is many slices.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))


def _read_header(path: Path, size: int) -> tuple[np.dtype[Any], int, int]:
    """Return dtype, number of sequences and of document entries."""
    remake = "copy the file again or rebuild the dataset"
    if size < HEADER.size:
        problem = f"the file ends inside the {HEADER.size}-byte header"
        raise bad_byte(path, size, problem, remake)
    with path.open("rb") as file:
        raw = file.read(HEADER.size)
    magic, version, code, sequences, entries = HEADER.unpack(raw)
    if magic != MAGIC:
        problem = f"starts with {magic!r}, not with {MAGIC!r}"
        raise bad_byte(path, 0, problem, "name a Megatron .idx file (mmap format)")
    if version != VERSION:
        remedy = f"rebuild it in version {VERSION}"
        raise bad_byte(path, 9, f"version {version} is not known", remedy)
    if code not in DTYPES:
        problem = f"dtype code {code} is not one of {min(DTYPES)} to {max(DTYPES)}"
        raise bad_byte(path, 17, problem, remake)
    if entries < 1:
        raise bad_byte(path, 26, "0 document entries, but even 0 documents need one", remake)
    return DTYPES[code], sequences, entries


def _read_index(path: Path) -> tuple[np.dtype[Any], _IndexArrays]:
    size = _file_size(path)
    dtype, sequences, entries = _read_header(path, size)
    sections = (
        ("sequence lengths", np.dtype("<i4"), sequences),
        ("sequence pointers", np.dtype("<i8"), sequences),
        ("document indices", np.dtype("<i8"), entries),
    )
    arrays: list[npt.NDArray[Any]] = []
    start = HEADER.size
    for name, section_dtype, count in sections:
        end = start + section_dtype.itemsize * count
        if end > size:
            problem = (
                f"the file ends inside its {name} (bytes {start} to {end}: its header promises "
                f"{sequences} sequences and {entries} document entries)"
            )
            raise bad_byte(path, size, problem, "copy the file again or rebuild the dataset")
        arrays.append(_map(path, section_dtype, start, count))
        start = end
    # The header has no flag for modes: only the file's size tells.
    if size not in {start, start + sequences}:
        problem = (
            f"{size - start} bytes follow the document indices; there may be none, or "
            f"{sequences} (the modes of a multimodal dataset)"
        )
        raise bad_byte(path, min(size, start + sequences), problem, "rebuild the dataset")
    modes = _map(path, np.int8, start, sequences) if size > start else None
    index = _IndexArrays(arrays[0], arrays[1], arrays[2], modes)
    _check_index(path, index, dtype.itemsize)
    return dtype, index


def _check_index(path: Path, index: _IndexArrays, itemsize: int) -> None:
    count, entries = len(index.lengths), len(index.documents)
    remake = "the file is damaged; copy it again or rebuild the dataset"
    wrong = index.lengths < 0
    if wrong.any():
        i = int(wrong.argmax())
        byte = HEADER.size + 4 * i
        raise bad_byte(path, byte, f"sequence {i} has length {index.lengths[i]}", remake)

    # Megatron only ever writes sequences back to back, so a pointer that is not the sum of the
    # lengths before it gives away a damaged length as well as a damaged pointer.
    expected = np.zeros(count, np.int64)
    np.cumsum(index.lengths[:-1], dtype=np.int64, out=expected[1:])
    expected *= itemsize
    wrong = index.pointers != expected
    if wrong.any():
        i = int(wrong.argmax())
        byte = HEADER.size + 4 * count + 8 * i
        problem = (
            f"sequence {i} points to byte {index.pointers[i]} of the .bin; the lengths before it "
            f"end at {expected[i]}"
        )
        raise bad_byte(path, byte, problem, remake)

    byte = HEADER.size + 12 * count
    if index.documents[0] != 0:
        raise bad_byte(path, byte, f"document 0 starts at {index.documents[0]}, not 0", remake)
    wrong = np.diff(index.documents) < 0
    if wrong.any():
        i = int(wrong.argmax()) + 1
        problem = (
            f"document {i} starts at sequence {index.documents[i]}, before document {i - 1} "
            f"({index.documents[i - 1]})"
        )
        raise bad_byte(path, byte + 8 * i, problem, remake)
    if index.documents[-1] != count:
        problem = f"the documents end at sequence {index.documents[-1]}, not at {count}"
        raise bad_byte(path, byte + 8 * (entries - 1), problem, remake)


def _map_tokens(path: Path, dtype: np.dtype[Any], lengths: npt.NDArray[np.int32]) -> Tokens:
    size = _file_size(path)
    count = int(lengths.sum(dtype=np.int64))
    expected = count * dtype.itemsize
    remedy = f"the .idx and the .bin of {path.stem} do not belong together; copy both again"
    if size < expected:
        ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
        i = int(np.searchsorted(ends, size, side="right"))
        problem = f"the file ends inside sequence {i}, which goes on to byte {ends[i]}"
        raise bad_byte(path, size, problem, remedy)
    if size > expected:
        problem = f"{size - expected} bytes follow the last sequence of the .idx"
        raise bad_byte(path, expected, problem, remedy)
    return _map(path, dtype, 0, count)
