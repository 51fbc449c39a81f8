"""Run a forward pass into a safetensors file, if the machine has the memory for it."""

import math
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from ling_trainer.batch import Batch
from ling_trainer.convert import places
from ling_trainer.forward import (
    ForwardProgram,
    MeanLosses,
    RowOutputs,
    Targets,
    abstract_weights,
    compile_forward,
    run_forward,
    token_targets,
)
from ling_trainer.forward_inputs import make_batch, read_ids
from ling_trainer.forward_weights import Weights, to_device
from ling_trainer.model.ling2 import Params
from ling_trainer.model_config import ModelConfig
from ling_trainer.safetensors_file import TensorWriter
from ling_trainer.schema import ConfigError

type Shapes = dict[str, tuple[int, ...]]

_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_GIB = 2**30


def write_forward(
    weights: Weights, *, tokens: Path, segment_ids: Path | None, out: Path, with_gradients: bool
) -> str:
    """Compute everything, write it, and return a summary for people.

    Args:
      weights: opened.
      tokens: a .npy file [B, S].
      segment_ids: likewise, or None.
      out: written by rename, so that there is never a part of it under this name.
      with_gradients: whether to write gradients.

    Raises:
      DataError: tokens or segment_ids are not what they must be.
      ConfigError: memory or disk do not suffice, or the file cannot be written.
      ValueError, EndRun: the weights are damaged.
    """
    model = weights.model
    batch = make_batch(
        read_ids(tokens, what="tokens"),
        None if segment_ids is None else read_ids(segment_ids, what="segment ids"),
        vocab_size=model.vocab_size,
        depths=model.num_nextn_predict_layers,
        tokens_name=str(tokens),
        segments_name=str(segment_ids),
    )
    targets = token_targets(
        batch,
        depths=model.num_nextn_predict_layers,
        mtp_loss_scaling_factor=weights.mtp_loss_scaling_factor,
    )
    shapes = output_shapes(model, batch, with_gradients=with_gradients)
    check_disk(out, sum(map(math.prod, shapes.values())) * 4)
    program = _compile(weights, batch, targets, with_gradients=with_gradients)
    partial = out.with_name(out.name + ".partial")
    try:
        partial.unlink(missing_ok=True)
        announced = {name: (shape, np.dtype(np.float32)) for name, shape in shapes.items()}
        with TensorWriter(partial, announced, _metadata(weights)) as writer:
            losses = _compute(weights, program, batch, targets, writer)
        partial.replace(out)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return _summary(losses, weights, out, len(shapes))


def output_shapes(model: ModelConfig, batch: Batch, *, with_gradients: bool) -> Shapes:
    """Return the name and shape of every tensor of the file."""
    rows, length = batch.inputs.shape
    shapes: Shapes = {}
    for head in range(1 + model.num_nextn_predict_layers):
        logits, losses = _head_names(head)
        shapes[logits] = (rows, length, model.vocab_size)
        shapes[losses] = (rows, length - 1 - head)
    if with_gradients:
        for place in places(model):
            for names in place.leaf.names:
                for name, count in zip(names, place.leaf.rows, strict=True):
                    shapes[f"grads/{name}"] = place.leaf.tensor_shape(count)
    return shapes


def weights_bytes(model: ModelConfig) -> int:
    """Return what parameters and router biases take in float32."""
    return sum(math.prod(leaf.shape) * 4 for leaf in jax.tree.leaves(abstract_weights(model)))


def check_memory(needed: int, available: int) -> None:
    """Refuse what cannot fit.

    Raises:
      ConfigError: needed exceeds available; both in bytes.
    """
    if needed > available:
        raise ConfigError(
            f"this needs about {needed / _GIB:.3g} GiB of memory (weights, results and activations"
            f" in float32) and {available / _GIB:.3g} GiB are available; use a larger machine, "
            "shorter rows, or leave --grads out"
        )


