"""A Hugging Face model directory: its config.json, and its tensors read one at a time."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from ling_trainer.safetensors_file import (
    DTYPES,
    TensorFileError,
    TensorInfo,
    read_header,
    read_tensor,
)

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_SCALE = "_scale_inv"
_FP8 = DTYPES["F8_E4M3"]
_BLOCK = (128, 128)
_PLAIN = {DTYPES[name] for name in ("F32", "F16", "BF16")}
_SCALE_TYPES = {DTYPES[name] for name in ("F32", "BF16", "F8_E8M0")}


@dataclass(frozen=True)
class HfCheckpoint:
    """A model directory.

    Attributes:
      config: the content of config.json.
      text: the same as it stands there.
      tensors: by name; see HfTensors.
    """

    config: dict[str, Any]
    text: str
    tensors: "HfTensors"


class HfTensors(Mapping[str, Shaped[np.ndarray, "..."]]):
    """Tensors by name, read from disk at each look-up, so that one is in memory at a time.

    Types are as stored (bfloat16 by ml_dtypes), but block-quantised FP8 comes as float32,
    multiplied by its scales; the scales are no tensors of their own here.
    """

    def __init__(
        self, files: Mapping[str, tuple[Path, TensorInfo]], block: tuple[int, int]
    ) -> None:
        self._files, self._block = files, block
        for name, (path, info) in files.items():
            if not self._is_scale(name):
                self._check_type(name, path, info)

    def __getitem__(self, name: str) -> Shaped[np.ndarray, "..."]:
        """Read a tensor.

        Raises:
          KeyError: there is none of this name.
          TensorFileError: the file cannot be read.
        """
        if self._is_scale(name):
            raise KeyError(name)
        value = read_tensor(*self._files[name])
        if value.dtype != _FP8:
            return value
        scales = read_tensor(*self._files[name + _SCALE])
        return dequantise(value, scales, block=self._block)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._files if not self._is_scale(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the tensor
        return name in self._files and not self._is_scale(str(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        return self._files[name][1].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the type a tensor is stored in, which is float8_e4m3fn for quantised ones."""
        return self._files[name][1].dtype

    def _is_scale(self, name: str) -> bool:
        return name.endswith(_SCALE) and name.removesuffix(_SCALE) in self._files

    def _check_type(self, name: str, path: Path, info: TensorInfo) -> None:
        if info.dtype in _PLAIN:
            return
        if info.dtype != _FP8:
            raise TensorFileError(
                f"{path}: {name} is {info.dtype}; only float32, float16, bfloat16 and "
                "block-quantised float8_e4m3fn can be read; convert it to bfloat16 first"
            )
        if name + _SCALE not in self._files:
            raise TensorFileError(f"{path}: {name} is float8 and {name}{_SCALE} is missing")
        scales = self._files[name + _SCALE][1]
        blocks = tuple(-(-n // b) for n, b in zip(info.shape, self._block, strict=True))
        if scales.shape != blocks or scales.dtype not in _SCALE_TYPES:
            raise TensorFileError(
                f"{path}: {name}{_SCALE} is {scales.dtype}{list(scales.shape)}; float32"
                f"{list(blocks)} is what {list(self._block)} blocks of {list(info.shape)} need"
            )


def open_hf(directory: str | Path) -> HfCheckpoint:
    """Open a model directory: one safetensors file, or several with an index.

    Reads config.json and the headers of all files, no tensor.

    Raises:
      TensorFileError: a file is missing, truncated or of another format, the index and the files
        disagree, or the weights are compressed in a way that cannot be read, which is named.
    """
    directory = Path(directory)
    text = _read_text(directory / "config.json")
    config = _parse(text, directory / "config.json")
    block = _fp8_block(config, directory / "config.json")
    where = _weight_map(directory)
    headers = {path: read_header(path) for path in sorted(set(where.values()))}
    missing = [f"{n} ({path.name})" for n, path in where.items() if n not in headers[path]]
    if missing:
        raise TensorFileError(
            f"{directory / _INDEX} names tensors that their files lack: {_some(missing)}"
        )
    for path, header in headers.items():
        extra = [name for name in header if where.get(name) != path]
        if extra:
            raise TensorFileError(
                f"{path} has tensors that {directory / _INDEX} does not place there: "
                f"{_some(extra)}"
            )
    files = {name: (path, headers[path][name]) for name, path in where.items()}
    return HfCheckpoint(config, text, HfTensors(files, block))


def dequantise(
    value: Shaped[np.ndarray, "rows columns"],
    scales: Shaped[np.ndarray, "row_blocks column_blocks"],
    *,
    block: tuple[int, int],
) -> Float[np.ndarray, "rows columns"]:
    """Multiply each block of a matrix by its scale, in float32; edge blocks may be incomplete.

    Source: DeepSeek-V3 (arXiv 2412.19437) section 3.3.2; the names and the block are those of
    inclusionAI/Ling-V2 tools/convert_dcp_to_safetensors.py.
    """
    result = value.astype(np.float32)
    for row, line in enumerate(scales.astype(np.float32)):
        part = result[row * block[0] : (row + 1) * block[0]]
        part *= np.repeat(line, block[1])[: value.shape[1]]
    return result


def _fp8_block(config: Mapping[str, Any], path: Path) -> tuple[int, int]:
    """Return the block size of quantised weights.

    Raises:
      TensorFileError: another compression.
    """
    quantisation = config.get("quantization_config")
    if not quantisation:
        return _BLOCK
    method, block = quantisation.get("quant_method"), quantisation.get("weight_block_size")
    if method != "fp8" or not block or quantisation.get("fmt", "e4m3") != "e4m3":
        detail = f"fmt={quantisation.get('fmt')!r}, weight_block_size={block!r}"
        raise TensorFileError(
            f"{path}: quantization_config.quant_method={method!r} ({detail}) cannot be read; only "
            "fp8 (e4m3) with weight_block_size can; convert the weights to bfloat16 first"
        )
    return int(block[0]), int(block[1])


def _weight_map(directory: Path) -> dict[str, Path]:
    index = directory / _INDEX
    if index.exists():
        where = _parse(_read_text(index), index).get("weight_map")
        if not isinstance(where, dict):
            raise TensorFileError(f"{index}: there is no weight_map in it")
        outside = [file for file in where.values() if Path(file).name != file]
        if outside:
            raise TensorFileError(f"{index}: {outside[0]!r} is not the name of a file beside it")
        return {name: directory / file for name, file in where.items()}
    single = directory / _SINGLE
    if not single.exists():
        raise TensorFileError(f"{directory}: neither {_SINGLE} nor {_INDEX} is there")
    return dict.fromkeys(read_header(single), single)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TensorFileError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise TensorFileError(f"{path}: is no text ({error})") from error


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise TensorFileError(f"{path}: is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise TensorFileError(f"{path}: holds no JSON object")
    return content


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(names[:20]) + more
