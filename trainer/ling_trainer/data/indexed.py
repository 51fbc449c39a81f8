"""Megatron's indexed dataset: a .bin of raw tokens beside an .idx (see index_file.py)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from ling_trainer.data.index_file import (
    IndexFile,
    bad_byte,
    bin_path,
    file_size,
    index_path,
    map_array,
    read_index,
)

type Tokens = npt.NDArray[Any]


class Part(NamedTuple):
    """Tokens of one sequence: `length` from `offset` on, clipped to the sequence.

    Attributes:
      sequence: its number in the .idx.
      offset: first token, counted from the sequence's own start.
      length: tokens; None goes to the end.
    """

    sequence: int
    offset: int = 0
    length: int | None = None


class TokenReader(Protocol):
    """Where the tokens of a .bin come from."""

    def read(self, ranges: Sequence[range]) -> list[Tokens]:
        """Read ranges of tokens, counted from the start of the .bin."""
        ...


@dataclass(frozen=True, eq=False)
class MappedTokens:
    """A local .bin, memory-mapped. What `read` returns are views of it."""

    tokens: Tokens

    def read(self, ranges: Sequence[range]) -> list[Tokens]:
        """Read ranges of tokens, counted from the start of the .bin."""
        return [self.tokens[part.start : part.stop] for part in ranges]


@dataclass(frozen=True, eq=False)
class IndexedDataset:
    """A .bin/.idx pair, checked. Make one with `open`.

    Attributes:
      prefix: path of the two files without their endings.
      index: where the sequences lie.
      reader: the tokens.
    """

    prefix: str
    index: IndexFile
    reader: TokenReader

    @classmethod
    def open(cls, prefix: str | os.PathLike[str]) -> Self:
        """Map a pair of files and check that they are whole and belong together.

        Raises:
          DataError: a file is missing, truncated, of another format, or the two disagree. It
            names the file and the byte.
        """
        path = Path(prefix)
        index = read_index(index_path(path), name=str(index_path(path)))
        size = file_size(bin_path(path))
        check_size(str(path), index, size)
        tokens = map_array(bin_path(path), index.dtype, 0, size // index.dtype.itemsize)
        return cls(str(path), index, MappedTokens(tokens))

    def __len__(self) -> int:
        """Count the sequences."""
        return len(self.index.lengths)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a token."""
        return self.index.dtype

    @property
    def num_tokens(self) -> int:
        """Tokens of the .bin."""
        return int(self.index.lengths.sum(dtype=np.int64))

    def read(self, sequence: int, *, offset: int = 0, length: int | None = None) -> Tokens:
        """Read tokens of a sequence, clipped to it (see Part)."""
        return self.read_parts([Part(sequence, offset, length)])[0]

    def read_parts(self, parts: Sequence[Part]) -> list[Tokens]:
        """Read several parts at once; a remote reader fetches them at the same time."""
        return self.reader.read([self._range(part) for part in parts])

    def _range(self, part: Part) -> range:
        start = int(self.index.pointers[part.sequence]) // self.dtype.itemsize
        size = int(self.index.lengths[part.sequence])
        end = size if part.length is None else min(part.offset + part.length, size)
        return range(start + min(part.offset, size), start + end)


def check_size(prefix: str, index: IndexFile, size: int) -> None:
    """Check that a .bin has the bytes that its .idx tells of.

    Raises:
      DataError: it has fewer or more.
    """
    expected = int(index.lengths.sum(dtype=np.int64)) * index.dtype.itemsize
    remedy = (
        f"the .idx and the .bin of {Path(prefix).name} do not belong together; copy both again"
    )
    if size < expected:
        ends = np.cumsum(index.lengths, dtype=np.int64) * index.dtype.itemsize
        i = int(np.searchsorted(ends, size, side="right"))
        problem = f"the file ends inside sequence {i}, which goes on to byte {ends[i]}"
        raise bad_byte(f"{prefix}.bin", size, problem, remedy)
    if size > expected:
        problem = f"{size - expected} bytes follow the last sequence of the .idx"
        raise bad_byte(f"{prefix}.bin", expected, problem, remedy)
