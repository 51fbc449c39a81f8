"""The .idx of Megatron's indexed dataset: where the sequences of its .bin lie.

Little-endian: magic (9 bytes), version u64, dtype code u8, S sequences u64, D document entries
u64, length i32[S], byte pointer i64[S], document index i64[D], and in multimodal files mode i8[S].
Document d is the sequences document_indices[d] to document_indices[d + 1] - 1.

Source: Megatron-LM megatron/core/datasets/indexed_dataset.py@d98e8a64.
"""

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

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


class StorageError(OSError):
    """Remote storage did not answer in time. Another attempt of the run may have more luck."""


def bad_byte(path: str | Path, byte: int, problem: str, remedy: str) -> DataError:
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
class IndexFile:
    """An .idx, memory-mapped and checked. Make one with `read_index`.

    Attributes:
      path: of the file; of its local copy where the dataset is remote.
      dtype: of a token.
      lengths: int32 [S], tokens of each sequence.
      pointers: int64 [S], bytes into the .bin.
      documents: int64 [D]; the first is 0, the last S.
      modes: int8 [S] in a multimodal file, else None.
    """

    path: Path
    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]
    modes: npt.NDArray[np.int8] | None

    def sha256(self) -> str:
        """Compute the hash of the whole file, in hexadecimal."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def file_size(path: Path) -> int:
    """Return the size of a file of a dataset in bytes.

    Raises:
      DataError: it is missing, or no file.
    """
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


def map_array(path: Path, dtype: npt.DTypeLike, offset: int, count: int) -> npt.NDArray[Any]:
    """Map count values of a file from a byte on."""
    if count == 0:  # an empty range cannot be mapped
        return np.empty(0, dtype)
    # A plain view: slicing a memmap costs several times as much, and a sample is many slices.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))


def _read_header(path: Path, name: str, size: int) -> tuple[np.dtype[Any], int, int]:
    """Return dtype, number of sequences and of document entries."""
    remake = "copy the file again or rebuild the dataset"
    if size < HEADER.size:
        problem = f"the file ends inside the {HEADER.size}-byte header"
        raise bad_byte(name, size, problem, remake)
    with path.open("rb") as file:
        raw = file.read(HEADER.size)
    magic, version, code, sequences, entries = HEADER.unpack(raw)
    if magic != MAGIC:
        problem = f"starts with {magic!r}, not with {MAGIC!r}"
        raise bad_byte(name, 0, problem, "name a Megatron .idx file (mmap format)")
    if version != VERSION:
        remedy = f"rebuild it in version {VERSION}"
        raise bad_byte(name, 9, f"version {version} is not known", remedy)
    if code not in DTYPES:
        problem = f"dtype code {code} is not one of {min(DTYPES)} to {max(DTYPES)}"
        raise bad_byte(name, 17, problem, remake)
    if entries < 1:
        raise bad_byte(name, 26, "0 document entries, but even 0 documents need one", remake)
    return DTYPES[code], sequences, entries


def read_index(path: Path, *, name: str) -> IndexFile:
    """Map an .idx and check that it is whole.

    Args:
      path: of a local file.
      name: what errors call it.

    Raises:
      DataError: the file is missing, truncated, damaged or of another format.
    """
    size = file_size(path)
    dtype, sequences, entries = _read_header(path, name, size)
    sections = (
        ("sequence lengths", np.dtype("<i4"), sequences),
        ("sequence pointers", np.dtype("<i8"), sequences),
        ("document indices", np.dtype("<i8"), entries),
    )
    arrays: list[npt.NDArray[Any]] = []
    start = HEADER.size
    for section, section_dtype, count in sections:
        end = start + section_dtype.itemsize * count
        if end > size:
            problem = (
                f"the file ends inside its {section} (bytes {start} to {end}: its header promises "
                f"{sequences} sequences and {entries} document entries)"
            )
            raise bad_byte(name, size, problem, "copy the file again or rebuild the dataset")
        arrays.append(map_array(path, section_dtype, start, count))
        start = end
    # The header has no flag for modes: only the file's size tells.
    if size not in {start, start + sequences}:
        problem = (
            f"{size - start} bytes follow the document indices; there may be none, or "
            f"{sequences} (the modes of a multimodal dataset)"
        )
        raise bad_byte(name, min(size, start + sequences), problem, "rebuild the dataset")
    modes = map_array(path, np.int8, start, sequences) if size > start else None
    index = IndexFile(path, dtype, arrays[0], arrays[1], arrays[2], modes)
    _check_index(name, index)
    return index


def _check_index(name: str, index: IndexFile) -> None:
    count, entries = len(index.lengths), len(index.documents)
    remake = "the file is damaged; copy it again or rebuild the dataset"
    wrong = index.lengths < 0
    if wrong.any():
        i = int(wrong.argmax())
        byte = HEADER.size + 4 * i
        raise bad_byte(name, byte, f"sequence {i} has length {index.lengths[i]}", remake)

    # Megatron only ever writes sequences back to back, so a pointer that is not the sum of the
    # lengths before it gives away a damaged length as well as a damaged pointer.
    expected = np.zeros(count, np.int64)
    np.cumsum(index.lengths[:-1], dtype=np.int64, out=expected[1:])
    expected *= index.dtype.itemsize
    wrong = index.pointers != expected
    if wrong.any():
        i = int(wrong.argmax())
        byte = HEADER.size + 4 * count + 8 * i
        problem = (
            f"sequence {i} points to byte {index.pointers[i]} of the .bin; the lengths before it "
            f"end at {expected[i]}"
        )
        raise bad_byte(name, byte, problem, remake)

    byte = HEADER.size + 12 * count
    if index.documents[0] != 0:
        raise bad_byte(name, byte, f"document 0 starts at {index.documents[0]}, not 0", remake)
    wrong = np.diff(index.documents) < 0
    if wrong.any():
        i = int(wrong.argmax()) + 1
        problem = (
            f"document {i} starts at sequence {index.documents[i]}, before document {i - 1} "
            f"({index.documents[i - 1]})"
        )
        raise bad_byte(name, byte + 8 * i, problem, remake)
    if index.documents[-1] != count:
        problem = f"the documents end at sequence {index.documents[-1]}, not at {count}"
        raise bad_byte(name, byte + 8 * (entries - 1), problem, remake)
