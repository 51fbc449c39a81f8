"""The programs are built once, by one builder at a time, and what prevents it is said."""

from __future__ import annotations

import fcntl
import shutil
import threading
from pathlib import Path

import pytest

from lingcluster import build
from lingcluster.build import Builder, ProgramsUnavailableError
from lingcluster.client import wait_for
from lingcluster.modules import ETCD, MODULES, Module

TRIVIAL = Module("trivial", {"hello": "example.com/trivial"})


@pytest.fixture
def trivial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of one small program that depends on nothing."""
    source = tmp_path / "programs" / "trivial"
    source.mkdir(parents=True)
    (source / "go.mod").write_text("module example.com/trivial\n\ngo 1.26.0\n")
    (source / "go.sum").write_text("")
    (source / "main.go").write_text("package main\n\nfunc main() { println(1) }\n")
    monkeypatch.setattr(build, "PROGRAMS_DIR", source.parent)
    monkeypatch.setattr(build, "MODULES", (TRIVIAL,))
    return source


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def builder(tmp_path: Path, lines: list[str]) -> Builder:
    return Builder(tmp_path / "cache", report=lines.append)


def test_a_second_build_does_nothing(trivial: Path, builder: Builder, lines: list[str]) -> None:
    first = builder.ensure()
    assert first["hello"].stat().st_mode & 0o111
    assert [line.split()[0] for line in lines] == ["building", "built"]
    lines.clear()
    assert builder.ensure() == first
    assert lines == []


def test_the_folder_changes_with_the_pins_and_with_the_recipe(
    trivial: Path, builder: Builder
) -> None:
    before = builder.folder(TRIVIAL)
    assert builder.folder(Module("trivial", TRIVIAL.packages, linker_flags="")) != before
    (trivial / "go.sum").write_text("example.com/x v1.0.0 h1:a\n")
    assert builder.folder(TRIVIAL) != before


def test_a_second_builder_waits_for_the_first(
    trivial: Path, builder: Builder, lines: list[str]
) -> None:
    final = builder.folder(TRIVIAL)
    final.parent.mkdir(parents=True)
    with final.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=builder.ensure)
        thread.start()
        wait_for("a word of the second", lambda: lines)
        assert "waiting" in lines[0]
        thread.join(0.5)
        assert thread.is_alive()
        # The first builder finishes: the second must take its result, not build again.
        final.mkdir()
        (final / "hello").touch()
    thread.join(30)
    assert not thread.is_alive()
    assert len(lines) == 1


def test_a_build_that_was_interrupted_leaves_nothing_that_counts_as_built(
    trivial: Path, builder: Builder
) -> None:
    partial = builder.folder(TRIVIAL).with_suffix(".partial")
    partial.mkdir(parents=True)
    (partial / "hello").touch()
    assert builder.ensure()["hello"].stat().st_size > 1000
    assert not partial.exists()


def test_a_module_that_cannot_be_fetched_is_not_available_and_says_which(
    trivial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(Path(__file__).parent / "programs" / "etcd" / "go.mod", trivial)
    shutil.copy(Path(__file__).parent / "programs" / "etcd" / "go.sum", trivial)
    monkeypatch.setattr(build, "MODULES", (Module("trivial", ETCD.packages),))
    monkeypatch.setenv("GOMODCACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("GOPROXY", "https://127.0.0.1:1")  # nobody listens there
    with pytest.raises(ProgramsUnavailableError, match=r"go\.etcd\.io/etcd/server/v3"):
        Builder(tmp_path / "cache", report=lambda _: None).ensure()


def test_a_program_that_does_not_compile_is_a_failure_and_no_reason_to_skip(
    trivial: Path, builder: Builder
) -> None:
    (trivial / "main.go").write_text("package main\n\nfunc main() { nonsense() }\n")
    with pytest.raises(build.BuildError, match="undefined: nonsense"):
        builder.ensure()


def test_every_module_is_pinned_by_go_mod_and_go_sum() -> None:
    for module in MODULES:
        folder = Path(__file__).parent / "programs" / module.name
        assert "replace" not in (folder / "go.mod").read_text()
        assert (folder / "go.sum").stat().st_size > 0
