"""Weights for a forward pass: of a Hugging Face directory, of a run, or of a conversion."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from jaxtyping import Float

from ling_trainer.checkpoint import read_record
from ling_trainer.config import LossConfig
from ling_trainer.convert import hf_to_params, nest, places
from ling_trainer.hf_config import config_from_hf
from ling_trainer.hf_files import open_hf
from ling_trainer.model.ling2 import Params
from ling_trainer.model.mtp import Roll
from ling_trainer.model_config import ModelConfig
from ling_trainer.parameter_store import leaf_name, slice_checksum
from ling_trainer.parameters import (
    RECORD,
    ROUTER_BIAS,
    StoredParameters,
    open_parameters,
    unusable,
)

_HF_MTP_FACTOR = 0.1
"""Where config.json names none; the default of Megatron too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights that are on disk, and how their home computes with them.

    Attributes:
      where: for messages.
      model: the architecture.
      mtp_roll: which tokens prediction depths read past the end of a document.
      mtp_loss_scaling_factor: of multi-token prediction in the loss.
      read: reads parameters and router biases, float32.
    """

    where: str
    model: ModelConfig
    mtp_roll: Roll
    mtp_loss_scaling_factor: float
    read: Callable[[], tuple[Params, Float[np.ndarray, "L E"]]]


def open_hf_weights(directory: Path) -> Weights:
    """Open a Hugging Face directory; reads no tensor.

    Raises:
      ValueError: it cannot be read, or is of an architecture that this is not.
    """
    checkpoint = open_hf(directory)
    settings = config_from_hf(checkpoint.config)
    model = ModelConfig.model_validate(settings, strict=True)
    factor = checkpoint.config.get("mtp_loss_scaling_factor", _HF_MTP_FACTOR)
    return Weights(
        where=str(directory),
        model=model,
        mtp_roll="plain",
        mtp_loss_scaling_factor=float(factor),
        read=lambda: hf_to_params(checkpoint.tensors, model),
    )


def open_checkpoint_weights(directory: str, *, step: int | None) -> Weights:
    """Open a run's checkpoint, or what `ling-train convert hf-to-ling` made.

    Args:
      directory: of the run, its checkpoints, or one of them.
      step: of the checkpoint; None takes the newest.

    Raises:
      EndRun: there is none, or it is damaged (exit code 4); the storage failed (42).
    """
    stored = open_parameters(directory, step=step)
    loss = LossConfig()
    where = epath.Path(stored.where)
    if not (where / RECORD).exists():
        settings = read_record(where.parent, int(where.name)).settings or {}
        loss = LossConfig.model_validate(settings.get("loss", {}))
    return Weights(
        where=stored.where,
        model=stored.model,
        mtp_roll=loss.mtp_roll,
        mtp_loss_scaling_factor=loss.mtp_loss_scaling_factor,
        read=lambda: _read_stored(stored),
    )


def to_device(tree: Any) -> Any:
    """Move arrays to the device one by one, so that no two copies of all of them exist."""
    leaves, structure = jax.tree.flatten(tree)
    del tree
    for index, leaf in enumerate(leaves):
        leaves[index] = jax.device_put(leaf)
    return jax.tree.unflatten(structure, leaves)


def _read_stored(stored: StoredParameters) -> tuple[Params, Float[np.ndarray, "L E"]]:
    """Read all arrays, and check that they are undamaged.

    Raises:
      EndRun: one is damaged or missing (exit code 4).
    """
    paths = dict.fromkeys(place.path for place in places(stored.model))
    params = nest({path: _checked(stored, ("params", *path)) for path in paths})
    return params, _checked(stored, ROUTER_BIAS)


def _checked(stored: StoredParameters, path: tuple[str | int, ...]) -> np.ndarray:
    value, name = stored.read(path), leaf_name(path)
    if stored.checksums.get(name) != slice_checksum(value, start=0):
        raise unusable(f"{stored.where}: leaf {name} is damaged (its checksum differs)")
    return value
