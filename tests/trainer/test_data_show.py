"""`ling-train data show` prints what a run would read."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ling_trainer.cli import main
from ling_trainer.data.indexed import IndexedDataset

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron" / "data"
CASES = json.loads((GOLDEN / "meta.json").read_text())["cases"]
A = [
    f"dataset_path={GOLDEN / 'ds_a'}",
    "split=969,30,1",
    "data_shuffle_seed=1234",
    "max_target_length=32",
    "eod_id=3",
    "pad_id=3",
    "vocab_size=1000",
]


def show(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["data", "show", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_golden_samples_of_a_blend_are_shown_with_megatrons_hashes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, show_golden: Any
) -> None:
    case = CASES["blend_weighted_train"]
    blend = f"dataset_path={GOLDEN / 'ds_a'},0.7;{GOLDEN / 'ds_c'},0.3"
    file = tmp_path / "all.npz"
    lines = show(
        capsys, *A, blend, "split=95,5,0", "eod_mask_loss=false",
        "--num-samples", "300", "--samples", ":", "--npz", str(file),
    )  # fmt: skip
    assert [line["sample"] for line in lines] == list(range(case["len"]))
    with np.load(file) as saved, np.load(GOLDEN / "blend_weighted_train.npz") as golden:
        assert saved["dataset"].tolist() == golden["dataset_index"].tolist()
        assert [line["dataset"] for line in lines] == golden["dataset_index"].tolist()
        for name, digest in case["sha256_all_samples_int64le"].items():
            assert saved[name].dtype == np.dtype("<i8")
            assert hashlib.sha256(saved[name].tobytes()).hexdigest() == digest
            for row, line in zip(saved[name], lines, strict=True):
                assert hashlib.sha256(row.tobytes()).hexdigest() == line["sha256"][name]
        for i, line in enumerate(lines):
            count = len(line["documents"])
            assert saved["documents"][i, :count].tolist() == line["documents"]
            assert saved["offsets"][i, :count].tolist() == line["offsets"]
            assert (saved["documents"][i, count:] == -1).all()
    show_golden("megatron/data/meta.json (data show)", cases="300 samples", worst=0, tolerance=0)


def test_the_documents_and_offsets_say_where_the_tokens_lie(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "some.npz"
    lines = show(capsys, *A, "--num-samples", "700", "--samples", "5:25", "--npz", str(file))
    assert [line["sample"] for line in lines] == list(range(5, 25))
    indexed = IndexedDataset.open(GOLDEN / "ds_a")
    with np.load(file) as saved:
        for row, line in zip(saved["tokens"], lines, strict=True):
            places = zip(line["documents"], line["offsets"], strict=True)
            read = [indexed.read(document, offset=offset) for document, offset in places]
            assert np.concatenate(read)[:32].tolist() == row.tolist()


def test_a_run_shows_the_samples_it_needs_and_an_epoch_each_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(show(capsys, *A, "steps=50", "global_batch_size=2", "--samples", "99:")) > 0
    assert main(["data", "show", *A, "--num-samples", "epoch", "--samples", "235"]) == 2
    assert "is not within the 235 samples" in capsys.readouterr().err
    assert len(show(capsys, *A, "--num-samples", "epoch", "--samples", "234")) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--samples", "3:2"], 2, "'3:2' is not within"),
        (["--samples", "x"], 2, "'x' is no range; write A:B"),
        (["--samples", "-1:2"], 2, "'-1:2' is not within"),
        (["--num-samples", "0"], 2, "must be a positive number or `epoch`"),
        (["data_shuffle_seeed=3"], 2, "data_shuffle_seeed"),
        (["dataset_path=/nowhere/x"], 3, "/nowhere/x.idx: cannot be read"),
        (["vocab_size=900", "--samples", ":"], 3, "set model.vocab_size to the tokenizer's"),
        (["dataset_type=synthetic"], 3, "dataset_type=synthetic has no dataset"),
    ],
)
def test_what_cannot_be_shown_is_said_with_its_exit_code(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*A, "--num-samples", "700", *arguments]
    # argparse takes "-1:2" for an option unless it is joined to its own.
    if "-1:2" in given:
        given = [*A, "--num-samples", "700", "--samples=-1:2"]
    assert main(["data", "show", *given]) == code
    assert says in capsys.readouterr().err


def test_a_run_whose_batch_depends_on_devices_needs_a_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["data", "show", *A]) == 2
    assert "say --num-samples" in capsys.readouterr().err
