"""Splits, epochs and the sample index."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ling_trainer.data.gpt import (
    SPLITS,
    GPTIndex,
    build_index,
    build_sample_index,
    split_documents,
)
from ling_trainer.data.index_file import DataError
from ling_trainer.data.indexed import IndexedDataset
from ling_trainer.data.indexed_writer import write_indexed
from ling_trainer.data.samples import GPTDataset

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron" / "data"
META = json.loads((GOLDEN / "meta.json").read_text())["cases"]
CASES: dict[str, dict[str, Any]] = {k: v for k, v in META.items() if v["kind"] == "gpt"}


def golden_index(case: dict[str, Any], indexed: IndexedDataset) -> GPTIndex:
    documents = split_documents(case["split"], len(indexed), case["split_name"])
    return build_index(
        indexed.index.lengths,
        np.arange(documents.start, documents.stop, dtype=np.int32),
        num_samples=case["sizes"][0],
        sequence_length=case["sequence_length"],
        seed=case["seed"],
    )


# The vectorised search against the walk it replaces.


def walk(
    lengths: list[int], order: list[int], *, sequence_length: int, extra: int, count: int
) -> list[list[int]]:
    """Cut documents into samples one by one, as the definition says it."""
    position = offset = 0
    pairs = [[0, 0]]
    for _ in range(count):
        need = sequence_length + extra
        while True:
            left = lengths[order[position]] - offset
            if need <= left:
                offset += need - extra
                break
            need -= left
            if position == len(order) - 1:
                offset = max(lengths[order[position]] - extra, 0)
                break
            position += 1
            offset = 0
        pairs.append([position, offset])
    return pairs


@given(data=st.data(), extra=st.booleans(), drop_last=st.booleans())
def test_the_sample_index_equals_a_walk_over_the_documents(
    data: st.DataObject, extra: bool, drop_last: bool
) -> None:
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=12))
    numbers = st.integers(0, len(lengths) - 1)
    order = data.draw(st.lists(numbers, min_size=1, max_size=40))
    sequence_length = data.draw(st.integers(1, 15))
    tokens = sum(lengths[i] for i in order) - extra
    if tokens < 0:
        return
    count = tokens // sequence_length if drop_last else -(-tokens // sequence_length)
    index = build_sample_index(
        np.array(lengths, np.int32),
        np.array(order, np.int32),
        sequence_length=sequence_length,
        extra_token=extra,
        drop_last_partial=drop_last,
    )
    assert index.tolist() == walk(
        lengths, order, sequence_length=sequence_length, extra=int(extra), count=count
    )


def test_a_partial_last_sample_may_end_in_an_empty_document(tmp_path: Path) -> None:
    with write_indexed(tmp_path / "x", np.uint16) as writer:
        for tokens in ([1, 2, 3, 4, 5], []):
            writer.add_sequence(tokens)
            writer.end_document()
    indexed = IndexedDataset.open(tmp_path / "x")
    pairs = build_sample_index(
        indexed.index.lengths,
        np.array([0, 1], np.int32),
        sequence_length=3,
        extra_token=True,
        drop_last_partial=False,
    )
    assert pairs.tolist() == [[0, 0], [0, 3], [1, 0]]
    index = GPTIndex(np.array([0, 1], np.int32), pairs, np.arange(2), 1)
    dataset = GPTDataset(indexed, index, sequence_length=3, vocab_size=10)
    assert [dataset.read(i).text.tolist() for i in range(2)] == [[1, 2, 3, 4], [4, 5, -1, -1]]


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    num_samples=st.integers(1, 60),
    sequence_length=st.integers(1, 12),
    extra=st.booleans(),
)
def test_epochs_are_as_few_as_hold_the_samples_and_each_sample_occurs_once(
    lengths: list[int], num_samples: int, sequence_length: int, extra: bool
) -> None:
    per_epoch = sum(lengths)
    if per_epoch <= 1:
        return
    documents = np.arange(len(lengths), dtype=np.int32)
    index = build_index(
        np.array(lengths, np.int32),
        documents,
        num_samples=num_samples,
        sequence_length=sequence_length,
        seed=3,
        extra_token=extra,
    )
    needed = num_samples * sequence_length + extra
    assert index.num_epochs * per_epoch >= needed
    assert index.num_epochs == 1 or (index.num_epochs - 1) * per_epoch < needed
    assert len(index) >= num_samples
    assert sorted(index.shuffle_index.tolist()) == list(range(len(index)))
    assert np.bincount(index.document_index).tolist() == [index.num_epochs] * len(lengths)


def test_a_last_epoch_below_80_percent_is_kept_to_the_end() -> None:
    lengths = np.full(100, 10, np.int32)
    documents = np.arange(100, dtype=np.int32)

    def last_samples(num_samples: int) -> set[int]:
        index = build_index(
            lengths, documents, num_samples=num_samples, sequence_length=10, seed=0
        )
        assert index.num_epochs == 2
        return set(index.shuffle_index[99:].tolist())

    # 999 tokens make 99 samples an epoch; the line lies at int(0.8 * 99) = 79 of the second.
    assert last_samples(99 + 78) == set(range(99, 199))
    assert last_samples(99 + 79) != set(range(99, 199))


# Splits.


@pytest.mark.parametrize(
    ("split", "num_documents", "expected"),
    [
        ("969,30,1", 1200, [(0, 1163), (1163, 1199), (1199, 1200)]),
        ("1,0,0", 7, [(0, 7), (0, 0), (0, 0)]),
        ("100", 7, [(0, 7), (0, 0), (0, 0)]),
        ("1,1", 5, [(0, 2), (2, 5), (0, 0)]),  # 2.5 rounds to the even number
        ("3,1", 10, [(0, 8), (8, 10), (0, 0)]),  # so does 7.5
        ("0,1,1", 4, [(0, 0), (0, 2), (2, 4)]),
        ("0.5,0.25,0.25", 8, [(0, 4), (4, 6), (6, 8)]),
    ],
)
def test_splits_round_as_megatrons(
    split: str, num_documents: int, expected: list[tuple[int, int]]
) -> None:
    ranges = [split_documents(split, num_documents, name) for name in SPLITS]
    assert [(part.start, part.stop) for part in ranges] == expected


@pytest.mark.parametrize("split", ["0,0,0", "", "1,1,1,1", "1.2.3,1", "."])
def test_a_split_without_shares_is_refused(split: str) -> None:
    with pytest.raises(ValueError, match="write it like 999,1,0"):
        split_documents(split, 10, "train")


# Errors.


@pytest.mark.parametrize(
    ("lengths", "says"),
    [([0, 0], "hold 0 tokens"), ([1, 0], "hold 1 tokens"), ([4, 4], "do not make one sample")],
)
def test_too_little_data_is_refused_and_does_not_loop(lengths: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build_index(
            np.array(lengths, np.int32),
            np.arange(2, dtype=np.int32),
            num_samples=None,
            sequence_length=8,
            seed=0,
        )


def test_a_token_outside_of_the_vocabulary_is_named_where_it_lies() -> None:
    case = CASES["a_oneepoch_train"]
    indexed = IndexedDataset.open(GOLDEN / "ds_a")
    tokens = np.fromfile(GOLDEN / "ds_a.bin", "<u2")
    vocab_size = int(tokens.max())
    dataset = GPTDataset(
        indexed, golden_index(case, indexed), sequence_length=64, vocab_size=vocab_size
    )
    caught: list[str] = []
    for i in range(len(dataset)):
        try:
            dataset.read(i)
        except DataError as error:
            caught.append(str(error))
    assert 0 < len(caught) < len(dataset)
    for message in caught:
        found = re.search(
            r"ds_a\.bin, byte (\d+): token id (\d+) "
            r"\(sample (\d+), document (\d+), offset (\d+)\)",
            message,
        )
        assert found, message
        byte, token, sample, document, offset = map(int, found.groups())
        assert token == vocab_size
        assert tokens[byte // 2] == token
        assert indexed.read(document)[offset] == token
        whole = GPTDataset(indexed, dataset.index, sequence_length=64, vocab_size=vocab_size + 1)
        assert token in whole.read(sample).text
        assert "set model.vocab_size" in message


def test_a_negative_token_is_refused(tmp_path: Path) -> None:
    with write_indexed(tmp_path / "x", np.int32) as writer:
        writer.add_sequence([1, 2, -7, 3])
        writer.end_document()
    indexed = IndexedDataset.open(tmp_path / "x")
    index = build_index(
        indexed.index.lengths,
        np.zeros(1, np.int32),
        num_samples=1,
        sequence_length=3,
        seed=0,
    )
    with pytest.raises(DataError, match="byte 8: token id -7"):
        GPTDataset(indexed, index, sequence_length=3, vocab_size=10).read(0)


def test_tokens_that_are_no_integers_are_refused(tmp_path: Path) -> None:
    with write_indexed(tmp_path / "f", np.float32) as writer:
        writer.add_sequence([1.0, 2.0, 3.0])
        writer.end_document()
    indexed = IndexedDataset.open(tmp_path / "f")
    index = build_index(
        indexed.index.lengths,
        np.zeros(1, np.int32),
        num_samples=1,
        sequence_length=2,
        seed=0,
    )
    with pytest.raises(DataError, match=r"f\.idx, byte 17: the tokens are float32"):
        GPTDataset(indexed, index, sequence_length=2, vocab_size=10)
