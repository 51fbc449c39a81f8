"""How arrays are laid out over devices: logical dimensions of parameters to axes of the mesh."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import Array
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ling_trainer.config import MeshConfig
from ling_trainer.schema import ConfigError

AXES = ("data", "fsdp", "expert", "tensor")
# A row of the batch is whole on one device of these axes; tensor splits the work on a row.
_ROWS = ("data", "fsdp", "expert")

# Weights that are no expert's are spread over the expert axis too: it is an fsdp axis for them.
_LOGICAL: dict[str | None, tuple[str, ...]] = {
    "width": ("fsdp", "expert"),
    "expert_width": ("fsdp",),
    "experts": ("expert",),
    "heads": ("tensor",),
    "inner": ("tensor",),
    "vocab": ("tensor",),
    None: (),
}
type _Dims = tuple[str | None, ...]
_PARAMETERS: dict[str, _Dims] = {
    "embedding": ("vocab", "width"),
    "head": ("width", "vocab"),
    "scale": (None,),
    "qkvg": ("width", None, "heads", None),
    "qkv": ("width", "heads", None),
    "q": ("width", "heads", None),
    "q_a": ("width", None),
    "q_b": ("width", "heads", None),
    "kv_a": ("width", None),
    "kv_b": ("width", "heads", None),
    "out": ("heads", None, "width"),
    "gate_up": ("width", "inner"),
    "down": ("inner", "width"),
    "router": ("width", None),
    "eh_proj": ("width", None),
    "router_bias": (None, None),
}
_EXPERTS: dict[str, _Dims] = {
    "gate_up": ("experts", "expert_width", "inner"),
    "down": ("experts", "inner", "expert_width"),
}


def make_mesh(config: MeshConfig, devices: Sequence[Any]) -> Mesh:
    """Lay devices out as a mesh with axes data, fsdp, expert and tensor.

    Of several slices the data axis is the outer one: between slices, whose network is slow, only
    gradients are summed.

    Args:
      config: sizes of the axes; ici_data_parallelism=-1 takes what the others leave.
      devices: all devices of all processes.

    Raises:
      ConfigError: the product of the sizes is not the number of devices, or the slices cannot
        share the data axis.
    """
    others = {
        "ici_fsdp_parallelism": config.ici_fsdp_parallelism,
        "ici_expert_parallelism": config.ici_expert_parallelism,
        "ici_tensor_parallelism": config.ici_tensor_parallelism,
    }
    rest, data = math.prod(others.values()), config.ici_data_parallelism
    if data == -1:
        data = len(devices) // rest
    if data * rest != len(devices):
        sizes = {"ici_data_parallelism": config.ici_data_parallelism} | others
        product = " x ".join(f"mesh.{name}={size}" for name, size in sizes.items())
        msg = (
            f"{product} does not fit {len(devices)} devices; the product must be their number "
            "(ici_data_parallelism=-1 takes what the others leave)"
        )
        raise ConfigError(msg)
    shape, kinds = (data, *others.values()), (AxisType.Auto,) * len(AXES)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return jax.make_mesh(shape, AXES, kinds, devices=devices)
    return Mesh(_over_slices(shape, devices, slices), AXES, axis_types=kinds)


def _over_slices(shape: tuple[int, ...], devices: Sequence[Any], slices: int) -> Any:
    """Lay out the devices of several slices, which jax.make_mesh refuses."""
    data, *others = shape
    if data % slices:
        msg = (
            f"mesh.ici_data_parallelism={data} is not a multiple of the {slices} slices, and only "
            "the data axis may reach from one to another; lower the other axes' product to what "
            "divides a slice"
        )
        raise ConfigError(msg)
    # As jax.make_mesh does for these, whose slices are flat.
    flat = devices[0].device_kind in {"TPU v5 lite", "TPU v5e"}
    return mesh_utils.create_hybrid_device_mesh(
        (data // slices, *others),
        (slices, *(1 for _ in others)),
        devices,
        allow_split_physical_axes=flat,
    )


def param_shardings(abstract_params: Any, mesh: Mesh) -> Any:
    """Return a sharding for each leaf of a tree of parameters.

    The leaf's name decides, so optimizer states that hold trees like the parameters, and a whole
    train state, work too. A dimension that its mesh axes do not divide stays whole. Leading
    dimensions of stacked groups are never split.

    Args:
      abstract_params: arrays or their shapes.
      mesh: from make_mesh.

    Raises:
      ValueError: a matrix has a name that no rule knows.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, _spec(path, leaf.shape, mesh)), abstract_params
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of [B, ...]: rows over all axes but tensor."""
    return NamedSharding(mesh, PartitionSpec(_ROWS))


def on_hosts(shardings: Any) -> Any:
    """Return the same shardings in pinned memory of the hosts that the devices belong to."""
    return jax.tree.map(lambda place: place.with_memory_kind("pinned_host"), shardings)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def constrain_rows(x: Array) -> Array:
    """Keep activations [B, ...] sharded by rows; without a mesh in context, do nothing.

    Otherwise XLA may follow a weight's sharding and move activations instead of weights.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(_ROWS) <= set(mesh.axis_names):
        return x
    if x.shape[0] % math.prod(mesh.shape[axis] for axis in _ROWS):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(_ROWS))


