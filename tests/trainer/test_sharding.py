"""Meshes and shardings. Steps on meshes of 8 devices are in test_equivalences_sharded.py."""

from dataclasses import dataclass

import jax
import pytest

from ling_trainer.config import MeshConfig
from ling_trainer.model import ling2
from ling_trainer.model_config import ModelConfig
from ling_trainer.presets import ling2_tiny
from ling_trainer.schema import ConfigError
from ling_trainer.sharding import batch_sharding, make_mesh, param_shardings, replicated


@pytest.mark.parametrize(
    "sizes",
    [
        {"ici_data_parallelism": 3},
        {"ici_fsdp_parallelism": 2},
        {"ici_data_parallelism": 1, "ici_expert_parallelism": 2},
    ],
)
def test_a_mesh_of_another_size_than_the_devices_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"mesh\.ici_data_parallelism=.* does not fit 1 devices"):
        make_mesh(MeshConfig.model_validate(sizes), jax.devices()[:1])


def test_data_takes_the_devices_that_the_others_leave() -> None:
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}
    assert replicated(mesh).spec == jax.P()
    assert batch_sharding(mesh).spec == jax.P(("data", "fsdp", "expert"))


@dataclass(frozen=True)
class _Chip:
    """As much of a device of a slice as a mesh looks at."""

    id: int
    slice_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"
    process_index: int = 0


def test_only_the_data_axis_reaches_from_slice_to_slice() -> None:
    chips = [_Chip(id=number, slice_index=number % 4) for number in range(64)]
    mesh = make_mesh(MeshConfig(ici_fsdp_parallelism=2, ici_expert_parallelism=4), chips)
    assert dict(mesh.shape) == {"data": 8, "fsdp": 2, "expert": 4, "tensor": 1}
    of_rows = [{chip.slice_index for chip in row.flat} for row in mesh.devices]
    assert of_rows == [{0}, {0}, {1}, {1}, {2}, {2}, {3}, {3}]
    assert {chip.id for chip in mesh.devices.flat} == set(range(64))


def test_axes_that_would_span_slices_are_refused() -> None:
    chips = [_Chip(id=number, slice_index=number // 4) for number in range(16)]
    with pytest.raises(ConfigError, match=r"ici_data_parallelism=2 is not a multiple of the 4"):
        make_mesh(MeshConfig(ici_expert_parallelism=8), chips)


def test_stacked_groups_are_never_split_over_their_layers() -> None:
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    config = ModelConfig.model_validate(ling2_tiny()["model"])
    shapes = jax.eval_shape(lambda: ling2.init_params(config, seed=0))
    shardings = param_shardings(shapes, mesh)
    experts = shardings["groups"][0]["mlp"]["experts"]
    assert experts["gate_up"].spec == jax.P(None, ("expert",), ("fsdp",), ("tensor",))
    assert shardings["mtp"][0]["eh_proj"].spec == jax.P(("fsdp", "expert"), None)
    assert all(s.spec[0] is None for s in jax.tree.leaves(shardings["groups"]))


def test_a_matrix_without_a_rule_is_an_error() -> None:
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    unknown = {"surprise": jax.ShapeDtypeStruct((2, 2), "float32")}
    with pytest.raises(ValueError, match="surprise"):
        param_shardings(unknown, mesh)
