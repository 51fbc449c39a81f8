"""Ready-made indices (mmap_npy) are read as they are, or refused with what does not fit."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ling_trainer.data.index_file import DataError
from ling_trainer.data.order import SampleOrder
from ling_trainer.data.packing import pack_samples
from ling_trainer.data.source import SampleSource, open_source
from ling_trainer.data_config import DataConfig
from ling_trainer.schema import ConfigError
from ling_trainer.settings import resolve

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron" / "data"
CASES = json.loads((GOLDEN / "meta.json").read_text())["cases"]
TRAIN = [
    name for name, case in CASES.items() if case["split_name"] == "train" and case["sizes"][0]
]


def write_arrays(name: str, folder: Path) -> tuple[str, str | None]:
    """Write a golden's arrays in the layout; return the data path and the blend's folder."""
    case = CASES[name]
    blended = case["kind"] == "blended"
    members: list[str] = []
    with np.load(GOLDEN / f"{name}.npz") as golden:
        for i, prefix in enumerate(case["blend"][0]):
            part = folder / f"dataset_{i}"
            part.mkdir(parents=True)
            for key in ("document_index", "sample_index", "shuffle_index"):
                np.save(part / f"{key}.npy", golden[f"m{i}_{key}" if blended else key])
            weights = case["blend"][1]
            weight = f",{weights[i]}" if weights else ""
            members.append(f"{part}|{GOLDEN / prefix}{weight}")
        if not blended:
            return members[0], None
        for key in ("dataset_index", "dataset_sample_index"):
            np.save(folder / f"{key}.npy", golden[key])
    return ";".join(members), str(folder)


def open_ready(path: str, blend: str | None, num_samples: int, **values: Any) -> SampleSource:
    return open_source(
        settings(path, blend, **values), vocab_size=157184, order=SampleOrder((num_samples,))
    )


def settings(path: str, blend: str | None, **values: Any) -> DataConfig:
    defaults = {"max_target_length": 32, "eod_id": 3, "pad_id": 3, "global_batch_size": 1}
    return DataConfig(
        dataset_type="mmap_npy",
        dataset_path=path,
        blend_index_dir=blend,
        data_shuffle_seed=0,
        **{**defaults, **values},
    )


@pytest.mark.parametrize("given_turns", [True, False], ids=["turns given", "turns made"])
@pytest.mark.parametrize("name", TRAIN)
def test_golden_arrays_in_the_layout_give_megatrons_samples(
    name: str, given_turns: bool, tmp_path: Path
) -> None:
    case = CASES[name]
    path, blend = write_arrays(name, tmp_path)
    eod, pad = case["tokenizer"]["eod"], case["tokenizer"]["pad"]
    values = {
        "max_target_length": case["sequence_length"],
        "eod_id": eod,
        "pad_id": eod if pad is None else pad,
        **{k: v for k, v in case["flags"].items() if k != "create_attention_mask"},
    }
    # A blend's turns hold some samples more than were asked for.
    size = case["sizes"][0] if blend and not given_turns else case["len"]
    source = open_ready(path, blend if given_turns else None, size, **values)
    data = settings(path, None, **values)
    batch = pack_samples([source.read(i) for i in range(size)], data)
    if size == case["len"]:
        digest = hashlib.sha256(batch.inputs.astype("<i8").tobytes()).hexdigest()
        assert digest == case["sha256_all_samples_int64le"]["tokens"]
    with np.load(GOLDEN / f"{name}.npz") as golden:
        numbers = golden["sample_idx"][golden["sample_idx"] < size]
        expected = golden["sample_tokens"][: len(numbers)]
    assert len(numbers) >= 9
    np.testing.assert_array_equal(batch.inputs[numbers], expected)


def test_every_golden_train_case_with_a_size_is_tested() -> None:
    assert len(TRAIN) == 14


def test_a_kept_index_is_a_ready_one(tmp_path: Path) -> None:
    built = settings("", None).model_copy(
        update={
            "dataset_type": "mmap",
            "dataset_path": str(GOLDEN / "ds_a"),
            "blend_cache_dir": str(tmp_path),
        }
    )
    order = SampleOrder((200,))
    expected = open_source(built, vocab_size=1000, order=order)
    (entry,) = tmp_path.iterdir()
    ready = open_ready(f"{entry}|{GOLDEN / 'ds_a'}", None, 200)
    for i in range(200):
        np.testing.assert_array_equal(ready.read(i).text, expected.read(i).text)


def test_a_run_may_be_extended_as_far_as_the_arrays_go(tmp_path: Path) -> None:
    path, _ = write_arrays("a_969_30_1_train", tmp_path)
    first = SampleOrder((300,))
    data = settings(path, None)
    old = open_source(data, vocab_size=1000, order=first)
    new = open_source(data, vocab_size=1000, order=first.extended(705))
    for i in range(300):
        np.testing.assert_array_equal(old.read(i).text, new.read(i).text)
    new.read(704)
    with pytest.raises(DataError, match=r"has 705 samples .* needs 706; make longer indices"):
        open_source(data, vocab_size=1000, order=first.extended(706))


def edit(key: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / f"{key}.npy"
        np.save(path, change(np.load(path)))

    return apply


def with_one(array: np.ndarray, place: int, value: int) -> np.ndarray:
    array.flat[place] = value
    return array


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "shuffle_index.npy").unlink(), "shuffle_index.npy: cannot be read"),
        (lambda f: (f / "sample_index.npy").write_text("x"), "sample_index.npy: cannot be read"),
        (edit("document_index", lambda a: a.astype(float)), "holds float64; an index is of int"),
        (edit("sample_index", lambda a: a[:, 0]), r"the shapes must be .* sample_index \(706,\)"),
        (edit("shuffle_index", lambda a: a[:-1]), "704 samples for the 705"),
        (edit("shuffle_index", lambda a: a + 1), "705 samples for the 705"),
        (edit("document_index", lambda a: with_one(a, 5, 1200)), "are not among the 1200"),
        (edit("sample_index", lambda a: with_one(a, 20, 10**6)), "points outside of document"),
        (edit("sample_index", lambda a: with_one(a, 21, 99)), r"sample 10 starts after \d+ tok"),
        (edit("document_index", lambda a: a[::-1]), "is of another dataset or another"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    damage: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    path, _ = write_arrays("a_969_30_1_train", tmp_path)
    damage(tmp_path / "dataset_0")
    with pytest.raises(DataError, match=says):
        open_ready(path, None, 700)


def test_another_sequence_length_is_refused(tmp_path: Path) -> None:
    path, _ = write_arrays("a_969_30_1_train", tmp_path)
    with pytest.raises(DataError, match=r"another data.max_target_length than 64"):
        open_ready(path, None, 10, max_target_length=64)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "dataset_index.npy").unlink(), "dataset_index.npy: cannot be read"),
        (edit("dataset_index", lambda a: a[:-1]), r"\(299,\) and .* \(300,\) must be of one"),
        (edit("dataset_index", lambda a: a + 1), "has datasets 1 to 2 and the data path names 2"),
        (edit("dataset_sample_index", lambda a: with_one(a, 9, 77)), "are not 0, 1, 2"),
        (edit("dataset_index", lambda a: a[:0]), "must be of one shape"),
    ],
)
def test_turns_that_do_not_fit_are_refused(
    damage: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    path, blend = write_arrays("blend_weighted_train", tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=says):
        open_ready(path, blend, 200)


def test_ready_turns_need_ready_indices() -> None:
    with pytest.raises(ConfigError, match="blend_index_dir=/x needs dataset_type=mmap_npy"):
        resolve({
            "preset": "ling2_tiny",
            "data": {"dataset_path": "/a", "blend_index_dir": "/x"},
            "base_output_directory": "/tmp/x",
        })  # fmt: skip
