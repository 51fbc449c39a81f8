"""Write Megatron's indexed dataset: a .bin of raw tokens and its .idx (see indexed.py)."""

import contextlib
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ling_trainer.data.index_file import DTYPES, HEADER, MAGIC, VERSION, bin_path, index_path

_BUFFER_BYTES = 1 << 20
_INT32_MAX = np.iinfo(np.int32).max


@contextlib.contextmanager
def write_indexed(
    prefix: str | os.PathLike[str], dtype: npt.DTypeLike, *, multimodal: bool = False
) -> Iterator["IndexedDatasetWriter"]:
    """Open a writer of prefix.bin and prefix.idx.

    The files get their names only when the block ends well. An exception leaves what was there
    before, and no temporary file.

    Example:
      with write_indexed("corpus", optimal_dtype(512)) as writer:
          writer.add_sequence([104, 105, 256])
          writer.end_document()

    Args:
      prefix: path of the two files without their endings.
      dtype: of a token, one of the format's.
      multimodal: write each sequence's mode.

    Raises:
      ValueError: dtype has no code in the format, or the last document was not ended.
    """
    final = (bin_path(Path(prefix)), index_path(Path(prefix)))
    temporary = tuple(path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in final)
    try:
        with temporary[0].open("wb", buffering=_BUFFER_BYTES) as tokens:
            writer = IndexedDatasetWriter(tokens, np.dtype(dtype), multimodal=multimodal)
            yield writer
            _sync(tokens)
        with temporary[1].open("wb") as index:
            writer.write_index(index)
            _sync(index)
        # Without its .idx a dataset does not exist: at no moment is there an .idx whose .bin is
        # of another build.
        final[1].unlink(missing_ok=True)
        for source, target in zip(temporary, final, strict=True):
            source.replace(target)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


class IndexedDatasetWriter:
    """Append sequences and documents. Made by `write_indexed`."""

    def __init__(self, tokens: BinaryIO, dtype: np.dtype[Any], *, multimodal: bool) -> None:
        codes = [code for code, known in DTYPES.items() if known == dtype]
        if not codes:
            names = ", ".join(known.name for known in DTYPES.values())
            raise ValueError(f"dtype={dtype.name} is not in the format; use one of {names}")
        self._code = codes[0]
        self._dtype = dtype
        self._tokens = tokens
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._modes = array("b") if multimodal else None

    def add_sequence(self, tokens: npt.ArrayLike, *, mode: int = 0) -> None:
        """Append a sequence, empty or not, to the open document.

        Args:
          tokens: one dimension.
          mode: modality, in -128..127; multimodal files only.

        Raises:
          ValueError: a token does not fit the dtype, or the sequence does not fit the format.
        """
        values = np.asarray(tokens)
        narrow = values.astype(self._dtype)
        number = len(self._lengths)
        if values.ndim != 1 or len(values) > _INT32_MAX:
            raise ValueError(
                f"sequence {number} has shape {values.shape}; it must have one dimension of at "
                f"most {_INT32_MAX} tokens, split it"
            )
        if not np.array_equal(narrow, values):
            raise ValueError(
                f"sequence {number} holds tokens from {values.min()} to {values.max()}, which "
                f"{self._dtype.name} cannot hold; choose a wider dtype"
            )
        self._tokens.write(narrow.tobytes())
        self._lengths.append(len(narrow))
        if self._modes is not None:
            self._modes.append(mode)

    def end_document(self) -> None:
        """End the document that holds the sequences since the last call."""
        self._documents.append(len(self._lengths))

    def write_index(self, file: BinaryIO) -> None:
        """Write the .idx of what was appended.

        Raises:
          ValueError: the last document was not ended.
        """
        if self._documents[-1] != len(self._lengths):
            raise ValueError("the last document was not ended; call end_document after it")
        lengths = np.array(self._lengths, np.dtype("<i4"))
        pointers = np.zeros(len(lengths), np.dtype("<i8"))
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self._dtype.itemsize
        counts = (len(lengths), len(self._documents))
        file.write(HEADER.pack(MAGIC, VERSION, self._code, *counts))
        file.write(lengths.tobytes())
        file.write(pointers.tobytes())
        file.write(np.array(self._documents, np.dtype("<i8")).tobytes())
        if self._modes is not None:
            file.write(self._modes.tobytes())


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
