"""Every data golden: orders, samples, masks, positions and blends are Megatron's."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ling_trainer.data.gpt import SPLITS, SplitName
from ling_trainer.data.opener import Dataset
from ling_trainer.data.packing import PackedBatch, document_bounds, pack_samples
from ling_trainer.data.samples import BlendedDataset, GPTDataset, Sample
from ling_trainer.data.source import open_dataset
from ling_trainer.data_config import DataConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron" / "data"
CASES: dict[str, dict[str, Any]] = json.loads((GOLDEN / "meta.json").read_text())["cases"]
FIELDS = {
    "tokens": "inputs",
    "labels": "targets",
    "loss_mask": "loss_mask",
    "position_ids": "positions",
}
INDEX_ARRAYS = ("document_index", "sample_index", "shuffle_index")

# Their loss masks hold what Megatron later corrected: the first sample's padding stays in every
# mask that follows, and a padding id that is also the end of document is masked as padding.
MASK_IS_A_MEGATRON_FAULT = {"p_uniquepad_train", "b_ling2_ambiguous_train"}


def data_path(blend: list[Any]) -> str:
    prefixes, weights = blend
    members = [str(GOLDEN / prefix) for prefix in prefixes]
    if weights is not None:
        members = [f"{path},{weight!r}" for path, weight in zip(members, weights, strict=True)]
    return ";".join(members)


def settings(case: dict[str, Any]) -> DataConfig:
    flags, tokenizer = dict(case["flags"]), case["tokenizer"]
    flags.pop("create_attention_mask", None)  # whether the mask is made, not what it says
    if case["blend_per_split"]:
        blends = zip(SPLITS, case["blend_per_split"], strict=True)
        paths = {f"{name}_data_path": data_path(blend) for name, blend in blends if blend}
    else:
        paths = {"dataset_path": data_path(case["blend"]), "split": case["split"]}
    return DataConfig(
        **paths,
        data_shuffle_seed=case["seed"],
        max_target_length=case["sequence_length"],
        global_batch_size=1,
        eod_id=tokenizer["eod"],
        # Without a padding token nothing may count as one; so it is with the end of document.
        pad_id=tokenizer["eod"] if tokenizer["pad"] is None else tokenizer["pad"],
        reproduce_cached_loss_mask=True,
        **flags,
    )


def open_case(case: dict[str, Any], data: DataConfig) -> Dataset:
    name: SplitName = case["split_name"]
    size, vocab_size = case["sizes"][SPLITS.index(name)], case["tokenizer"]["vocab"]
    return open_dataset(data, vocab_size=vocab_size, num_samples=size, split_name=name)


def read_all(dataset: Dataset, data: DataConfig) -> tuple[list[Sample], PackedBatch]:
    samples = [dataset.read(i) for i in range(len(dataset))]
    return samples, pack_samples(samples, data)


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(array.astype("<i8").tobytes()).hexdigest()


def test_every_golden_case_is_tested() -> None:
    assert set(CASES) == {path.stem for path in GOLDEN.glob("*.npz")}
    assert len(CASES) == 20
    assert {case["num_epochs"] for case in CASES.values() if "num_epochs" in case} >= {1, 2, 3, 5}
    assert sum(case["kind"] == "blended" for case in CASES.values()) == 5


@pytest.mark.parametrize("name", CASES)
def test_golden_orders_are_megatrons(name: str) -> None:
    case = CASES[name]
    dataset = open_case(case, settings(case))
    assert len(dataset) == case["len"]
    members = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    ours: dict[str, np.ndarray] = {}
    for i, member in enumerate(members):
        prefix = f"m{i}_" if isinstance(dataset, BlendedDataset) else ""
        ours |= {f"{prefix}{key}": getattr(member.index, key) for key in INDEX_ARRAYS}
    if isinstance(dataset, BlendedDataset):
        assert [len(member) for member in members] == case["mid_len"]
        ours["dataset_index"] = dataset.index.dataset_index
        ours["dataset_sample_index"] = dataset.index.dataset_sample_index
    else:
        assert isinstance(members[0], GPTDataset)
        assert members[0].index.num_epochs == case["num_epochs"]
        ours["split_documents"] = np.unique(members[0].index.document_index)
    with np.load(GOLDEN / f"{name}.npz") as golden:
        keys = {key for key in golden.files if not key.startswith("sample_") or key in ours}
        assert keys == set(ours)
        for key in keys:
            assert ours[key].dtype == golden[key].dtype, key
            np.testing.assert_array_equal(ours[key], golden[key], err_msg=key)


@pytest.mark.parametrize("name", CASES)
def test_golden_samples_have_megatrons_hashes(name: str, show_golden: Any) -> None:
    case = CASES[name]
    data = settings(case)
    samples, batch = read_all(open_case(case, data), data)
    hashes = case["sha256_all_samples_int64le"]
    assert set(hashes) == set(FIELDS)
    for key, field in FIELDS.items():
        assert sha256(getattr(batch, field)) == hashes[key], key
    worst = 0
    with np.load(GOLDEN / f"{name}.npz") as golden:
        numbers = golden["sample_idx"]
        for key in golden.files:
            if not key.startswith("sample_") or key in {"sample_idx", "sample_index"}:
                continue
            ours = stored_field(key.removeprefix("sample_"), samples, batch, data)[numbers]
            assert ours.shape == golden[key].shape, key
            worst = max(worst, int(np.abs(ours.astype(np.int64) - golden[key]).max()))
    assert worst == 0
    show_golden(
        f"megatron/data/meta.json ({name})",
        cases=f"{len(samples)} samples",
        worst=worst,
        tolerance=0,
    )


def stored_field(
    key: str, samples: list[Sample], batch: PackedBatch, data: DataConfig
) -> np.ndarray:
    """Return what the goldens call sample_<key>, of all samples."""
    length = data.max_target_length
    bounds = [
        document_bounds(
            sample.lengths,
            sequence_length=length,
            extra_token=data.add_extra_token_to_sequence,
        )
        for sample in samples
    ]
    match key:
        case "cu_seqlens":
            pad = (np.full(length + 1 - len(row), length, np.int32) for row in bounds)
            return np.stack([np.append(a, b) for a, b in zip(bounds, pad, strict=True)])
        case "max_seqlen":
            return np.array([np.diff(row).max() for row in bounds])
        case "attention_mask":  # true where attention is forbidden
            ids = batch.segment_ids
            return ~((ids[:, :, None] == ids[:, None, :]) & np.tri(length, dtype=bool))
        case "dataset_id":
            return np.array([sample.dataset for sample in samples])
        case _:
            return getattr(batch, FIELDS[key])


@pytest.mark.parametrize("name", CASES)
def test_golden_masks_need_the_compatibility_switch_only_where_megatron_is_at_fault(
    name: str,
) -> None:
    case = CASES[name]
    data = settings(case).model_copy(update={"reproduce_cached_loss_mask": False})
    batch = read_all(open_case(case, data), data)[1]
    same = sha256(batch.loss_mask) == case["sha256_all_samples_int64le"]["loss_mask"]
    assert same == (name not in MASK_IS_A_MEGATRON_FAULT)


def test_segments_are_the_documents_of_the_index_with_inter_document_masking() -> None:
    case = CASES["a_interdoc_train"]
    data = settings(case)
    samples, batch = read_all(open_case(case, data), data)
    empty = 0
    for row, sample in enumerate(samples):
        cuts = sample.lengths[sample.lengths > 0]
        empty += len(sample.lengths) - len(cuts)
        expected = np.repeat(np.arange(1, len(cuts) + 1), cuts)[:-1]
        np.testing.assert_array_equal(batch.segment_ids[row], expected)
    assert empty > 0
