"""Blends give each dataset its turns as Megatron does, and name what they cannot give."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ling_trainer.data.blend import (
    Blend,
    build_blend_index,
    build_exhaustive_blend_index,
    member_sizes,
    normalize,
    parse_blend,
)
from ling_trainer.data.gpt import SplitName
from ling_trainer.data.index_file import DataError
from ling_trainer.data.opener import Dataset
from ling_trainer.data.order import SampleOrder
from ling_trainer.data.samples import BlendedDataset, GPTDataset
from ling_trainer.data.source import open_dataset, open_source
from ling_trainer.data_config import DataConfig
from ling_trainer.schema import ConfigError
from ling_trainer.settings import resolve

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron" / "data"
A, C = str(GOLDEN / "ds_a"), str(GOLDEN / "ds_c")


def settings(**values: object) -> DataConfig:
    defaults: dict[str, object] = {
        "data_shuffle_seed": 1234,
        "max_target_length": 32,
        "global_batch_size": 1,
        "eod_id": 3,
        "pad_id": 3,
    }
    if not any(key.endswith("_data_path") for key in values):
        defaults["split"] = "1,0,0"
    return DataConfig.model_validate({**defaults, **values})


def open_part(data: DataConfig, size: int | None, split_name: SplitName = "train") -> Dataset:
    return open_dataset(data, vocab_size=1000, num_samples=size, split_name=split_name)


# What a path says.


def test_a_path_is_one_dataset_or_a_blend_with_or_without_weights() -> None:
    assert parse_blend("/d/a.b") == Blend(("/d/a.b",), None)
    assert parse_blend("/d/a,1") == Blend(("/d/a",), (1.0,))
    assert parse_blend("/d/a;/d/b") == Blend(("/d/a", "/d/b"), None)
    assert parse_blend("/a,0.7; /b,3e-1;") == Blend(("/a", "/b"), (0.7, 0.3))
    assert parse_blend("/d/a,b") == Blend(("/d/a,b",), None)
    assert parse_blend("gs://bucket/a,2;gs://bucket/b,1").prefixes[1] == "gs://bucket/b"
    with_folders = parse_blend("/n/0|/a,1;/n/1|/b,2", with_index_folders=True)
    assert with_folders == Blend(("/a", "/b"), (1.0, 2.0), ("/n/0", "/n/1"))


@pytest.mark.parametrize(
    ("text", "with_folders", "says"),
    [
        ("", False, "names 0 datasets"),
        ("/a,1;/b", False, "'/b' has no weight"),
        ("/a,1;/b,0", False, r"weights \[1.0, 0.0\] must be positive"),
        ("/a,1;/b,inf", False, "must be positive"),
        ("/a,nan", False, "must be positive"),
        ("/n|/a", False, "must be a prefix without"),
        ("/a", True, r"must be npy_dir\|prefix"),
    ],
)
def test_a_bad_path_is_refused(text: str, with_folders: bool, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_blend(text, with_index_folders=with_folders)


# Turns.


@given(
    weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6),
    num_samples=st.integers(1, 300),
)
def test_each_turn_is_the_dataset_that_lags_most(weights: list[float], num_samples: int) -> None:
    index = build_blend_index(weights, num_samples)
    shares = np.array(normalize(weights))
    used = np.zeros(len(weights), np.int64)
    for i in range(num_samples):
        turn = int(np.argmax(shares * max(i, 1) - used))
        assert index.dataset_index[i] == turn
        assert index.dataset_sample_index[i] == used[turn]
        used[turn] += 1


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_an_exhaustive_blend_takes_every_sample_once_by_the_same_rule(lengths: list[int]) -> None:
    index = build_exhaustive_blend_index(lengths)
    used = [0] * len(lengths)
    for i in range(sum(lengths)):
        lags = {
            d: length / sum(lengths) * max(i, 1) - used[d]
            for d, length in enumerate(lengths)
            if used[d] < length
        }
        turn = max(lags, key=lambda d: (lags[d], -d))
        assert (index.dataset_index[i], index.dataset_sample_index[i]) == (turn, used[turn])
        used[turn] += 1
    assert used == lengths


@given(
    weights=st.lists(st.integers(1, 1000), min_size=1, max_size=8),
    num_samples=st.integers(1, 100_000),
)
def test_no_dataset_is_asked_for_more_than_it_builds(weights: list[int], num_samples: int) -> None:
    shares = normalize(weights)
    target, built = (
        member_sizes(shares, num_samples),
        member_sizes(shares, num_samples, surplus=0.005),
    )
    assert num_samples <= sum(target) < num_samples + len(weights) + 1
    assert all(b >= t for b, t in zip(built, target, strict=True))


# Datasets.


def test_an_epoch_of_a_blend_holds_each_sample_of_each_dataset_once() -> None:
    blend = open_part(settings(dataset_path=f"{A};{C}", split="90,10,0"), None)
    assert isinstance(blend, BlendedDataset)
    assert [len(member) for member in blend.datasets] == [216, 12]
    assert len(blend) == 228
    alone = open_part(settings(dataset_path=C, split="90,10,0"), None)
    mine = [blend.read(i) for i in range(len(blend)) if blend.index.dataset_index[i] == 1]
    for i, sample in enumerate(mine):
        np.testing.assert_array_equal(sample.text, alone.read(i).text)
        assert sample.dataset == 1


def test_each_split_may_have_data_of_its_own_and_is_then_read_whole() -> None:
    data = settings(train_data_path=f"{A},0.7;{C},0.3", valid_data_path=f"{C},5")
    train = open_part(data, 100)
    assert isinstance(train, BlendedDataset)
    assert [len(np.unique(m.index.document_index)) for m in train.datasets] == [1200, 30]
    # A single dataset has no use for its weight here, and no surplus.
    valid = open_part(data, 13, "valid")
    assert isinstance(valid, GPTDataset)
    assert valid.index.num_epochs == 1
    with pytest.raises(DataError, match="test_data_path is not set"):
        open_part(data, 5, "test")


def test_a_single_weighted_dataset_is_a_blend_and_asks_for_the_surplus() -> None:
    # ds_c has 13 samples an epoch: 13 of them need one epoch, 13 and 0.5 % need two.
    alone = open_part(settings(dataset_path=C), 13)
    blend = open_part(settings(dataset_path=f"{C},1"), 13)
    assert isinstance(alone, GPTDataset)
    assert isinstance(blend, BlendedDataset)
    assert (alone.index.num_epochs, blend.datasets[0].index.num_epochs) == (1, 2)


def test_the_same_dataset_twice_is_read_in_the_same_order_by_both() -> None:
    blend = open_part(settings(dataset_path=f"{A},1;{A},1"), 20)
    for i in range(0, 20, 2):
        np.testing.assert_array_equal(blend.read(i).text, blend.read(i + 1).text)


def test_an_extended_blend_keeps_every_sample() -> None:
    data = settings(dataset_path=f"{A},0.7;{C},0.3")
    first = SampleOrder((300,))
    old = open_source(data, vocab_size=1000, order=first)
    new = open_source(data, vocab_size=1000, order=first.extended(700))
    for i in range(300):
        np.testing.assert_array_equal(old.read(i).text, new.read(i).text)
    new.read(699)


def test_what_a_blend_cannot_give_is_refused() -> None:
    lengths_only = settings(dataset_path=f"{A};{C}")
    assert len(open_part(lengths_only, 256)) == 255
    with pytest.raises(
        DataError, match=r"ds_c has 255 samples .* and the run needs 256; give the"
    ):
        open_source(lengths_only, vocab_size=1000, order=SampleOrder((256,)))
    with pytest.raises(DataError, match="blended by weight have no epoch"):
        open_part(settings(dataset_path=f"{A},1;{C},1"), None)
    with pytest.raises(DataError, match=r"data.dataset_path: .*'/b' has no weight"):
        open_part(settings(dataset_path="/a,1;/b"), 5)
    with pytest.raises(DataError, match=r"ds_c\.idx, train part of split=1,99,0: none of 30"):
        open_part(settings(dataset_path=f"{A},1;{C},1", split="1,99,0"), 5)


def test_the_content_names_every_dataset_and_weight() -> None:
    order = SampleOrder((5,))
    plain = open_source(settings(dataset_path=A), vocab_size=1000, order=order)
    blend = open_source(settings(dataset_path=f"{A},2;{C},1"), vocab_size=1000, order=order)
    assert len(plain.content) == 1
    assert blend.content[0] == f"{plain.content[0]} x 2.0"
    assert blend.content[1].endswith(" x 1.0")
    assert plain.content[0] not in blend.content[1]


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ({"dataset_path": "/a", "train_data_path": "/b"}, "name the data once"),
        ({}, "dataset_path is not set; dataset_type=mmap needs"),
    ],
)
def test_data_are_named_once(paths: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve({"preset": "ling2_tiny", "data": paths, "base_output_directory": "/tmp/x"})
