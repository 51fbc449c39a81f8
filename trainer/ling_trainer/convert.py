"""Hugging Face's tensors of BailingMoeV2 and V2_5, to and from this model's parameters.

L routers, E experts.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from ling_trainer.hf_config import config_from_hf as config_from_hf  # callers need both
from ling_trainer.hf_files import HfTensors
from ling_trainer.model.hf_layout import (
    Leaf,
    Tensors,
    bias_names,
    block_leaves,
    depth_leaves,
    model_leaves,
)
from ling_trainer.model.ling2 import Params, layer_layout
from ling_trainer.model_config import ModelConfig

_LISTS = ("prefix", "groups", "tail", "mtp")


@dataclass(frozen=True, slots=True)
class Place:
    """A leaf of one layer, and where it lies in the tree of parameters.

    Attributes:
      leaf: the layer's parameter, and the tensors it is made of.
      path: of the array in the tree.
      group: place in the array's leading dimension; none where layers are not stacked.
      groups: size of that dimension.
    """

    leaf: Leaf
    path: tuple[str | int, ...]
    group: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return *self.groups, *self.leaf.shape


class TensorsDifferError(ValueError):
    """Tensors are missing, left over or of another shape.

    Attributes:
      problems: a line for each.
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        shown = "; ".join(problems[:20])
        more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        super().__init__(f"tensors do not fit the configuration: {shown}{more}")


def places(config: ModelConfig) -> Iterator[Place]:
    """List every parameter of every layer, those of one array one after the other."""
    layout, count = layer_layout(config), config.num_hidden_layers
    end = layout.prefix + layout.groups * layout.group_size
    for leaf in model_leaves(config):
        yield Place(leaf, leaf.path)
    for i in range(layout.prefix):
        yield from (Place(leaf, ("prefix", i, *leaf.path)) for leaf in block_leaves(config, i))
    for i in range(layout.group_size if layout.groups else 0):
        layers = range(layout.prefix + i, end, layout.group_size)
        for stacked in zip(*(block_leaves(config, layer) for layer in layers), strict=True):
            for group, leaf in enumerate(stacked):
                yield Place(leaf, ("groups", i, *leaf.path), (group,), (layout.groups,))
    for i in range(layout.tail):
        leaves = block_leaves(config, end + i)
        yield from (Place(leaf, ("tail", i, *leaf.path)) for leaf in leaves)
    for depth in range(config.num_nextn_predict_layers):
        path = ("mtp", depth)
        yield from (Place(x, (*path, *x.path)) for x in depth_leaves(config, depth))
        leaves = block_leaves(config, count + depth)
        yield from (Place(leaf, (*path, "block", *leaf.path)) for leaf in leaves)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return every tensor of a checkpoint, routers' biases included, and its shape."""
    shapes = {
        name: place.leaf.tensor_shape(rows)
        for place in places(config)
        for names in place.leaf.names
        for name, rows in zip(names, place.leaf.rows, strict=True)
    }
    return shapes | dict.fromkeys(bias_names(config), (config.num_experts,))


def hf_to_params(tensors: Tensors, config: ModelConfig) -> tuple[Params, Float[np.ndarray, "L E"]]:
    """Return parameters and router biases, float32, from Hugging Face's tensors.

    Args:
      tensors: every tensor of the checkpoint by name, no more and no less.
      config: of the same architecture; see config_from_hf.

    Raises:
      TensorsDifferError: tensors are missing, left over or of another shape; a ValueError.
    """
    check_tensors(shapes_of(tensors), config)
    arrays: dict[tuple[str | int, ...], np.ndarray] = {}
    for place in places(config):
        if place.path not in arrays:
            arrays[place.path] = np.empty(place.shape, np.float32)
        arrays[place.path][place.group] = place.leaf.read(tensors)
    biases = [np.asarray(tensors[name], np.float32) for name in bias_names(config)]
    return nest(arrays), np.asarray(biases, np.float32).reshape(-1, config.num_experts)


def params_to_hf(
    params: Params, config: ModelConfig, router_bias: Float[Any, "L E"] | None = None
) -> dict[str, Float[np.ndarray, "..."]]:
    """Return Hugging Face's tensors, float32; the inverse of hf_to_params.

    Args:
      params: parameters, or any tree like them, such as their gradients.
      config: of the same architecture.
      router_bias: written too, if given; a gradient has none.
    """
    tensors: dict[str, np.ndarray] = {}
    for place in places(config):
        node: Any = params
        for key in place.path:
            node = node[key]
        tensors |= place.leaf.write(np.asarray(node[place.group]))
    if router_bias is not None:
        tensors |= zip(bias_names(config), np.asarray(router_bias, np.float32), strict=True)
    return tensors


def shapes_of(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors, without reading them where they are on disk."""
    if isinstance(tensors, HfTensors):
        return {name: tensors.shape(name) for name in tensors}
    return {name: tensor.shape for name, tensor in tensors.items()}


def check_tensors(found: Mapping[str, tuple[int, ...]], config: ModelConfig) -> None:
    """Check that tensors are those of an architecture.

    Raises:
      TensorsDifferError: they are not.
    """
    expected = tensor_shapes(config)
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} belongs to no parameter" for name in found if name not in expected]
    problems += [
        f"{name} has shape {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        raise TensorsDifferError(problems)


def nest(arrays: Mapping[tuple[str | int, ...], Any]) -> Params:
    """Build a tree of parameters from values by path; every list is there, also an empty one."""
    tree: Params = {name: {} for name in _LISTS}
    for path, value in arrays.items():
        node: Any = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree | {name: _in_order(tree[name]) for name in _LISTS}


def _in_order(by_number: Mapping[Any, Any]) -> list[Any]:
    numbers: Iterable[int] = range(len(by_number))
    return [by_number[i] for i in numbers]
