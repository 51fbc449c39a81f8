"""Model directories in Hugging Face's format, against the safetensors library's own files."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ling_trainer.hf_files import open_hf
from ling_trainer.safetensors_file import TensorFileError, TensorWriter

BF16 = ml_dtypes.bfloat16
random = np.random.default_rng(0)
TENSORS = {
    "a.weight": random.normal(size=(5, 3)).astype(np.float32),
    "b.weight": random.normal(size=(7,)).astype(BF16),
    "c.weight": random.normal(size=(2, 2)).astype(np.float16),
}


def bits(x: Any) -> tuple[Any, ...]:
    x = np.asarray(x)
    return x.dtype, x.shape, x.tobytes()


def directory(path: Path, tensors: dict[str, Any], *, shards: int = 1, **config: Any) -> Path:
    """Write a model directory with the safetensors library."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    where = {n: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, n in
             enumerate(tensors)}  # fmt: skip
    for file in set(where.values()):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, path / file)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_are_read_bit_by_bit_from_one_file_and_from_shards(
    tmp_path: Path, shards: int
) -> None:
    hf = open_hf(directory(tmp_path / "hf", TENSORS, shards=shards, model_type="x"))
    assert hf.config == {"model_type": "x"}
    assert set(hf.tensors) == set(TENSORS)
    assert len(hf.tensors) == len(TENSORS)
    for name, tensor in TENSORS.items():
        assert bits(hf.tensors[name]) == bits(tensor)
        assert (hf.tensors.shape(name), hf.tensors.dtype(name)) == (tensor.shape, tensor.dtype)
    assert "a" not in hf.tensors


def test_what_is_written_in_any_order_is_what_the_library_reads(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with TensorWriter(path, {n: (t.shape, t.dtype) for n, t in TENSORS.items()}) as writer:
        for name in reversed(TENSORS):
            writer.write(name, TENSORS[name])
    read = load_file(path)
    assert {n: bits(t) for n, t in read.items()} == {n: bits(t) for n, t in TENSORS.items()}


def test_a_tensor_that_was_never_written_is_an_error(tmp_path: Path) -> None:
    announced = {"a": ((2,), np.dtype(np.float32)), "b": ((2,), np.dtype(np.float32))}
    with (
        pytest.raises(ValueError, match="1 tensors were never written"),
        TensorWriter(tmp_path / "x", announced) as writer,
    ):
        writer.write("a", np.zeros(2, np.float32))


def test_a_tensor_of_another_shape_than_announced_is_an_error(tmp_path: Path) -> None:
    writer = TensorWriter(tmp_path / "x", {"a": ((2,), np.dtype(np.float32))})
    with pytest.raises(ValueError, match=r"a is float32\[3\]; float32\[2\] was announced"), writer:
        writer.write("a", np.zeros(3, np.float32))


@pytest.mark.parametrize("scale_type", [np.float32, ml_dtypes.float8_e8m0fnu])
def test_block_quantised_weights_are_multiplied_by_the_scale_of_their_block(
    tmp_path: Path, scale_type: Any
) -> None:
    rows, columns = 200, 130  # both end inside a block
    weight = random.normal(size=(rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    scales = (2.0 ** np.arange(-2, 2).reshape(2, 2)).astype(scale_type)
    stored = {"x.weight": weight, "x.weight_scale_inv": scales, "y.weight": np.ones(3, BF16)}
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    hf = open_hf(directory(tmp_path / "hf", stored, quantization_config=quantised))
    assert set(hf.tensors) == {"x.weight", "y.weight"}
    assert "x.weight_scale_inv" not in hf.tensors
    read = hf.tensors["x.weight"]
    assert read.dtype == np.float32
    for r, c in [(0, 0), (127, 127), (127, 128), (128, 127), (199, 129)]:
        scale = np.float32(scales[r // 128, c // 128])
        assert read[r, c] == np.float32(weight[r, c]) * scale


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"x": np.zeros((2, 2), ml_dtypes.float8_e4m3fn)}, "x_scale_inv is missing"),
        (
            {
                "x": np.zeros((200, 2), ml_dtypes.float8_e4m3fn),
                "x_scale_inv": np.ones((1, 1), np.float32),
            },
            r"x_scale_inv is float32\[1, 1\]; float32\[2, 1\]",
        ),
        ({"x.qweight": np.zeros((2, 2), np.int32)}, r"x\.qweight is int32; only float32"),
    ],
)
def test_weights_that_cannot_be_read_are_named(
    tmp_path: Path, stored: dict[str, Any], message: str
) -> None:
    with pytest.raises(TensorFileError, match=message):
        open_hf(directory(tmp_path / "hf", stored))


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq", "awq", "bitsandbytes"])
def test_other_compressions_are_refused_by_name(tmp_path: Path, method: str) -> None:
    path = directory(tmp_path / "hf", TENSORS, quantization_config={"quant_method": method})
    with pytest.raises(TensorFileError, match=f"quant_method='{method}'"):
        open_hf(path)


def test_a_truncated_file_is_named_before_any_tensor_is_read(tmp_path: Path) -> None:
    path = directory(tmp_path / "hf", TENSORS) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TensorFileError, match=r"model\.safetensors: .* is truncated"):
        open_hf(path.parent)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x08" + b"\0" * 7 + b"not JSON"])
def test_a_file_of_another_format_is_named(tmp_path: Path, content: bytes) -> None:
    path = directory(tmp_path / "hf", TENSORS) / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(TensorFileError, match=r"model\.safetensors"):
        open_hf(path.parent)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda where: where.update({"d.weight": where["a.weight"]}), "lack: d.weight"),
        (lambda where: where.pop("b.weight"), "does not place there: b.weight"),
        (lambda where: where.update({"a.weight": "../x.safetensors"}), "is not the name of"),
        (lambda where: where.update({"d.weight": "gone.safetensors"}), "gone.safetensors"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(
    tmp_path: Path, spoil: Any, message: str
) -> None:
    path = directory(tmp_path / "hf", TENSORS, shards=2)
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["b.weight"] = content["weight_map"]["a.weight"]
    save_file({n: TENSORS[n] for n in ("a.weight", "b.weight", "c.weight")},
              path / content["weight_map"]["a.weight"])  # fmt: skip
    content["weight_map"]["c.weight"] = content["weight_map"]["a.weight"]
    spoil(content["weight_map"])
    index.write_text(json.dumps(content))
    with pytest.raises(TensorFileError, match=message):
        open_hf(path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TensorFileError, match=r"neither model\.safetensors nor"):
        open_hf(tmp_path)