def row_blocks(rows: int) -> int:
    """Return how many blocks of rows are on devices of their own; 1 without a mesh in context."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(AXES) <= set(mesh.axis_names):
        return 1
    blocks = math.prod(mesh.shape[axis] for axis in _ROWS)
    return 1 if rows % blocks else blocks


def constrain_blocks(x: Array, *, kept: int) -> Array:
    """Keep [row_blocks, ...] one block a device, and the last dimension of size `kept` on tensor.

    For what each block of rows sums on its own. Without a mesh in context, do nothing.
    """
    if row_blocks(x.shape[0]) == 1:
        return x
    spec = PartitionSpec(_ROWS, *_on_tensor(x.shape[1:], kept))
    return jax.lax.with_sharding_constraint(x, spec)


def gather_for_rows(x: Array, *, kept: int) -> Array:
    """Give every block of rows the whole weight, but its last dimension of size `kept` on tensor.

    Outside of a loop that uses the weight in each turn, so that it is gathered once.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(AXES) <= set(mesh.axis_names):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*_on_tensor(x.shape, kept)))


def _on_tensor(shape: tuple[int, ...], kept: int) -> tuple[str | None, ...]:
    last = max((i for i, size in enumerate(shape) if size == kept), default=-1)
    tensor = jax.sharding.get_abstract_mesh().shape["tensor"]
    divides = kept % tensor == 0
    return tuple("tensor" if i == last and divides else None for i in range(len(shape)))


def _spec(path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    names = [str(key.key if hasattr(key, "key") else getattr(key, "name", "")) for key in path]
    dims = (_EXPERTS if "experts" in names else _PARAMETERS).get(names[-1] if names else "")
    if dims is None:
        if len(shape) > 1:
            msg = (
                f"{jax.tree_util.keystr(path)} has shape {list(shape)} and no sharding rule; "
                "add its name to sharding.py"
            )
            raise ValueError(msg)
        return PartitionSpec()
    leading = (None,) * (len(shape) - len(dims))
    parts = [_axes(dim, size, mesh) for dim, size in zip(dims, shape[len(leading) :], strict=True)]
    return PartitionSpec(*leading, *parts)


def _axes(dim: str | None, size: int, mesh: Mesh) -> tuple[str, ...] | None:
    """Return the longest run of a dimension's mesh axes that divides it."""
    axes = _LOGICAL[dim]
    for count in range(len(axes), 0, -1):
        if size % math.prod(mesh.shape[axis] for axis in axes[:count]) == 0:
            return axes[:count]
    return None
