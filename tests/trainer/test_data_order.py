"""A run that is extended keeps the order of what it has read."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ling_trainer.data.index_file import DataError
from ling_trainer.data.order import SampleOrder
from ling_trainer.data.source import open_source
from ling_trainer.data_config import DataConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron" / "data"
SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=5).map(tuple)


def config(**settings: object) -> DataConfig:
    values = {
        "dataset_path": str(GOLDEN / "ds_a"),
        "split": "1,0,0",
        "data_shuffle_seed": 7,
        "max_target_length": 32,
        "global_batch_size": 2,
        "eod_id": 3,
        "pad_id": 3,
    }
    return DataConfig.model_validate({**values, **settings})


def texts(order: SampleOrder, numbers: range, **settings: object) -> np.ndarray:
    source = open_source(config(**settings), vocab_size=1000, order=order)
    return np.stack([source.read(i).text for i in numbers])


@given(sizes=SIZES)
def test_an_order_survives_its_json(sizes: tuple[int, ...]) -> None:
    order = SampleOrder(sizes)
    assert SampleOrder.from_json(order.to_json()) == order


@pytest.mark.parametrize(
    "text", ['{"sizes": []}', '{"sizes": [0]}', '{"sizes": [true]}', "[3]", "{}"]
)
def test_a_damaged_order_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="restore an older one"):
        SampleOrder.from_json(text)


@given(sizes=SIZES, num_samples=st.integers(1, 400))
def test_extending_adds_a_segment_for_what_is_missing_and_touches_no_other(
    sizes: tuple[int, ...], num_samples: int
) -> None:
    order = SampleOrder(sizes)
    extended = order.extended(num_samples)
    assert extended.num_samples == max(num_samples, order.num_samples)
    assert extended.sizes[: len(sizes)] == sizes
    assert len(extended.sizes) <= len(sizes) + 1
    assert [extended.locate(i) for i in range(order.num_samples)] == [
        (segment, i) for segment, size in enumerate(sizes) for i in range(size)
    ]


def test_a_sample_past_the_order_is_an_error() -> None:
    for sample in (-1, 5):
        with pytest.raises(IndexError, match="raise steps"):
            SampleOrder((3, 2)).locate(sample)


# ds_a has 7754 tokens: 242 samples of 32 an epoch, so the 80 % rule changes at 242 + 193.
@pytest.mark.parametrize(
    ("before", "after"),
    [(230, 300), (300, 700), (260, 470)],
    ids=["a second epoch", "a third and fourth epoch", "the 80 % rule inside an epoch"],
)
def test_raising_the_samples_of_a_run_keeps_every_sample_and_unpinned_would_not(
    before: int, after: int
) -> None:
    first = SampleOrder((before,))
    old = texts(first, range(before))
    pinned = texts(first.extended(after), range(before))
    np.testing.assert_array_equal(pinned, old)
    unpinned = texts(SampleOrder((after,)), range(before))
    assert (unpinned != old).any(axis=1).mean() > 0.9


def test_what_comes_after_is_shuffled_with_the_next_seed() -> None:
    order = SampleOrder((230,)).extended(300).extended(320)
    assert order.sizes == (230, 70, 20)
    for seed, first, size in ((8, 230, 70), (9, 300, 20)):
        alone = texts(SampleOrder((size,)), range(size), data_shuffle_seed=seed)
        np.testing.assert_array_equal(texts(order, range(first, first + size)), alone)


def test_a_bad_token_is_named_with_its_number_in_the_run() -> None:
    source = open_source(config(), vocab_size=900, order=SampleOrder((5, 100)))
    messages = []
    for i in range(5, 105):
        try:
            source.read(i)
        except DataError as error:
            messages.append((i, str(error)))
    assert messages
    for i, message in messages:
        assert f"(sample {i}, document " in message


def test_settings_that_give_no_samples_are_refused_by_name() -> None:
    order = SampleOrder((1,))
    with pytest.raises(DataError, match=r"ds_a\.idx, train part of split=0,1,0: none of 1200"):
        open_source(config(split="0,1,0"), vocab_size=1000, order=order)
    with pytest.raises(DataError, match=r"ds_a\.idx, .*write it like 999,1,0"):
        open_source(config(split="1.2.3"), vocab_size=1000, order=order)
    with pytest.raises(DataError, match=r"data_shuffle_seed=4294967296 is not below"):
        open_source(config(data_shuffle_seed=2**32 - 1), vocab_size=1000, order=order.extended(2))
    # Document 1199, the test part, is empty.
    with pytest.raises(DataError, match=r"ds_a\.idx, test part of split=969,30,1: 1 doc.* 0 tok"):
        open_source(config(split="969,30,1"), vocab_size=1000, order=order, split_name="test")


def test_the_same_seed_and_number_give_the_same_synthetic_text() -> None:
    settings = {"dataset_type": "synthetic", "dataset_path": None, "eod_id": 99, "pad_id": 98}

    def source(seed: int, size: int):
        data = config(**settings, data_shuffle_seed=seed, max_target_length=256)
        return open_source(data, vocab_size=100, order=SampleOrder((size,)))

    text = np.stack([source(1, 9).read(i).text for i in range(9)])
    np.testing.assert_array_equal(np.stack([source(1, 20).read(i).text for i in range(9)]), text)
    assert (np.stack([source(2, 9).read(i).text for i in range(9)]) != text).any(axis=1).all()
    assert len({row.tobytes() for row in text}) == 9
    assert text.shape == (9, 257)
    assert text.min() >= 0
    assert text.max() == 99
    assert 98 not in text
    share = np.bincount(text.ravel(), minlength=100) / text.size
    entropy = -(share[share > 0] * np.log(share[share > 0])).sum()
    assert entropy < 0.95 * np.log(100)
