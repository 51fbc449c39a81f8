"""What is kept of compiled programs from one session of the tests to the next."""

from pathlib import Path

import pytest

import kept_programs as plugin


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A session's own folder with two entries, and what is kept, with one of them."""
    own, kept = tmp_path / "own", tmp_path / "kept"
    for folder in (own, kept):
        folder.mkdir()
    (own / "old-cache").write_text("compiled again")
    (own / "new-cache").write_text("compiled")
    (kept / "old-cache").write_text("compiled before")
    return own, kept


def test_new_entries_are_added_and_old_ones_stay_as_they_are(folders: tuple[Path, Path]) -> None:
    own, kept = folders
    plugin.keep(own, kept)
    found = {entry.name: entry.read_text() for entry in kept.iterdir()}
    assert found == {"old-cache": "compiled before", "new-cache": "compiled"}


def test_more_than_may_be_kept_leaves_nothing_to_the_next_session(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, kept = folders
    monkeypatch.setattr(plugin, "LARGEST", 21)
    plugin.keep(own, kept)
    assert not kept.exists()


def test_another_processor_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = plugin.kept_folder()
    assert here == plugin.kept_folder()
    monkeypatch.setattr(plugin.platform, "machine", lambda: "another")
    assert plugin.kept_folder() != here
