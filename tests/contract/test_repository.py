"""Rules of the tree that no linter checks."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest


def _tracked(repository: Path) -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=repository,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    return [repository / name for name in names if (repository / name).is_file()]


def test_the_operator_folder_is_not_a_package(repository: Path) -> None:
    """An operator/__init__.py would shadow the standard library's operator module."""
    assert not (repository / "operator" / "__init__.py").exists()


def test_import_operator_gives_the_standard_library(repository: Path) -> None:
    spec = importlib.util.find_spec("operator")
    assert spec is not None
    assert spec.origin is not None
    assert str(repository) not in spec.origin


def test_tests_hold_no_package_marker(repository: Path) -> None:
    assert not list((repository / "tests").rglob("__init__.py"))


def test_locks_are_hashed_and_name_no_host(repository: Path) -> None:
    locks = sorted((repository / "requirements").glob("*.txt"))
    assert {lock.stem for lock in locks} == {
        "dev",
        "image",
        "operator",
        "trainer",
        "trainer-tpu",
        "uv",
    }
    for lock in locks:
        text = lock.read_text()
        assert "://" not in text, lock
        pins = re.findall(r"^[A-Za-z0-9_.\[\]-]+==", text, flags=re.M)
        blocks = re.split(r"^(?=[A-Za-z0-9_.\[\]-]+==)", text, flags=re.M)[1:]
        assert pins
        assert len(pins) == len(blocks)
        assert all("--hash=sha256:" in block for block in blocks), lock
    assert not (repository / "uv.lock").exists()


@pytest.mark.parametrize("package", ["operator", "trainer"])
def test_source_files_are_short_enough_to_read(repository: Path, package: str) -> None:
    """Three hundred lines, and a few."""
    long = {
        path.name: lines
        for path in (repository / package).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 320
    }
    assert not long


def test_no_file_is_large(repository: Path) -> None:
    large = [path for path in _tracked(repository) if path.stat().st_size > 2_000_000]
    assert not large
