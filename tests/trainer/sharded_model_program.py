"""Print the loss and largest gradient differences of a small Ling2 on meshes of 8 devices."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from ling_trainer.batch import Batch
from ling_trainer.config import MeshConfig
from ling_trainer.model import ling2
from ling_trainer.settings import resolve
from ling_trainer.sharding import batch_sharding, make_mesh, param_shardings

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
CONFIG = resolve(
    {
        "preset": "ling2_tiny",
        "dataset_type": "synthetic",
        "checkpoint": {"enable_checkpointing": False},
        "model": {
            "num_hidden_layers": 2,
            "first_k_dense_replace": 0,
            "num_nextn_predict_layers": 0,
            "vocab_size": 64,
            "hidden_size": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "initializer_range": 0.1,
        },
        "data": {"eod_id": 0, "pad_id": 0},
    }
).model


def objective(params, batch):
    bias = ling2.init_router_bias(CONFIG)
    out = ling2.apply(
        params,
        bias,
        batch,
        config=CONFIG,
        loss_groups=1,
        mtp_roll="segment",
        reset_attention_mask=True,
    )

    def nll(hidden):
        log_probs = jax.nn.log_softmax(ling2.logits(params, hidden, 0))
        return -jnp.take_along_axis(log_probs, batch.targets[..., None], axis=-1).mean()

    return nll(out.hidden) + out.router.aux.sum() + out.router.z.sum()


def main():
    rows, length = 8, 32
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (rows, length + 1))
    places = np.tile(np.arange(length), (rows, 1))
    batch = Batch(
        inputs=jnp.asarray(ids[:, :-1]),
        targets=jnp.asarray(ids[:, 1:]),
        positions=jnp.asarray(places),
        segment_ids=jnp.asarray(1 + places // 12),
        loss_mask=jnp.ones((rows, length), bool),
    )
    initial = jax.jit(lambda: ling2.init_params(CONFIG, seed=3))
    params = initial()
    loss, gradients = jax.jit(jax.value_and_grad(objective), compiler_options=FAST_COMPILE)(
        params, batch
    )
    for sizes in json.loads(sys.argv[1]):
        mesh = make_mesh(MeshConfig.model_validate(sizes), jax.devices())
        shardings = param_shardings(jax.eval_shape(initial), mesh)
        sharded = jax.jit(lambda: ling2.init_params(CONFIG, seed=3), out_shardings=shardings)()
        same = jax.tree.map(
            lambda a, b: bool((a == b).all()), jax.device_get(sharded), jax.device_get(params)
        )
        placed = jax.device_put(batch, batch_sharding(mesh))
        with jax.set_mesh(mesh):
            step = jax.jit(
                jax.value_and_grad(objective),
                out_shardings=(None, shardings),
                compiler_options=FAST_COMPILE,
            )
            found, found_gradients = step(sharded, placed)
        worst = jax.tree.map(
            lambda a, b: float(np.abs(a - b).max() / np.abs(b).max()),
            jax.device_get(found_gradients),
            jax.device_get(gradients),
        )
        print(
            json.dumps(
                {
                    "sizes": sizes,
                    "same_init": all(jax.tree.leaves(same)),
                    "split": len({s.spec for s in jax.tree.leaves(shardings)}),
                    "loss": abs(float(found) - float(loss)) / float(loss),
                    "gradient": max(jax.tree.leaves(worst)),
                    "leaf": max(
                        jax.tree_util.tree_leaves_with_path(worst), key=lambda p: p[1]
                    ).__repr__(),
                }
            )
        )


main()
