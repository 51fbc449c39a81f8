"""`ling-train convert`: what it prints, what it refuses, and with which exit code."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hf_models import BF16, hf_directory, model_config, write_hf
from ling_trainer.cli import main
from ling_trainer.convert import tensor_shapes
from ling_trainer.convert_report import compare
from ling_trainer.hf_files import open_hf

DIFFERENT, CONFIGURATION, CHECKPOINT = 1, 2, 4
KIND = "dense"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return hf_directory(tmp_path / "hf", KIND, BF16)


def to_ling(source: Path, *options: str) -> int:
    return main(["convert", "hf-to-ling", str(source), str(source.parent / "out"), *options])


def change_tensors(directory: Path, change: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def change_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_report_lists_every_tensor_of_both_directions(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, back = source.parent / "out", source.parent / "back"
    assert to_ling(source, "--report") == 0
    verb = ["convert", "ling-to-hf", str(out), str(back), "--dtype", "float32"]
    assert main([*verb, "--report", "--max-shard-size", "20KB"]) == 0
    first, second = capsys.readouterr().out.split("tensor  ")[1:]
    shapes = tensor_shapes(model_config(KIND))
    for report in (first, second):
        lines = {line.split()[0]: line for line in report.splitlines() if ".weight" in line}
        assert set(lines) == set(shapes)
        for name, line in lines.items():
            assert str(list(shapes[name])) in line
            assert line.endswith("equal     0.000e+00 1.000000000")
        assert f"{len(shapes)} equal" in report
    assert len(list(back.glob("*.safetensors"))) > 1


def test_what_differs_is_measured(tmp_path: Path) -> None:
    theirs = write_hf(
        tmp_path / "hf",
        {"a": np.array([3, 4, 0], np.float32), "zero": np.zeros(2, np.float32),
         "extra": np.zeros(1, np.float32)},
        {},
    )  # fmt: skip
    ours = {"a": np.array([3, 0, 4], np.float32), "zero": np.zeros(2), "gone": np.zeros(3)}
    rows = {row.name: row for row in compare(ours.items(), open_hf(theirs).tensors)}
    assert {name: row.status for name, row in rows.items()} == {
        "a": "different", "zero": "equal", "gone": "missing", "extra": "left over",
    }  # fmt: skip
    assert (rows["a"].max_difference, rows["a"].cosine) == (4.0, pytest.approx(9 / 25))
    assert (rows["zero"].max_difference, rows["zero"].cosine) == (0.0, 1.0)
    assert rows["gone"].shape == (3,)


@pytest.mark.parametrize("report", [[], ["--report"]])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (
            lambda t: t.update({"model.layers.9.x": np.zeros(1, BF16)}),
            "model.layers.9.x belongs to no parameter",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(31, BF16)}),
            "model.norm.weight has shape [31], not [32]",
        ),
    ],
    ids=["missing", "left over", "misshapen"],
)
def test_tensors_that_do_not_fit_are_listed_and_the_exit_code_is_1(
    source: Path, change: Any, message: str, report: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    change_tensors(source, change)
    assert to_ling(source, *report) == DIFFERENT
    assert message in capsys.readouterr().out
    assert {path.name for path in source.parent.iterdir()} == {"hf"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid"},
            "BailingMoeV3ForCausalLM",
        ),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "LlamaForCausalLM"),
        ({"architectures": None, "model_type": "kimi_linear"}, "kimi_linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling="),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(
    source: Path, fields: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change_config(source, **fields)
    assert to_ling(source) == CHECKPOINT
    error = capsys.readouterr().err
    assert message in error
    assert {path.name for path in source.parent.iterdir()} == {"hf"}
    if "architectures" in fields:
        assert "BailingMoeV2_5ForCausalLM and BailingMoeV2ForCausalLM" in error


def test_a_truncated_file_is_refused_by_its_name(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert to_ling(source) == CHECKPOINT
    assert "model.safetensors: " in capsys.readouterr().err


def test_an_output_that_is_in_the_way_is_refused(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source.parent / "out").write_text("precious")
    assert to_ling(source) == CONFIGURATION
    assert "out exists and is not empty" in capsys.readouterr().err
    assert (source.parent / "out").read_text() == "precious"


@pytest.mark.parametrize("size", ["0", "5 parsecs", "-1GB", ""])
def test_a_size_that_is_none_is_refused(source: Path, size: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["convert", "ling-to-hf", str(source), "x", f"--max-shard-size={size}"])
    assert ended.value.code == CONFIGURATION


def test_a_directory_without_parameters_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "ling-to-hf", str(tmp_path), str(tmp_path / "x")]) == CHECKPOINT
    assert "no complete checkpoint is there" in capsys.readouterr().err


def test_the_offset_of_the_decay_can_be_chosen(source: Path) -> None:
    assert to_ling(source, "--lightning-slope-layer-offset", "0") == 0
    assert "lightning_slope_layer_offset: 0" in (source.parent / "out" / "model.yaml").read_text()


def test_values_that_are_not_finite_are_compared_too(tmp_path: Path) -> None:
    values = np.array([np.inf, np.nan, 1], np.float32)
    theirs = write_hf(tmp_path / "hf", {"same": values, "other": values}, {})
    ours = {"same": values, "other": np.array([np.inf, 0, 1], np.float32)}
    rows = {row.name: row for row in compare(ours.items(), open_hf(theirs).tensors)}
    assert (rows["same"].status, rows["other"].status) == ("equal", "different")
    assert np.isnan(rows["other"].max_difference)
    assert np.isnan(rows["same"].cosine)
