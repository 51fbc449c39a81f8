"""Whole checkpoints through the conversion: what goes in comes out, bit by bit."""

import errno
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from safetensors.numpy import load_file

from hf_models import (
    BF16,
    CONFIGS,
    hf_directory,
    model_config,
    random_tensors,
    write_hf,
)
from ling_trainer.checkpoint import Checkpoints
from ling_trainer.config import CheckpointConfig
from ling_trainer.convert import hf_to_params
from ling_trainer.convert_files import OutputExistsError, hf_to_ling, ling_to_hf
from ling_trainer.data.order import SampleOrder
from ling_trainer.ends import EndRun, ExitCode
from ling_trainer.hf_config import config_from_hf, config_to_hf
from ling_trainer.hf_files import dequantise, open_hf
from ling_trainer.model_config import ModelConfig
from ling_trainer.optimizer import make_optimizer
from ling_trainer.optimizer_config import OptimizerConfig
from ling_trainer.parameter_store import ParameterWriter
from ling_trainer.parameters import open_parameters
from ling_trainer.run_record import RunRecord, architecture_of
from ling_trainer.run_settings import load_config
from ling_trainer.startup import build_program
from ling_trainer.step import init_state
from ling_trainer.warm_start import first_state

GOLDEN = Path(__file__).parents[1] / "golden" / "ling"
GB = 10**9


def to_ling(hf: Path, out: Path, **overrides: Any) -> Path:
    hf_to_ling(open_hf(hf), out, overrides=overrides)
    return out


def to_hf(ling: Path, out: Path, *, dtype: Any = None, max_shard_bytes: int = GB) -> Path:
    ling_to_hf(open_parameters(str(ling)), out, dtype=dtype, max_shard_bytes=max_shard_bytes)
    return out


def contents(directory: Path) -> dict[str, tuple[Any, ...]]:
    """Read every tensor with the safetensors library: type, shape, bytes."""
    files = sorted(directory.glob("*.safetensors"))
    tensors = {name: t for file in files for name, t in load_file(file).items()}
    return {name: (t.dtype, t.shape, t.tobytes()) for name, t in tensors.items()}


@pytest.mark.parametrize("folder", ["ling_v2_5_tiny", "ling_v2_tiny"])
def test_a_golden_checkpoint_comes_back_bit_by_bit(tmp_path: Path, folder: str) -> None:
    source = tmp_path / "hf"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / folder / name, source)
    back = to_hf(to_ling(source, tmp_path / "ling"), tmp_path / "back")
    assert contents(back) == contents(source)
    assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_architecture_and_type_comes_back_bit_by_bit(
    tmp_path: Path, kind: str, dtype: Any
) -> None:
    source = hf_directory(tmp_path / "hf", kind, dtype, shards=3)
    back = to_hf(to_ling(source, tmp_path / "ling"), tmp_path / "back", max_shard_bytes=40_000)
    assert contents(back) == contents(source)
    assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()
    index = json.loads((back / "model.safetensors.index.json").read_text())
    files = list(back.glob("*.safetensors"))
    assert len(files) > 1
    assert all(file.stat().st_size < 60_000 for file in files)
    assert set(index["weight_map"]) == set(contents(source))
    assert index["metadata"]["total_size"] == sum(len(c[2]) for c in contents(source).values())
    for file in files:
        held = {name for name, where in index["weight_map"].items() if where == file.name}
        assert set(load_file(file)) == held


@pytest.mark.parametrize("kind", ["gqa", "hybrid"])
def test_orbax_restores_the_arrays_that_were_written(tmp_path: Path, kind: str) -> None:
    source = hf_directory(tmp_path / "hf", kind)
    params, bias = hf_to_params(open_hf(source).tensors, model_config(kind))
    filled = {name: part for name, part in params.items() if len(part)}  # no empty lists
    expected = {"params": filled, "router_bias": bias}
    out = to_ling(source, tmp_path / "ling")
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(out / "state", jax.tree.map(jnp.zeros_like, expected))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("kind", CONFIGS)
def test_config_json_survives_the_way_there_and_back(kind: str) -> None:
    config = model_config(kind)
    back = ModelConfig.model_validate(config_from_hf(config_to_hf(config)), strict=True)
    assert architecture_of(back) == architecture_of(config)


def test_a_run_starts_from_converted_parameters(tmp_path: Path) -> None:
    source = hf_directory(tmp_path / "hf", "hybrid", BF16)
    out = to_ling(source, tmp_path / "ling")
    program = build_program(load_config([str(out / "model.yaml"), *run_settings(out)], {}))
    state = first_state(program)
    params, bias = hf_to_params(open_hf(source).tensors, program.config.model)
    assert int(state.step) == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    np.testing.assert_array_equal(state.router_bias, bias)
    assert np.abs(bias).max() > 0
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), program.abstract_state)


def test_parameters_of_another_architecture_start_no_run(tmp_path: Path) -> None:
    source = hf_directory(tmp_path / "hf", "hybrid")
    out = to_ling(source, tmp_path / "ling", lightning_slope_layer_offset=0)
    settings = [str(out / "model.yaml"), "lightning_slope_layer_offset=1", *run_settings(out)]
    program = build_program(load_config(settings, {}))
    with pytest.raises(EndRun, match="lightning_slope_layer_offset is 0 in the checkpoint and 1"):
        first_state(program)


