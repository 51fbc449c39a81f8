"""Kept indices are those of the data and settings at hand, or they are not used."""

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ling_trainer.data.gpt import SplitName
from ling_trainer.data.index_file import DataError
from ling_trainer.data.indexed_writer import write_indexed
from ling_trainer.data.order import SampleOrder
from ling_trainer.data.source import open_source
from ling_trainer.data_config import DataConfig
from ling_trainer.run_record import RunRecord, check_data_content

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron" / "data"
ORDER = SampleOrder((300,))
OPEN = """
import sys, hashlib
from ling_trainer.data_config import DataConfig
from ling_trainer.data.order import SampleOrder
from ling_trainer.data.source import open_source
data = DataConfig.model_validate_json(sys.argv[1])
sys.stdin.readline()
source = open_source(data, vocab_size=1000, order=SampleOrder((300,)))
texts = b"".join(source.read(i).text.tobytes() for i in range(300))
print(hashlib.sha256(texts).hexdigest())
"""


def settings(cache: Path | None, **values: object) -> DataConfig:
    defaults = {
        "dataset_path": f"{GOLDEN / 'ds_a'},0.7;{GOLDEN / 'ds_c'},0.3",
        "split": "95,5,0",
        "data_shuffle_seed": 1234,
        "max_target_length": 32,
        "global_batch_size": 1,
        "eod_id": 3,
        "pad_id": 3,
        "blend_cache_dir": None if cache is None else str(cache),
    }
    return DataConfig.model_validate({**defaults, **values})


def texts(
    data: DataConfig, order: SampleOrder = ORDER, split_name: SplitName = "train"
) -> np.ndarray:
    source = open_source(data, vocab_size=1000, order=order, split_name=split_name)
    return np.stack([source.read(i).text for i in range(order.num_samples)])


def entries(cache: Path) -> set[Path]:
    return {path for path in cache.iterdir() if not path.name.startswith(".")}


def test_a_second_start_reads_what_the_first_has_kept(tmp_path: Path) -> None:
    data = settings(tmp_path)
    expected = texts(settings(None))
    np.testing.assert_array_equal(texts(data), expected)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")}
    assert len(kept) == 2 * 3 + 2
    np.testing.assert_array_equal(texts(data), expected)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")} == kept


