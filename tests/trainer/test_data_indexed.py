"""Megatron's .bin/.idx: read, written, and refused when damaged."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ling_trainer.data.index_file import DTYPES, DataError, optimal_dtype
from ling_trainer.data.indexed import IndexedDataset
from ling_trainer.data.indexed_writer import write_indexed

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron" / "data"
FACTS = json.loads((GOLDEN / "meta.json").read_text())["indexed"]


def copy_pair(name: str, folder: Path) -> Path:
    for suffix in (".bin", ".idx"):
        shutil.copy(GOLDEN / f"{name}{suffix}", folder)
    return folder / name


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_every_golden_dataset_is_tested() -> None:
    assert set(FACTS) == {path.stem for path in GOLDEN.glob("*.idx")}
    assert len(FACTS) == 5


@pytest.mark.parametrize("name", FACTS)
def test_golden_index_files_are_read_as_megatron_reads_them(name: str, show_golden: Any) -> None:
    facts = FACTS[name]
    dataset = IndexedDataset.open(GOLDEN / name)
    assert len(dataset) == facts["sequences"]
    assert dataset.dtype == np.dtype(facts["dtype"])
    assert dataset.num_tokens == facts["tokens"]
    assert len(dataset.index.documents) == facts["documents_plus_1"]
    for key, array in (
        ("first_lengths", dataset.index.lengths),
        ("first_pointers", dataset.index.pointers),
        ("first_document_indices", dataset.index.documents),
    ):
        assert array[: len(facts[key])].tolist() == facts[key]
    modes = dataset.index.modes
    assert (None if modes is None else modes.tolist()) == facts["modes"]
    cases = f"{len(dataset)} sequences"
    show_golden(f"megatron/data/{name}.idx", cases=cases, worst=0, tolerance=0)


@pytest.mark.parametrize("name", FACTS)
def test_golden_files_are_written_byte_for_byte(name: str, tmp_path: Path) -> None:
    source = IndexedDataset.open(GOLDEN / name)
    modes = source.index.modes
    with write_indexed(tmp_path / name, source.dtype, multimodal=modes is not None) as writer:
        ends = source.index.documents[1:].tolist()
        for sequence in range(len(source)):
            mode = 0 if modes is None else int(modes[sequence])
            writer.add_sequence(source.read(sequence), mode=mode)
            for _ in range(ends.count(sequence + 1)):
                writer.end_document()
    assert sha256(tmp_path / f"{name}.idx") == FACTS[name]["idx_sha256"]
    assert sha256(tmp_path / f"{name}.bin") == FACTS[name]["bin_sha256"]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_each_dtype_survives_a_round_trip(dtype: np.dtype, tmp_path: Path) -> None:
    edge = np.finfo(dtype).max if dtype.kind == "f" else np.iinfo(dtype).max
    sequences = [np.array([0, 1, edge], dtype), np.array([], dtype), np.array([5], dtype)]
    with write_indexed(tmp_path / "x.y", dtype) as writer:
        for sequence in sequences:
            writer.add_sequence(sequence)
        writer.end_document()
    dataset = IndexedDataset.open(tmp_path / "x.y")
    assert dataset.dtype == dtype
    assert dataset.index.documents.tolist() == [0, 3]
    for i, sequence in enumerate(sequences):
        np.testing.assert_array_equal(dataset.read(i), sequence)


def test_a_dataset_without_sequences_is_valid(tmp_path: Path) -> None:
    with write_indexed(tmp_path / "empty", np.uint16):
        pass
    dataset = IndexedDataset.open(tmp_path / "empty")
    assert len(dataset) == 0
    assert dataset.num_tokens == 0


def test_a_read_never_leaves_its_sequence() -> None:
    dataset = IndexedDataset.open(GOLDEN / "ds_m")  # lengths 4, 0, 1, 5, 3, 1
    assert len(dataset.read(3, offset=2, length=99)) == 3
    assert len(dataset.read(3, offset=99)) == 0
    assert len(dataset.read(1)) == 0
    tokens = np.fromfile(GOLDEN / "ds_m.bin", "<u2")
    np.testing.assert_array_equal(dataset.read(3, offset=1, length=2), tokens[6:8])


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(512, "uint16"), (65499, "uint16"), (65500, "int32")]
)
def test_the_token_dtype_is_megatrons_choice(vocab_size: int, dtype: str) -> None:
    assert optimal_dtype(vocab_size) == np.dtype(dtype)


# Damage. ds_m: 6 sequences, 7 document entries, modes. Sections: header 0-34, lengths 34-58,
# pointers 58-106, document indices 106-162, modes 162-168.


def test_an_index_cut_at_any_byte_is_refused_at_that_byte(tmp_path: Path) -> None:
    prefix = copy_pair("ds_m", tmp_path)
    index = tmp_path / "ds_m.idx"
    whole = index.read_bytes()
    for size in range(len(whole)):
        index.write_bytes(whole[:size])
        if size == len(whole) - 6:  # without any modes it is a whole file of another kind
            assert IndexedDataset.open(prefix).index.modes is None
            continue
        with pytest.raises(DataError, match=rf"ds_m\.idx, byte {size}: .*; .*(copy|rebuild)"):
            IndexedDataset.open(prefix)


def test_every_flipped_bit_that_changes_tokens_is_noticed(tmp_path: Path) -> None:
    prefix = copy_pair("ds_m", tmp_path)
    index = tmp_path / "ds_m.idx"
    whole = index.read_bytes()
    # What lies between the first and the last document entry, and the modes, moves no token.
    for byte in [*range(114), *range(154, 162)]:
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[byte] ^= 1 << bit
            index.write_bytes(damaged)
            with pytest.raises(DataError, match=r"byte \d+: "):
                IndexedDataset.open(prefix)


def put(offset: int, value: int, size: int) -> Callable[[bytes], bytes]:
    def damage(raw: bytes) -> bytes:
        return (
            raw[:offset] + value.to_bytes(size, "little", signed=value < 0) + raw[offset + size :]
        )

    return damage


@pytest.mark.parametrize(
    ("suffix", "damage", "byte", "says"),
    [
        (".idx", put(0, 0x58, 1), 0, "starts with"),
        (".idx", put(9, 2, 8), 9, "version 2"),
        (".idx", put(17, 9, 1), 17, "dtype code 9"),
        (".idx", put(17, 0, 1), 17, "dtype code 0"),
        (".idx", put(18, 2**60, 8), 168, "inside its sequence lengths"),
        (".idx", put(26, 0, 8), 26, "0 document entries"),
        (".idx", put(26, 8, 8), 168, "inside its document indices"),
        (".idx", put(34 + 4 * 2, -1, 4), 42, "sequence 2 has length -1"),
        (".idx", put(34 + 4 * 3, 6, 4), 58 + 8 * 4, "sequence 4 points to byte 20"),
        (".idx", put(58 + 8 * 5, 2**40, 8), 98, "sequence 5 points to byte 1099511627776"),
        (".idx", put(106, 1, 8), 106, "document 0 starts at 1"),
        (".idx", put(106 + 8 * 3, 1, 8), 130, "document 3 starts at sequence 1, before"),
        (".idx", put(106 + 8 * 6, 5, 8), 154, "documents end at sequence 5, not at 6"),
        (".idx", lambda raw: raw + b"\0", 168, "7 bytes follow"),
        (".idx", lambda raw: raw[:-3], 165, "3 bytes follow"),
        (".idx", lambda _raw: b"", 0, "inside the 34-byte header"),
        (".bin", lambda raw: raw[:-1], 27, "inside sequence 5, which goes on to byte 28"),
        (".bin", lambda raw: raw[:8], 8, "inside sequence 2, which goes on to byte 10"),
        (".bin", lambda _raw: b"", 0, "inside sequence 0, which goes on to byte 8"),
        (".bin", lambda raw: raw + b"\0\0", 28, "2 bytes follow the last sequence"),
    ],
)
def test_damage_is_named_with_its_file_and_byte(
    suffix: str, damage: Callable[[bytes], bytes], byte: int, says: str, tmp_path: Path
) -> None:
    prefix = copy_pair("ds_m", tmp_path)
    path = tmp_path / f"ds_m{suffix}"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        IndexedDataset.open(prefix)
    message = str(caught.value)
    assert message.startswith(f"{path}, byte {byte}: "), message
    assert says in message
    assert "; " in message  # what to do about it


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_missing_file_is_named(suffix: str, tmp_path: Path) -> None:
    prefix = copy_pair("ds_m", tmp_path)
    (tmp_path / f"ds_m{suffix}").unlink()
    with pytest.raises(DataError, match=rf"ds_m\{suffix}: cannot be read.*prefix|without the end"):
        IndexedDataset.open(prefix)


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    prefix = copy_pair("ds_m", tmp_path)
    (tmp_path / "ds_m.bin").unlink()
    (tmp_path / "ds_m.bin").mkdir()
    with pytest.raises(DataError, match="is not a file"):
        IndexedDataset.open(prefix)


def test_the_bin_of_another_dataset_is_refused(tmp_path: Path) -> None:
    prefix = copy_pair("ds_m", tmp_path)
    shutil.copy(GOLDEN / "ds_c.bin", tmp_path / "ds_m.bin")
    with pytest.raises(DataError, match="do not belong together"):
        IndexedDataset.open(prefix)


# Writing.


def test_a_failed_build_leaves_the_old_pair_and_no_other_file(tmp_path: Path) -> None:
    prefix = copy_pair("ds_m", tmp_path)
    before = {path.name: sha256(path) for path in tmp_path.iterdir()}

    def interrupted_build() -> None:
        with write_indexed(prefix, np.uint16) as writer:
            writer.add_sequence([1, 2, 3])
            writer.end_document()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_build()
    assert {path.name: sha256(path) for path in tmp_path.iterdir()} == before


def test_a_second_build_replaces_the_first(tmp_path: Path) -> None:
    prefix = copy_pair("ds_m", tmp_path)
    with write_indexed(prefix, np.int32) as writer:
        writer.add_sequence([70000])
        writer.end_document()
    assert IndexedDataset.open(prefix).read(0).tolist() == [70000]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds_m.bin", "ds_m.idx"]


def test_an_open_document_is_not_committed(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="call end_document"),
        write_indexed(tmp_path / "open", np.uint16) as writer,
    ):
        writer.add_sequence([1])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tokens", "says"),
    [([1, 65536], "from 1 to 65536, which uint16"), ([[1]], "shape"), ([-1], "from -1 to -1")],
)
def test_a_sequence_that_does_not_fit_is_refused(tokens: list, says: str, tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=re.escape(says)),
        write_indexed(tmp_path / "wide", np.uint16) as writer,
    ):
        writer.add_sequence(tokens)
    assert not list(tmp_path.iterdir())


def test_a_dtype_outside_of_the_format_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="uint32 is not in the format; use one of uint8"),
        write_indexed(tmp_path / "u4", np.uint32),
    ):
        pass
    assert not list(tmp_path.iterdir())
