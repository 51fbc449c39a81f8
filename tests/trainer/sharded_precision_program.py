"""Print how 8 devices exchange a bfloat16 Ling2's gradients, and a head's loss in chunks.

The CPU back end turns bfloat16 reductions into float32 ones late, so what an accelerator would do
is read from the program right after it was partitioned (XLA_FLAGS dump it to argv[1]).
"""

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ling_trainer.batch import Batch
from ling_trainer.config import MeshConfig
from ling_trainer.head_loss import head_loss
from ling_trainer.model import ling2
from ling_trainer.settings import resolve
from ling_trainer.sharding import batch_sharding, make_mesh, param_shardings
from ling_trainer.step import loss_and_gradients

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# No dimension of a parameter is a multiple of LENGTH: what has one is an activation.
ROWS, LENGTH, WIDTH, VOCAB = 16, 23, 64, 56
CONFIG = resolve(
    {
        "preset": "ling2_tiny",
        "dataset_type": "synthetic",
        "checkpoint": {"enable_checkpointing": False},
        "gradient_accumulation_steps": 2,
        "model": {
            "num_hidden_layers": 2,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "dtype": "bfloat16",
        },
        "data": {"eod_id": 0, "pad_id": 0, "global_batch_size": ROWS},
        "loss": {"num_vocab_tiling": 3},
    }
)
SHAPE = r"(\w+)\[([\d,]*)\]"
COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(?:-start)?\("
)


def collectives(text):
    """Return [computation, kind, type, shape] of each array that devices exchange."""
    found, computation = [], ""
    for line in text.splitlines():
        if line and not line.startswith((" ", "}")):
            computation = line.split(" ")[0]
        match = COLLECTIVE.search(line)
        if match:
            for dtype, shape in re.findall(SHAPE, match[1]):
                dims = [int(size) for size in shape.split(",") if size]
                found.append([computation, match[2], dtype, dims])
    return found


def compile_step(mesh):
    """Compile the accumulated gradients of a whole step, without making an array."""
    apply = partial(
        ling2.apply, config=CONFIG.model, loss_groups=1, mtp_roll="segment",
        reset_attention_mask=True,
    )  # fmt: skip
    params = jax.eval_shape(lambda: ling2.init_params(CONFIG.model, seed=0))
    shardings = param_shardings(params, mesh)
    placed = jax.tree.map(
        lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s), params, shardings
    )
    ids: Any = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32, sharding=batch_sharding(mesh))
    mask: Any = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.bool_, sharding=batch_sharding(mesh))
    batch = Batch(inputs=ids, targets=ids, positions=ids, segment_ids=ids, loss_mask=mask)

    def whole_step(params, batch):
        bias = ling2.init_router_bias(CONFIG.model)
        return loss_and_gradients(
            params, bias, batch, apply=apply, logits=ling2.logits, config=CONFIG
        )

    with jax.set_mesh(mesh):
        run = jax.jit(whole_step, out_shardings=(None, shardings), compiler_options=FAST_COMPILE)
        run.lower(placed, batch).compile()


def head_in_chunks(mesh):
    """Return the exchanges of the head's loss in chunks, and its errors against one device."""
    rng = np.random.default_rng(0)
    params = {"head": jnp.asarray(rng.normal(size=(WIDTH, VOCAB)), jnp.float32)}
    rows = {
        "hidden": rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32),
        "targets": rng.integers(0, VOCAB, (ROWS, LENGTH)),
        "mask": rng.random((ROWS, LENGTH)) < 0.8,
        "weights": rng.random((ROWS, LENGTH)).astype(np.float32),
    }

    def total(params, hidden, rows, tiling):
        loss = head_loss(
            params, hidden, rows["targets"], rows["mask"], rows["weights"],
            logits=ling2.logits, depth=0, z_loss_multiplier=1e-2, num_vocab_tiling=tiling,
        )  # fmt: skip
        return loss.objective, loss

    def both(params, rows, tiling):
        return jax.grad(total, argnums=(0, 1), has_aux=True)(params, rows["hidden"], rows, tiling)

    expected = jax.jit(partial(both, tiling=1))(params, rows)
    shardings, by_row = param_shardings(params, mesh), batch_sharding(mesh)
    with jax.set_mesh(mesh):
        run = jax.jit(partial(both, tiling=4), out_shardings=((shardings, by_row), None))
        placed = jax.device_put(params, shardings), jax.device_put(rows, by_row)
        compiled = run.lower(*placed).compile()
        found = compiled(*placed)
    errors = jax.tree.map(
        lambda a, b: float(np.abs(a - b).max() / np.abs(b).max()),
        jax.device_get(found),
        jax.device_get(expected),
    )
    return collectives(compiled.as_text()), max(jax.tree.leaves(errors))


def main():
    mesh = make_mesh(MeshConfig.model_validate(json.loads(sys.argv[2])), jax.devices())
    compile_step(mesh)
    (partitioned,) = Path(sys.argv[1]).glob("*jit_whole_step*after_spmd-partitioning*.txt")
    exchanged, error = head_in_chunks(mesh)
    step = collectives(partitioned.read_text())
    print(json.dumps({"step": step, "head": exchanged, "head_error": error}))


main()