@pytest.mark.parametrize(
    ("changed", "new"),
    [
        ({"data_shuffle_seed": 1235}, 2),
        ({"max_target_length": 31}, 2),
        ({"split": "90,10,0"}, 2),
        ({"add_extra_token_to_sequence": False}, 2),
        ({"mid_level_dataset_surplus": 0.5}, 2),
        ({"dataset_path": f"{GOLDEN / 'ds_a'},0.6;{GOLDEN / 'ds_c'},0.4"}, 3),
        ({"eod_mask_loss": True}, 0),
        ({"global_batch_size": 2}, 0),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else str(value),
)
def test_every_setting_that_changes_an_index_has_its_own_entry(
    changed: dict[str, object], new: int, tmp_path: Path
) -> None:
    texts(settings(tmp_path))
    before = entries(tmp_path)
    kept = texts(settings(tmp_path, **changed))
    assert len(entries(tmp_path) - before) == new
    np.testing.assert_array_equal(kept, texts(settings(None, **changed)))


def test_the_short_last_sample_of_validation_has_its_own_entry(tmp_path: Path) -> None:
    def valid(keep: bool) -> np.ndarray:
        data = settings(
            tmp_path,
            dataset_path=str(GOLDEN / "ds_a"),
            split="90,10,0",
            drop_last_partial_validation_sequence=not keep,
        )
        return texts(data, SampleOrder((25,)), "valid")

    assert not np.array_equal(valid(keep=True), valid(keep=False))
    assert len(entries(tmp_path)) == 2


def test_data_that_moved_keep_their_entries_and_data_that_changed_do_not(tmp_path: Path) -> None:
    cache, home = tmp_path / "cache", tmp_path / "home"
    home.mkdir()

    def read(prefix: Path) -> np.ndarray:
        return texts(settings(cache, dataset_path=str(prefix), split="1,0,0"))

    read(GOLDEN / "ds_a")
    before = entries(cache)
    for suffix in (".bin", ".idx"):
        shutil.copy(GOLDEN / f"ds_a{suffix}", home / f"ds{suffix}")
    read(home / "ds")
    assert entries(cache) == before
    # As many documents and tokens at the same path, cut in other places.
    tokens = np.fromfile(GOLDEN / "ds_a.bin", "<u2")
    cuts = np.sort(np.random.default_rng(0).integers(0, len(tokens), 1199))
    with write_indexed(home / "ds", np.uint16) as writer:
        for document in np.split(tokens, cuts):
            writer.add_sequence(document)
            writer.end_document()
    ours = read(home / "ds")
    assert len(entries(cache)) == len(before) + 1
    plain = settings(None, dataset_path=str(home / "ds"), split="1,0,0")
    np.testing.assert_array_equal(ours, texts(plain))


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: flip(entry / "shuffle_index.npy"),
        lambda entry: (entry / "document_index.npy").write_bytes(b""),
        lambda entry: (entry / "sample_index.npy").unlink(),
        lambda entry: (entry / "about.json").write_text("{"),
        lambda entry: (entry / "about.json").write_text('{"key": {}, "crc32": {}}'),
        lambda entry: (entry / "about.json").unlink(),
        lambda entry: [path.unlink() for path in entry.iterdir()],
    ],
    ids=["flipped", "emptied", "missing", "no json", "other key", "nothing about it", "empty"],
)
def test_a_damaged_entry_is_built_again_with_a_warning(
    damage: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = settings(tmp_path, dataset_path=str(GOLDEN / "ds_a"))
    expected = texts(data)
    (entry,) = entries(tmp_path)
    damage(entry)
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(texts(data), expected)
    assert [record.getMessage() for record in caplog.records if "is damaged" in record.message]
    assert str(entry) in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(texts(data), expected)
    assert not caplog.records
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [False, True])
def test_many_processes_may_build_the_same_entries(damaged: bool, tmp_path: Path) -> None:
    data = settings(tmp_path)
    if damaged:
        texts(data)
        for path in tmp_path.rglob("*_index.npy"):
            flip(path)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", OPEN, data.model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    hashes = [process.communicate("go\n", timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert len(set(hashes)) == 1
    assert len(entries(tmp_path)) == 3
    assert len(list(tmp_path.iterdir())) == 3
    np.testing.assert_array_equal(texts(data), texts(settings(None)))


def test_a_folder_that_cannot_be_written_is_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    data = settings(tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(texts(data), texts(settings(None)))
    assert "not kept in blend_cache_dir" in caplog.text


def test_the_folder_must_be_a_local_one() -> None:
    with pytest.raises(ValueError, match="blend_cache_dir=gs://b/c is not a local folder"):
        settings(None, blend_cache_dir="gs://b/c")


# What a checkpoint knows of its data.


def test_a_checkpoint_notices_that_its_data_changed(tmp_path: Path) -> None:
    def write(documents: list[list[int]]) -> tuple[str, ...]:
        with write_indexed(tmp_path / "ds", np.uint16) as writer:
            for document in documents:
                writer.add_sequence(document)
                writer.end_document()
        data = settings(None, dataset_path=str(tmp_path / "ds"), split="1", max_target_length=2)
        return open_source(data, vocab_size=10, order=SampleOrder((3,))).content

    first = write([[1, 2, 3], [4, 3]])
    check_data_content(first, None, "somewhere")
    check_data_content(write([[5, 6, 3], [7, 3]]), first, "somewhere")  # as long: not seen
    with pytest.raises(DataError) as caught:
        check_data_content(write([[1, 2, 3], [4, 4, 3]]), first, str(tmp_path / "ds"))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'ds'}: these are not the data of the checkpoint")
    assert first[0] in message
    assert "name the data that the run began with, or begin a new run" in message


def test_a_run_record_keeps_the_content_of_its_data() -> None:
    record = RunRecord(
        attempt=1, sample_order=ORDER, identity={}, data_content=("sha256:ab x 0.7", "sha256:cd")
    )
    assert RunRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
    empty = RunRecord(attempt=1, sample_order=ORDER, identity={})
    assert RunRecord.from_json(json.loads(json.dumps(empty.to_json()))).data_content is None
