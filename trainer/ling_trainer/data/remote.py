"""Indexed datasets on gs://: the .idx in a local copy, tokens as exact ranges.

Samples are shuffled, so that a block around one holds nothing that is needed soon: of the .bin
just the bytes of a sample are read, all its documents at the same time. Reading ahead is the
loader's, which knows the order.
"""

import base64
import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from ling_trainer.data.gcs import BLOCK_BYTES, Storage, StoredObject
from ling_trainer.data.index_file import DataError, read_index
from ling_trainer.data.indexed import IndexedDataset, Tokens, check_size

log = logging.getLogger("ling_trainer")


@dataclass(frozen=True, eq=False)
class RemoteTokens:
    """A .bin that is read by ranges."""

    storage: Storage
    stored: StoredObject
    dtype: np.dtype[Any]

    def read(self, ranges: Sequence[range]) -> list[Tokens]:
        """Read ranges of tokens, counted from the start of the .bin.

        Raises:
          StorageError: not everything arrived in time.
        """
        size = self.dtype.itemsize
        merged = _merge([range(part.start * size, part.stop * size) for part in ranges])
        read = dict(zip(merged, self.storage.read(self.stored, merged), strict=True))
        tokens: list[Tokens] = []
        for part in ranges:
            start, stop = part.start * size, part.stop * size
            raw = b""
            if start < stop:
                whole = next(r for r in merged if r.start <= start and stop <= r.stop)
                raw = read[whole][start - whole.start : stop - whole.start]
            tokens.append(np.frombuffer(raw, self.dtype))
        return tokens


def _merge(ranges: Sequence[range]) -> list[range]:
    """Join ranges that touch or overlap; empty ones are left out."""
    merged: list[range] = []
    for part in sorted((part for part in ranges if part), key=lambda part: part.start):
        if merged and part.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, part.stop))
        else:
            merged.append(part)
    return merged


def open_remote(prefix: str, *, cache_folder: str | None, storage: Storage) -> IndexedDataset:
    """Open a pair on gs://, checked as a local one is.

    Args:
      prefix: gs://bucket/path without the endings.
      cache_folder: where the copy of the .idx is kept; None: the user's cache folder.
      storage: reads it.

    Raises:
      DataError: a file is missing, truncated, of another format, or the two disagree.
      StorageError: no answer in time.
    """
    index_object = storage.look_up(f"{prefix}.idx")
    tokens_object = storage.look_up(f"{prefix}.bin")
    folder = Path(cache_folder) if cache_folder else Path.home() / ".cache" / "ling-train"
    path = _local_copy(index_object, folder, storage)
    index = read_index(path, name=index_object.url)
    check_size(prefix, index, tokens_object.size)
    return IndexedDataset(prefix, index, RemoteTokens(storage, tokens_object, index.dtype))


def _local_copy(stored: StoredObject, folder: Path, storage: Storage) -> Path:
    """Download an object, or take what an earlier start has, if it is whole."""
    name = hashlib.sha256(stored.url.encode()).hexdigest()[:32]
    path = folder / f"{name}-{stored.generation}.idx"
    try:
        if path.exists():
            if _crc32c(path) == stored.crc32c:
                return path
            log.warning("%s is damaged; downloading %s again", path, stored.url)
        folder.mkdir(parents=True, exist_ok=True)
        handle, download = tempfile.mkstemp(prefix=".download.", dir=folder)
    except OSError as error:
        raise DataError(
            f"{stored.url}: no place for a local copy ({error}); set data.blend_cache_dir to a "
            "folder that can be written to"
        ) from error
    temporary = Path(download)
    try:
        with os.fdopen(handle, "wb") as file:
            for start in range(0, stored.size, 4 * BLOCK_BYTES):
                stop = min(start + 4 * BLOCK_BYTES, stored.size)
                file.write(storage.read(stored, [range(start, stop)])[0])
        if _crc32c(temporary) != stored.crc32c:
            raise DataError(
                f"{stored.url}: its checksum is not the one that the storage tells; copy the file "
                "there again"
            )
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _crc32c(path: Path) -> str:
    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while chunk := file.read(BLOCK_BYTES):
            checksum.update(chunk)
    return base64.b64encode(checksum.digest()).decode()