def available_memory() -> int:
    """Return the bytes that a process can still take: the machine's, or its control group's."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
    except OSError:  # no Linux: nothing is known
        return sys.maxsize
    available = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return available
    return min(available, limit - used)


def check_disk(out: Path, needed: int) -> None:
    """Check that the file has a folder and fits.

    Raises:
      ConfigError: it does not.
    """
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: {out.parent} is not a folder; make it")
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file in it")
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise ConfigError(
            f"--out {out} needs {needed / _GIB:.3g} GiB and {free / _GIB:.3g} GiB are free there; "
            "choose another disk, or fewer rows"
        )


def _compile(
    weights: Weights, batch: Batch, targets: Targets, *, with_gradients: bool
) -> ForwardProgram:
    """Compile the program before any weight is read, if it can fit.

    Raises:
      ConfigError: it needs more memory than there is.
    """
    # What the weights and their gradients need is known before.
    check_memory(weights_bytes(weights.model) * (3 if with_gradients else 1), available_memory())
    program = compile_forward(
        weights.model, batch, targets, mtp_roll=weights.mtp_roll, with_gradients=with_gradients
    )
    check_memory(program.memory_bytes, available_memory())
    return program


def _compute(
    weights: Weights,
    program: ForwardProgram,
    batch: Batch,
    targets: Targets,
    writer: TensorWriter,
) -> MeanLosses:
    params, router_bias = to_device(weights.read())
    losses, gradients = run_forward(
        program,
        params,
        router_bias,
        batch,
        targets,
        mtp_loss_scaling_factor=weights.mtp_loss_scaling_factor,
        write=lambda row, outputs: _write_row(writer, row, outputs),
    )
    del params
    if gradients is not None:
        for name, gradient in _hf_tensors(gradients, weights.model):
            writer.write(f"grads/{name}", gradient)
    return losses


def _hf_tensors(
    params: Params, model: ModelConfig
) -> Iterator[tuple[str, Float[np.ndarray, "..."]]]:
    """Yield Hugging Face's tensors of a tree like the parameters, one leaf in memory at a time."""
    for place in places(model):
        node: Any = params
        for key in place.path:
            node = node[key]
        yield from place.leaf.write(np.asarray(node[place.group]))


def _write_row(writer: TensorWriter, row: int, outputs: RowOutputs) -> None:
    for head, logits in enumerate(outputs.logits):
        logits_name, losses_name = _head_names(head)
        losses = outputs.losses[head, : len(logits) - 1 - head]
        writer.write_row(logits_name, row, np.asarray(logits))
        writer.write_row(losses_name, row, np.asarray(losses))


def _head_names(head: int) -> tuple[str, str]:
    if not head:
        return "logits", "token_losses"
    return f"mtp_logits_{head}", f"mtp_token_losses_{head}"


def _metadata(weights: Weights) -> Mapping[str, str]:
    return {
        "weights": weights.where,
        "lightning_slope_layer_offset": str(weights.model.lightning_slope_layer_offset),
        "mtp_roll": weights.mtp_roll,
        "mtp_loss_scaling_factor": repr(weights.mtp_loss_scaling_factor),
        "token_losses": "[B, S-1]; mtp_token_losses_d [B, S-1-d]; 0 where there is no target",
    }


def _summary(losses: MeanLosses, weights: Weights, out: Path, tensors: int) -> str:
    lines = [
        f"{'lm_loss' if not head else f'mtp_{head}_loss'}={loss:.9g} tokens={count}"
        for head, (loss, count) in enumerate(zip(losses.by_head, losses.num_tokens, strict=True))
    ]
    lines.append(
        f"total_loss={losses.total:.9g} mtp_loss_scaling_factor="
        f"{weights.mtp_loss_scaling_factor:g} mtp_roll={weights.mtp_roll} "
        f"lightning_slope_layer_offset={weights.model.lightning_slope_layer_offset}"
    )
    return "\n".join([*lines, f"{out}: {tensors} tensors"])
