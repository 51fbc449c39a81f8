"""Index arrays kept on disk: by what they were built from, whole or not at all.

An entry is a folder named by the hash of its key, with an .npy an array and about.json: the key
and a checksum of each file. It appears under its name by one rename, so that any number of
processes may build the same one at the same time. Nothing in a key is a path or a date: a dataset
that is moved keeps its entries, one that is changed gets new ones.
"""

import hashlib
import json
import logging
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ling_trainer.data.index_file import DataError

type Arrays = dict[str, npt.NDArray[Any]]

FORMAT = 1
"""Part of every key; raised when the same settings give other arrays."""
_ABOUT = "about.json"
_CHUNK_BYTES = 1 << 22

log = logging.getLogger("ling_trainer")


def cached_arrays(
    folder: str | None, key: Mapping[str, Any], build: Callable[[], Arrays]
) -> Arrays:
    """Load the arrays of a key, or build and keep them.

    A damaged entry is rebuilt, and a folder that cannot be written to is done without; both with
    a warning.

    Args:
      folder: of the cache, made if need be; None builds and keeps nothing.
      key: everything the arrays depend on, as JSON values.
      build: makes the arrays, by name.

    Returns:
      The arrays; memory-mapped and read-only where they come from the cache.
    """
    if folder is None:
        return build()
    described = {"format": FORMAT, **key}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    entry = Path(folder) / digest[:32]
    if entry.exists():
        try:
            return _load(entry, described)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is damaged (%s); building it again", entry, error)
    arrays = build()
    try:
        _store(entry, described, arrays)
        return _load(entry, described)
    except (OSError, ValueError) as error:
        log.warning("indices are not kept in blend_cache_dir=%s: %s", folder, error)
        return arrays


def load_arrays(folder: Path, names: tuple[str, ...]) -> Arrays:
    """Map folder/<name>.npy of each name.

    Raises:
      DataError: one is missing or no array of integers.
    """
    arrays: Arrays = {}
    for name in names:
        path = folder / f"{name}.npy"
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"{path}: cannot be read ({error}); the folder must hold "
                f"{', '.join(f'{name}.npy' for name in names)}"
            ) from error
        if array.dtype.kind not in "iu":
            raise DataError(f"{path}: holds {array.dtype.name}; an index is of integers")
        arrays[name] = np.asarray(array)
    return arrays


def _load(entry: Path, key: Mapping[str, Any]) -> Arrays:
    about = json.loads((entry / _ABOUT).read_text())
    if about["key"] != json.loads(json.dumps(key)):
        raise ValueError("it was built from other settings")
    for name, checksum in about["crc32"].items():
        found = _crc32(entry / f"{name}.npy")
        if found != checksum:
            raise ValueError(f"{name}.npy has checksum {found:08x}, not {checksum:08x}")
    return load_arrays(entry, tuple(about["crc32"]))


def _store(entry: Path, key: Mapping[str, Any], arrays: Arrays) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        temporary.chmod(0o755)
        for name, array in arrays.items():
            np.save(temporary / f"{name}.npy", array, allow_pickle=False)
        checksums = {name: _crc32(temporary / f"{name}.npy") for name in arrays}
        about = {"key": key, "crc32": checksums}
        (temporary / _ABOUT).write_text(json.dumps(about, indent=1))
        _put(temporary, entry, key)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _put(temporary: Path, entry: Path, key: Mapping[str, Any]) -> None:
    """Rename an entry to its place, unless a whole one is there by now."""
    try:
        temporary.rename(entry)
    except OSError:
        if not entry.exists():
            raise
    else:
        return
    try:
        _load(entry, key)
    except (OSError, ValueError, KeyError, TypeError):
        # Another process may do the same: whoever moves the damaged one away goes first.
        damaged = Path(tempfile.mkdtemp(prefix=f".{entry.name}.damaged.", dir=entry.parent))
        entry.rename(damaged / entry.name)
        shutil.rmtree(damaged, ignore_errors=True)
        temporary.rename(entry)


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
