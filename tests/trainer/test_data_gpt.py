"""Samples are Megatron's, token for token."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ling_trainer.data.gpt import (
    NO_PAD,
    SPLITS,
    GPTDataset,
    GPTIndex,
    build_index,
    build_sample_index,
    split_documents,
)
from ling_trainer.data.indexed import DataError, IndexedDataset
from ling_trainer.data.indexed_writer import write_indexed
from ling_trainer.data.packing import effective_pad_id, pack

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron" / "data"
META = json.loads((GOLDEN / "meta.json").read_text())["cases"]
CASES: dict[str, dict[str, Any]] = {k: v for k, v in META.items() if v["kind"] == "gpt"}

# Their loss masks hold what Megatron later corrected: the first sample's padding stays in every
# mask that follows, and a padding id that is also the end of document is masked as padding.
MASK_IS_A_MEGATRON_BUG = {"p_uniquepad_train", "b_ling2_ambiguous_train"}


def golden_index(case: dict[str, Any], indexed: IndexedDataset) -> GPTIndex:
    name, flags = case["split_name"], case["flags"]
    documents = split_documents(case["split"], len(indexed), name)
    assert [documents.start, documents.stop] == case["docs"]
    keep_partial = not flags.get("drop_last_partial_validation_sequence", True)
    return build_index(
        indexed.sequence_lengths,
        np.arange(documents.start, documents.stop, dtype=np.int32),
        num_samples=case["sizes"][SPLITS.index(name)],
        sequence_length=case["sequence_length"],
        seed=case["seed"],
        extra_token=flags.get("add_extra_token_to_sequence", True),
        drop_last_partial=not (name == "valid" and keep_partial),
    )


def golden_samples(case: dict[str, Any]) -> tuple[GPTDataset, dict[str, np.ndarray]]:
    flags, tokenizer = case["flags"], case["tokenizer"]
    eod, pad = tokenizer["eod"], tokenizer["pad"]
    if pad is None:
        pad = NO_PAD
    elif not flags.get("allow_ambiguous_pad_tokens"):
        pad = effective_pad_id(eod_id=eod, pad_id=pad)
    indexed = IndexedDataset.open(GOLDEN / case["blend"][0][0])
    extra = flags.get("add_extra_token_to_sequence", True)
    dataset = GPTDataset(
        indexed,
        golden_index(case, indexed),
        sequence_length=case["sequence_length"],
        vocab_size=tokenizer["vocab"],
        pad_id=pad,
        extra_token=extra,
    )
    # Each of ds_a's documents ends with the eod token, so that positions which restart at
    # documents (inter_document_masking) restart after eod tokens.
    resets = flags.get("reset_position_ids") or flags.get("inter_document_masking")
    batch = pack(
        np.stack([dataset.sample(i) for i in range(len(dataset))]),
        eod_id=eod,
        pad_id=pad,
        eod_mask_loss=flags.get("eod_mask_loss", False),
        reset_position_ids=bool(resets),
        extra_token=extra,
    )
    fields = {
        "tokens": batch.inputs,
        "labels": batch.targets,
        "loss_mask": batch.loss_mask,
        "position_ids": batch.positions,
    }
    return dataset, {key: np.asarray(value) for key, value in fields.items()}


def test_every_golden_single_dataset_case_is_tested() -> None:
    files = {path.stem for path in GOLDEN.glob("*.npz") if not path.stem.startswith("blend")}
    assert set(CASES) == files
    assert len(CASES) == 15
    epochs = {case["num_epochs"] for case in CASES.values()}
    assert epochs >= {1, 2, 3, 5}


@pytest.mark.parametrize("name", CASES)
def test_golden_order_of_documents_and_samples_is_megatrons(name: str) -> None:
    case = CASES[name]
    index = golden_index(case, IndexedDataset.open(GOLDEN / case["blend"][0][0]))
    assert index.num_epochs == case["num_epochs"]
    assert len(index) == case["len"]
    with np.load(GOLDEN / f"{name}.npz") as golden:
        for key in ("document_index", "sample_index", "shuffle_index"):
            ours = getattr(index, key)
            assert ours.dtype == golden[key].dtype
            np.testing.assert_array_equal(ours, golden[key])


@pytest.mark.parametrize("name", CASES)
def test_golden_samples_have_megatrons_hashes(name: str, show_golden: Any) -> None:
    case = CASES[name]
    dataset, ours = golden_samples(case)
    hashes = case["sha256_all_samples_int64le"]
    assert set(hashes) == set(ours)
    compared = set(ours) - ({"loss_mask"} if name in MASK_IS_A_MEGATRON_BUG else set())
    for key in compared:
        assert hashlib.sha256(ours[key].astype("<i8").tobytes()).hexdigest() == hashes[key], key
    for key in set(ours) - compared:
        assert hashlib.sha256(ours[key].astype("<i8").tobytes()).hexdigest() != hashes[key], key
    with np.load(GOLDEN / f"{name}.npz") as golden:
        numbers = golden["sample_idx"]
        worst = {
            key: int(np.abs(ours[key][numbers].astype(np.int64) - golden[f"sample_{key}"]).max())
            for key in compared
        }
    assert set(worst.values()) == {0}
    fields = "all fields" if len(compared) == 4 else "all but the loss mask"
    cases = f"{len(dataset)} samples, {fields}"
    show_golden(f"megatron/data/{name}", cases=cases, worst=max(worst.values()), tolerance=0)


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
        indexed.sequence_lengths,
        np.array([0, 1], np.int32),
        sequence_length=3,
        extra_token=True,
        drop_last_partial=False,
    )
    assert pairs.tolist() == [[0, 0], [0, 3], [1, 0]]
    index = GPTIndex(np.array([0, 1], np.int32), pairs, np.arange(2), 1)
    dataset = GPTDataset(indexed, index, sequence_length=3, vocab_size=10)
    assert [dataset.sample(i).tolist() for i in range(2)] == [[1, 2, 3, 4], [4, 5, -1, -1]]


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
    vocab_size = int(indexed.tokens.max())
    dataset = GPTDataset(
        indexed, golden_index(case, indexed), sequence_length=64, vocab_size=vocab_size
    )
    caught: list[str] = []
    for i in range(len(dataset)):
        try:
            dataset.sample(i)
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
        assert indexed.tokens[byte // 2] == token
        assert indexed.read(document)[offset] == token
        whole = GPTDataset(indexed, dataset.index, sequence_length=64, vocab_size=vocab_size + 1)
        assert token in whole.sample(sample)
        assert "set model.vocab_size" in message


def test_a_negative_token_is_refused(tmp_path: Path) -> None:
    with write_indexed(tmp_path / "x", np.int32) as writer:
        writer.add_sequence([1, 2, -7, 3])
        writer.end_document()
    indexed = IndexedDataset.open(tmp_path / "x")
    index = build_index(
        indexed.sequence_lengths,
        np.zeros(1, np.int32),
        num_samples=1,
        sequence_length=3,
        seed=0,
    )
    with pytest.raises(DataError, match="byte 8: token id -7"):
        GPTDataset(indexed, index, sequence_length=3, vocab_size=10).sample(0)


def test_tokens_that_are_no_integers_are_refused(tmp_path: Path) -> None:
    with write_indexed(tmp_path / "f", np.float32) as writer:
        writer.add_sequence([1.0, 2.0, 3.0])
        writer.end_document()
    indexed = IndexedDataset.open(tmp_path / "f")
    index = build_index(
        indexed.sequence_lengths,
        np.zeros(1, np.int32),
        num_samples=1,
        sequence_length=2,
        seed=0,
    )
    with pytest.raises(DataError, match=r"f\.idx, byte 17: the tokens are float32"):
        GPTDataset(indexed, index, sequence_length=2, vocab_size=10)
