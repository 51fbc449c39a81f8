"""The state before the first step: initial values, or parameters that exist already."""

from typing import Any

import jax
import numpy as np
from jax import Array

from ling_trainer import sharding
from ling_trainer.checksum import leaf_checksums, leaf_names
from ling_trainer.parameters import ROUTER_BIAS, StoredParameters, open_parameters, unusable
from ling_trainer.run_record import architecture_of, differences
from ling_trainer.startup import Program
from ling_trainer.step import TrainState


def first_state(program: Program) -> TrainState:
    """Make the state before the first step, each shard on its own device.

    With checkpoint.load_parameters_path, parameters and router biases are read from there, every
    process its own shards; the optimizer starts anew.

    Raises:
      EndRun: they are of another architecture, or damaged (exit code 4).
    """
    path = program.config.checkpoint.load_parameters_path
    if path is None:
        return program.initial_state()
    stored = open_parameters(path)
    ours, theirs = (architecture_of(m) for m in (program.config.model, stored.model))
    if wrong := differences(ours, theirs):
        raise unusable(
            f"checkpoint.load_parameters_path={path}: {'; '.join(wrong)}; use the settings of "
            "section model that the parameters have (a conversion's are in its model.yaml)"
        )
    state = program.abstract_state
    tree = {
        "params": jax.tree_util.tree_map_with_path(
            lambda keys, leaf: _read(stored, ("params", *map(_key, keys)), leaf), state.params
        ),
        "router_bias": _read(stored, ROUTER_BIAS, state.router_bias),
    }
    _check(tree, stored, program)
    return program.state_from(tree["params"], tree["router_bias"])


def _read(
    stored: StoredParameters, path: tuple[str | int, ...], leaf: jax.ShapeDtypeStruct | Array
) -> Array:
    return jax.make_array_from_callback(
        leaf.shape,
        leaf.sharding,
        lambda index: np.asarray(stored.read(path, index or ()), leaf.dtype),
    )


def _key(key: Any) -> str | int:
    return getattr(key, "key", getattr(key, "idx", None))  # type: ignore[return-value]


def _check(tree: dict[str, Any], stored: StoredParameters, program: Program) -> None:
    sums = jax.device_get(leaf_checksums(tree, sharding.replicated(program.mesh)))
    for name, checksum in zip(leaf_names(tree), np.asarray(sums).tolist(), strict=True):
        if stored.checksums.get(name) != checksum:
            raise unusable(f"{stored.where}: leaf {name} is damaged (its checksum differs)")
