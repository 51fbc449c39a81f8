"""Convert whole checkpoints: a Hugging Face directory to parameters on disk, and back.

Neither way has more than one layer's leaf in memory, nor a reader ever half a result: what is
written gets its name when it is complete.
"""

import contextlib
import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import yaml
from etils import epath

from ling_trainer.convert import check_tensors, places, shapes_of, tensor_shapes
from ling_trainer.hf_config import config_from_hf, config_to_hf
from ling_trainer.hf_files import HfCheckpoint
from ling_trainer.model.hf_layout import bias_names
from ling_trainer.model_config import ModelConfig
from ling_trainer.parameter_store import Keys, ParameterWriter
from ling_trainer.parameters import (
    RECORD,
    ROUTER_BIAS,
    STATE,
    HfOrigin,
    ParameterRecord,
    StoredParameters,
)
from ling_trainer.safetensors_file import TensorWriter

SETTINGS = "model.yaml"
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_WRITABLE = {np.dtype(np.float32), np.dtype(np.float16), _BFLOAT16}
type Types = dict[str, np.dtype[Any]]


class OutputExistsError(ValueError):
    """The directory to write is there already and not empty."""


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a directory to fill, which becomes `path` if the block ends without an error.

    Raises:
      OutputExistsError: there is something at `path`; it stays as it is.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise OutputExistsError(f"{path} exists and is not empty; choose another, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    try:
        partial.chmod(0o755)
        yield partial
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def hf_to_ling(hf: HfCheckpoint, out: Path, *, overrides: Mapping[str, Any]) -> ModelConfig:
    """Write parameters and router biases that a run can start from.

    `out` gets the arrays (`state/`, in Orbax's layout), their record (`parameters.json`) and the
    settings of section `model` (`model.yaml`).

    Args:
      hf: from open_hf.
      out: directory to make.
      overrides: settings that config.json cannot hold.

    Returns: The architecture.

    Raises:
      ValueError: the architecture cannot be read, or `out` exists.
      TensorsDifferError: tensors are missing, left over or misshapen; nothing is written.
    """
    settings = config_from_hf(hf.config) | dict(overrides)
    config = ModelConfig.model_validate(settings, strict=True)
    check_tensors(shapes_of(hf.tensors), config)
    with new_directory(out) as partial:
        with _writer(partial, config) as writer:
            for place in places(config):
                for part in place.leaf.parts:
                    value = place.leaf.read_part(hf.tensors, part)
                    writer.write(("params", *place.path), (*place.group, *part), value)
            for router, name in enumerate(bias_names(config)):
                writer.write(ROUTER_BIAS, (router,), hf.tensors[name].astype(np.float32))
            checksums = writer.close()
        record = ParameterRecord(model=config, checksums=checksums, origin=_origin(hf))
        (partial / RECORD).write_text(json.dumps(record.to_json(), indent=1))
        (partial / SETTINGS).write_text(yaml.safe_dump({"model": settings}, sort_keys=False))
    return config


def _writer(directory: Path, config: ModelConfig) -> ParameterWriter:
    shapes: dict[Keys, tuple[int, ...]] = {ROUTER_BIAS: (config.num_routers, config.num_experts)}
    leading: dict[Keys, int] = {ROUTER_BIAS: 1}
    for place in places(config):
        shapes[("params", *place.path)] = place.shape
        leading[("params", *place.path)] = len(place.group) + len(place.leaf.parts[0])
    return ParameterWriter(epath.Path(directory / STATE), shapes, leading)


def ling_to_hf(
    stored: StoredParameters, out: Path, *, dtype: np.dtype[Any] | None, max_shard_bytes: int
) -> None:
    """Write a Hugging Face directory: safetensors, an index if there are several, config.json.

    Args:
      stored: from open_parameters.
      out: directory to make.
      dtype: of the tensors, but expert_bias, which is float32; None: as in the checkpoint they
        were converted from, float32 where there was none.
      max_shard_bytes: of a file's tensors; one larger tensor has a file of its own.

    Raises:
      OutputExistsError: `out` exists.
      EndRun: the parameters are damaged (exit code 4).
    """
    types = _types(stored, dtype)
    shards = _shards(types, tensor_shapes(stored.model), max_shard_bytes)
    with new_directory(out) as partial, contextlib.ExitStack() as stack:
        writers: dict[str, TensorWriter] = {}
        for file, names in shards.items():
            shapes = tensor_shapes(stored.model)
            writer = TensorWriter(partial / file, {n: (shapes[n], types[n]) for n in names})
            writers |= dict.fromkeys(names, stack.enter_context(writer))
        for name, tensor in stored.tensors():
            writers[name].write(name, tensor.astype(types[name]))
        stack.close()
        if len(shards) > 1:
            (partial / "model.safetensors.index.json").write_text(_index(shards, types, stored))
        (partial / "config.json").write_text(_config_json(stored, types))


def _origin(hf: HfCheckpoint) -> HfOrigin:
    types = {name: _widened(hf.tensors.dtype(name)).name for name in hf.tensors}
    most = Counter(types.values()).most_common(1)[0][0]
    others = {name: dtype for name, dtype in types.items() if dtype != most}
    return HfOrigin(config=hf.text, dtype=most, other_dtypes=others)


def _widened(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype in _WRITABLE else _BFLOAT16


def _types(stored: StoredParameters, dtype: np.dtype[Any] | None) -> Types:
    names, origin = tensor_shapes(stored.model), stored.origin
    single = np.dtype(np.float32)
    if dtype is None and origin is not None:
        found = {name: origin.other_dtypes.get(name, origin.dtype) for name in names}
        return {name: _dtype(kind) for name, kind in found.items()}
    return dict.fromkeys(names, dtype or single) | dict.fromkeys(bias_names(stored.model), single)


def _dtype(name: str) -> np.dtype[Any]:
    return next(dtype for dtype in _WRITABLE if dtype.name == name)


def _shards(
    types: Types, shapes: Mapping[str, tuple[int, ...]], max_bytes: int
) -> dict[str, list[str]]:
    """Spread tensors, ordered by layer, over as few files as their sizes allow."""
    files: list[list[str]] = [[]]
    room = max_bytes
    for name in sorted(types, key=_by_layer):
        size = int(np.prod(shapes[name])) * types[name].itemsize
        if size > room and files[-1]:
            files.append([])
            room = max_bytes
        files[-1].append(name)
        room -= size
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {
        f"model-{number:05}-of-{len(files):05}.safetensors": names
        for number, names in enumerate(files, start=1)
    }


def _by_layer(name: str) -> tuple[float, tuple[int | str, ...]]:
    parts = tuple(int(part) if part.isdecimal() else part for part in name.split("."))
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer:
        return float(layer[1]), (str(parts[3]), len(parts), name)
    return (-1.0 if "embeddings" in name else float("inf")), (name,)


def _index(shards: Mapping[str, list[str]], types: Types, stored: StoredParameters) -> str:
    shapes = tensor_shapes(stored.model)
    total = sum(int(np.prod(shapes[n])) * types[n].itemsize for n in types)
    where = {name: file for file, names in shards.items() for name in names}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"


def _config_json(stored: StoredParameters, types: Types) -> str:
    """Return config.json: the one that was converted, with what is no longer true put right."""
    most = Counter(types.values()).most_common(1)[0][0].name
    if stored.origin is None:
        return json.dumps({**config_to_hf(stored.model), "torch_dtype": most}, indent=2) + "\n"
    config = json.loads(stored.origin.config)
    changed = dict(config)
    changed.pop("quantization_config", None)
    for key in ("torch_dtype", "dtype"):
        if changed.get(key) not in {None, most}:
            changed[key] = most
    offset = stored.model.lightning_slope_layer_offset
    if config_from_hf(config).get("lightning_slope_layer_offset", offset) != offset:
        changed["lightning_slope_layer_offset"] = offset
    return stored.origin.config if changed == config else json.dumps(changed, indent=2) + "\n"
