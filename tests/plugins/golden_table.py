"""The table of goldens: what the tests read of each file of tests/golden, and the worst error.

Which arrays a test reads is measured, not declared. `pytest -s -k golden` prints the table.
"""

import fnmatch
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

GOLDEN = Path(__file__).parents[1] / "golden"
SPARED = GOLDEN / "not_compared.toml"
FILES = sorted(
    p for p in GOLDEN.rglob("*") if p.is_file() and p.name not in {"README.md", SPARED.name}
)


@dataclass(frozen=True, slots=True)
class Row:
    """One file; its cases are its arrays, or the file itself where it has none."""

    file: str
    seen: int
    spared: int
    cases: int
    missed: tuple[str, ...]


@dataclass
class GoldenTable:
    """Filled while tests run."""

    opened: set[Path] = field(default_factory=set)
    arrays: dict[Path, set[str]] = field(default_factory=dict)
    worst: dict[Path, tuple[float, float]] = field(default_factory=dict)  # error, tolerance
    whole: bool = False  # no golden test was left out

    def read(self, file: Path, array: str) -> None:
        self.arrays.setdefault(file, set()).add(array)

    def compared(self, names: str, error: float, tolerance: float) -> None:
        """Keep the error nearest to its tolerance of each file."""
        for file in resolve(names):
            before = self.worst.get(file, (0.0, 1.0))
            if file not in self.worst or error * before[1] > before[0] * tolerance:
                self.worst[file] = (error, tolerance)

    def rows(self) -> Iterator[Row]:
        rules = tomllib.loads(SPARED.read_text())["spared"]
        for file in FILES:
            name, cases = file.relative_to(GOLDEN).as_posix(), cases_in(file)
            patterns = [p for rule in rules if rule["file"] == name for p in rule["arrays"]]
            spared = {c for c in cases if any(fnmatch.fnmatchcase(c, p) for p in patterns)}
            seen = self.arrays.get(file, set()) if arrays_in(file) else cases
            seen = seen & cases - spared if file in self.opened else set()
            missed = tuple(sorted(cases - spared - seen))
            yield Row(name, len(seen), len(spared), len(cases), missed)


class Arrays(dict[str, np.ndarray]):
    """Arrays of a file, noting which of them are looked at."""

    def __init__(self, file: Path, tensors: dict[str, np.ndarray]) -> None:
        super().__init__(tensors)
        self.file = file

    def __getitem__(self, name: str) -> np.ndarray:
        TABLE.read(self.file, name)
        return super().__getitem__(name)

    def items(self) -> Any:
        return ((name, self[name]) for name in self)

    def values(self) -> Any:
        return (self[name] for name in self)


TABLE = GoldenTable()
_load_file, _array = safetensors.numpy.load_file, np.lib.npyio.NpzFile.__getitem__


def arrays_in(file: Path) -> set[str]:
    """Name the arrays of a file; none if it is of another kind."""
    if file.suffix == ".npz":
        return set(np.load(file).files)
    if file.suffix == ".safetensors":
        with safe_open(file, framework="np") as tensors:
            return set(tensors.keys())
    return set()


def cases_in(file: Path) -> set[str]:
    """Name what of a file has to be compared: its arrays, or the file."""
    return arrays_in(file) or {file.name}


def resolve(names: str) -> list[Path]:
    """Find `folder/file.npz`, `file`, or a folder; several with commas; a note in brackets.

    Raises:
      LookupError: there is no such golden.
    """
    found: list[Path] = []
    for name in names.split(" (")[0].split(", "):
        hits = [p for p in FILES if name in _names(p)]
        if not hits:
            raise LookupError(f"{name!r} is no file or folder of tests/golden")
        found += hits
    return found


def _names(file: Path) -> set[str]:
    """Every ending of the file's path, with and without suffix, and of its folder's."""
    parts = file.relative_to(GOLDEN).parts
    ends = [Path(*parts[i:]) for i in range(len(parts))]
    folders = {end.parent.as_posix() for end in ends[:-1]}
    return folders | {e.as_posix() for e in ends} | {e.with_suffix("").as_posix() for e in ends}


def _opened(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | Path):
        path = Path(arguments[0])
        if GOLDEN in path.parents:
            TABLE.opened.add(path)


def _load_tensors(filename: Any, **options: Any) -> dict[str, np.ndarray]:
    path = Path(filename)
    if GOLDEN not in path.parents:
        return _load_file(filename, **options)
    TABLE.opened.add(path)
    return Arrays(path, _load_file(filename, **options))


def _npz_array(npz: Any, key: str) -> Any:
    if npz.zip is not None and npz.zip.filename:
        TABLE.read(Path(npz.zip.filename), key)
    return _array(npz, key)


def pytest_configure() -> None:
    """Watch what is read."""
    sys.addaudithook(_opened)
    safetensors.numpy.load_file = _load_tensors
    np.lib.npyio.NpzFile.__getitem__ = _npz_array  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Note whether every golden test of the trainer is among the selected ones."""
    folder = Path(__file__).parents[1] / "trainer"
    collected = {item.path for item in items}
    golden = {item.nodeid for item in items if "golden" in item.name}
    yield
    last = [item for item in items if item.path.name == "test_golden_table.py"]
    items[:] = [item for item in items if item not in last] + last
    left = {item.nodeid for item in items}
    TABLE.whole = collected >= set(folder.glob("test_*.py")) and golden <= left


@pytest.fixture(scope="session")
def golden_table() -> GoldenTable:
    """What has been read so far."""
    return TABLE


@pytest.fixture(scope="session")
def load_golden() -> Callable[[Path], Arrays]:
    """Read a whole .npz."""

    def load(file: Path) -> Arrays:
        with np.load(file) as npz:
            return Arrays(file, {name: _array(npz, name) for name in npz.files})

    return load


@pytest.fixture(scope="session")
def show_golden() -> Callable[..., None]:
    """Note the worst error of a comparison with a golden, and what it was asked to be below."""

    def show(file: str, *, cases: str, worst: float, tolerance: float) -> None:
        del cases  # the table counts them itself
        assert worst <= tolerance, f"{file}: {worst} is above {tolerance}"
        TABLE.compared(file, float(worst), float(tolerance))

    return show


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the table under -s."""
    if not TABLE.worst or config.getoption("capture") != "no":
        return
    line = terminalreporter.write_line
    line("\n| golden | arrays compared / in the file | worst error | tolerance |")
    line("|---|---|---|---|")
    for row in TABLE.rows():
        error, tolerance = TABLE.worst.get(GOLDEN / row.file, (0.0, 0.0))
        note = f" ({row.spared} are none of ours)" if row.spared else ""
        shown = f"{error:.1e} | {tolerance:.0e}" if tolerance else "equal | 0"
        shown = shown if row.seen else "- | -"
        line(f"| {row.file} | {row.seen}/{row.cases}{note} | {shown} |")