def run_settings(parameters: Path) -> list[str]:
    """Return what a run needs besides an architecture."""
    return [
        "steps=2", "dataset_type=synthetic", "max_target_length=16", "global_batch_size=2",
        "eod_id=0", "pad_id=0", "learning_rate=1e-3", "enable_checkpointing=false",
        f"load_parameters_path={parameters}",
    ]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> epath.Path:
    """A run's directory with the checkpoint of step 3, saved by the trainer's own code."""
    config = model_config("odd")
    params, bias = hf_to_params(random_tensors(config, np.float32), config)
    params, bias = jax.tree.map(jnp.asarray, (params, bias))
    state = init_state(params, bias, make_optimizer(OptimizerConfig(learning_rate=1e-3)))
    directory = epath.Path(tmp_path / "run")
    checkpoints = Checkpoints(directory / "checkpoints", CheckpointConfig())
    record = RunRecord(attempt=0, sample_order=SampleOrder((8,)), identity=architecture_of(config))
    checkpoints.save(3, state, record)
    checkpoints.wait()
    return directory


@pytest.mark.parametrize("place", [".", "checkpoints", "checkpoints/3"])
def test_a_runs_checkpoint_becomes_a_hugging_face_directory(
    run: epath.Path, tmp_path: Path, place: str
) -> None:
    back = to_hf(Path(run / place), tmp_path / "back")
    expected = random_tensors(model_config("odd"), np.float32)
    assert contents(back) == {n: (t.dtype, t.shape, t.tobytes()) for n, t in expected.items()}
    hf_config = json.loads((back / "config.json").read_text())
    assert hf_config["torch_dtype"] == "float32"
    assert hf_config["lightning_slope_layer_offset"] == 1


def test_bfloat16_rounds_every_tensor_but_the_routers_biases(
    run: epath.Path, tmp_path: Path
) -> None:
    back = to_hf(Path(run), tmp_path / "back", dtype=BF16)
    for name, tensor in random_tensors(model_config("odd"), np.float32).items():
        kind = np.dtype(np.float32) if name.endswith("expert_bias") else BF16
        assert contents(back)[name] == (kind, tensor.shape, tensor.astype(kind).tobytes())
    assert json.loads((back / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_damaged_array_is_named_and_nothing_is_written(run: epath.Path, tmp_path: Path) -> None:
    record = run / "checkpoints" / "3" / "run" / "metadata"
    content = json.loads(record.read_text())
    content["checksums"]["params.tail.1.mlp.experts.down"] ^= 1
    record.write_text(json.dumps(content))
    with pytest.raises(EndRun, match=r"tail\.1\.mlp\.experts\.down is damaged") as error:
        to_hf(Path(run), tmp_path / "back")
    assert error.value.ending.code == ExitCode.CHECKPOINT
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_step_that_is_not_there_is_named_with_those_that_are(run: epath.Path) -> None:
    with pytest.raises(EndRun, match=r"no checkpoint of step 4 \(its steps are \[3\]\)"):
        open_parameters(run, step=4)


def test_block_quantised_weights_become_what_their_scales_say(tmp_path: Path) -> None:
    config = model_config("hybrid")
    tensors = random_tensors(config, BF16)
    names = [name for name in tensors if ".experts." in name or name.endswith("dense.weight")]
    expected = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    for i, name in enumerate(names):
        quantised = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        scales = np.full((1, 1), 0.5 + i % 3, np.float32)
        tensors |= {name: quantised, name + "_scale_inv": scales}
        expected[name] = dequantise(quantised, scales, block=(128, 128))
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    hf_config = config_to_hf(config) | {"quantization_config": method, "torch_dtype": "bfloat16"}
    out = to_ling(write_hf(tmp_path / "hf", tensors, hf_config), tmp_path / "ling")
    found = dict(open_parameters(str(out)).tensors())
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor)
    back = to_hf(out, tmp_path / "back")
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    assert {kind for kind, _, _ in contents(back).values()} == {BF16, np.dtype(np.float32)}


def test_the_decays_offset_is_kept_in_config_json_where_it_is_not_hugging_faces(
    tmp_path: Path,
) -> None:
    out = to_ling(GOLDEN / "ling_v2_5_tiny", tmp_path / "ling", lightning_slope_layer_offset=0)
    back = json.loads((to_hf(out, tmp_path / "back") / "config.json").read_text())
    source = json.loads((GOLDEN / "ling_v2_5_tiny" / "config.json").read_text())
    assert back == source | {"lightning_slope_layer_offset": 0}


def test_what_is_in_the_way_stays_as_it_is(tmp_path: Path) -> None:
    source, out = hf_directory(tmp_path / "hf", "dense"), tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    with pytest.raises(OutputExistsError, match="exists and is not empty"):
        to_ling(source, out)
    assert [path.name for path in out.iterdir()] == ["precious"]
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "out"}
    (out / "precious").unlink()
    to_ling(source, out)


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hf_directory(tmp_path / "hf", "dense")

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ParameterWriter, "close", fail)
    with pytest.raises(OSError, match="No space left"):
        to_ling(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_memory_is_that_of_a_layers_leaf_and_not_of_the_model(tmp_path: Path) -> None:
    wide = {"num_hidden_layers": 12, "hidden_size": 256, "moe_intermediate_size": 192}
    config = ModelConfig.model_validate(CONFIGS["hybrid"] | wide)
    tensors = random_tensors(config, np.float32)
    whole = sum(tensor.nbytes for tensor in tensors.values())
    source = write_hf(tmp_path / "hf", tensors, config_to_hf(config))
    del tensors
    tracemalloc.start()
    out = to_ling(source, tmp_path / "ling")
    there = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    to_hf(out, tmp_path / "back", max_shard_bytes=whole // 5)
    back = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert whole > 20e6
    assert max(there, back) < whole / 4
