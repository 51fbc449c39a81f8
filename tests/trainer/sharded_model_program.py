"""Print, as JSON lines, how far a step on each mesh is from the step on one device.

Arguments: one JSON list of {"sizes": sizes of MeshConfig's axes, "experts": "dense" | "sorted",
"init": whether to draw the parameters on the mesh too}. The devices are virtual ones of the CPU,
as many as XLA_FLAGS says. The last line is about loss groups on a mesh, against their golden.
"""

import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ling_trainer.batch import Batch
from ling_trainer.config import LossConfig, MeshConfig, RunConfig
from ling_trainer.model import ling2, moe
from ling_trainer.model.outputs import ModelOutputs, RouterStats
from ling_trainer.optimizer import global_norm, router_bias_update
from ling_trainer.report import count_zeros
from ling_trainer.settings import resolve
from ling_trainer.sharding import batch_sharding, make_mesh, param_shardings, replicated
from ling_trainer.step import loss_and_gradients

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
GOLDEN = Path(__file__).parents[1] / "golden" / "maxtext"
ROWS, LENGTH = 32, 16
# Two scanned groups of lightning and MLA, experts in each layer, one prediction depth; each
# sharded dimension is a multiple of 8. One norm group over all heads: at the first token of a
# document a head's output is (q k) v, and a group of one or two heads whose q k is near 0 is
# divided by it, which multiplies rounding by 100 (on one device too, and in the same leaves).
MODEL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "first_k_dense_replace": 0,
    "layer_group_size": 2, "num_attention_heads": 8, "head_dim": 4, "group_norm_size": 1,
    "intermediate_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4, "v_head_dim": 4, "num_experts": 8, "num_experts_per_tok": 2,
    "n_group": 4, "topk_group": 2, "moe_intermediate_size": 16, "num_nextn_predict_layers": 1,
    "initializer_range": 0.2, "chunk_size": 8,
}  # fmt: skip
CONFIG = resolve(
    {
        "preset": "ling2_tiny",
        "checkpoint": {"enable_checkpointing": False},
        "gradient_accumulation_steps": 2,
        "model": MODEL,
        "data": {"dataset_type": "synthetic", "eod_id": 0, "pad_id": 0},
        # Per micro-batch and group: weights, shares and statistics all differ between rows.
        "loss": {
            "calculate_per_token_loss": False,
            "loss_groups": 2,
            "z_loss_multiplier": 1.0,
            "load_balance_loss_weight": 1.0,
            "moe_z_loss_weight": 1.0,
            "mtp_loss_scaling_factor": 1.0,
        },
    }
)


def make_batch() -> Batch:
    """Three documents a row, padding at the end of some, a loss mask of its own."""
    numbers = np.random.default_rng(0)
    ids = numbers.integers(0, CONFIG.model.vocab_size, (ROWS, LENGTH + 1))
    places = np.tile(np.arange(LENGTH), (ROWS, 1))
    segments = 1 + (places >= 5) + (places >= 11)
    segments[places >= numbers.integers(9, LENGTH + 1, (ROWS, 1))] = 0
    mask = (segments != 0) & (numbers.random((ROWS, LENGTH)) < numbers.random((ROWS, 1)))
    return Batch(
        inputs=jnp.asarray(ids[:, :-1]),
        targets=jnp.asarray(ids[:, 1:]),
        positions=jnp.asarray(places),
        segment_ids=jnp.asarray(segments),
        loss_mask=jnp.asarray(mask),
    )


def step(config: RunConfig, params: Any, bias: Any, batch: Batch) -> Any:
    apply = functools.partial(
        ling2.apply,
        config=config.model,
        loss_groups=config.loss.loss_groups,
        mtp_roll=config.loss.mtp_roll,
        reset_attention_mask=True,
    )
    terms, grads = loss_and_gradients(
        params, bias, batch, apply=apply, logits=ling2.logits, config=config
    )
    report = {
        "grad_norm": global_norm(grads),
        "num_zeros": count_zeros(grads).sum(),
        "router_bias": router_bias_update(
            bias, terms.expert_counts, rate=1.0, bias_update="ling_zero_mean"
        ),
    }
    return terms, report, grads


def compiled(experts: str, **places: Any) -> Any:
    # A CPU would take the dense experts for so few; an accelerator the sorted ones.
    moe._MOST_DENSE_EXPERTS = 0 if experts == "sorted" else MODEL["num_experts"]
    run = functools.partial(step, CONFIG)
    return jax.jit(run, compiler_options=FAST_COMPILE, **places)


def differences(found: Any, expected: Any) -> dict[str, float]:
    """Return by path the largest difference, over the leaf's largest value."""
    flat = jax.tree_util.tree_flatten_with_path(expected)[0]
    pairs = zip(flat, jax.tree.leaves(found), strict=True)
    return {
        jax.tree_util.keystr(path): float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-30))
        for (path, y), x in pairs
        if np.size(y)
    }


def compare(case: dict[str, Any], inputs: SimpleNamespace, expected: Any) -> dict[str, Any]:
    mesh = make_mesh(MeshConfig.model_validate(case["sizes"]), jax.devices())
    shardings = param_shardings(jax.eval_shape(inputs.init), mesh)
    params = jax.device_put(inputs.params, shardings)
    if case["init"]:
        params = jax.jit(inputs.init, out_shardings=shardings, compiler_options=FAST_COMPILE)()
    same = jax.tree.map(np.array_equal, jax.device_get(params), inputs.params)
    batch = jax.device_put(inputs.batch, batch_sharding(mesh))
    bias = jax.device_put(inputs.bias, replicated(mesh))
    with jax.set_mesh(mesh):
        run = compiled(case["experts"], out_shardings=(None, None, shardings))
        found = jax.device_get(run(params, bias, batch))
    split = len({s.spec for s in jax.tree.leaves(shardings)})
    return (
        case | {"same_init": all(jax.tree.leaves(same)), "split": split} | against(found, expected)
    )


def against(found: Any, expected: Any) -> dict[str, Any]:
    terms, report, grads = found
    return {
        "counts": np.array_equal(terms.expert_counts, expected[0].expert_counts),
        "zeros": int(report["num_zeros"]) - int(expected[1]["num_zeros"]),
        "terms": differences((terms, report), expected[:2]),
        "gradients": differences(grads, expected[2]),
    }


def perturbed(params: Any) -> Any:
    """Change every parameter by about one unit in its last place."""
    numbers = np.random.default_rng(2)
    return jax.tree.map(
        lambda x: np.float32(x * (1 + 1e-7 * numbers.standard_normal(x.shape))), params
    )


def golden_groups() -> dict[str, float]:
    """Return the error of each case of megatron_groups.npz on a mesh of all devices."""
    golden, toy = (np.load(GOLDEN / name) for name in ("megatron_groups.npz", "inputs.npz"))
    sizes = {"ici_data_parallelism": 4, "ici_tensor_parallelism": jax.device_count() // 4}
    mesh = make_mesh(MeshConfig(**sizes), jax.devices())
    errors = {}
    for case, (ranks, micro) in {"dp1_k4_strided": (1, 4), "dp2_k2": (2, 2),
                                 "dp2_k4_mbs1": (2, 4), "dp4_k1": (4, 1)}.items():  # fmt: skip
        groups = golden[f"{case}/rows"].reshape(ranks, micro, -1)
        rows = groups.transpose(0, 2, 1).reshape(-1)
        arrays = {
            "inputs": toy["inputs"], "targets": toy["targets"], "positions": toy["targets"],
            "segment_ids": toy["seg_uneven"], "loss_mask": toy["seg_uneven"] != 0,
        }  # fmt: skip
        batch = Batch(**{name: jnp.asarray(array[rows]) for name, array in arrays.items()})
        settings = {"loss_groups": ranks, "calculate_per_token_loss": False}
        config = CONFIG.model_copy(update={
            "gradient_accumulation_steps": micro, "loss": LossConfig(**settings),
        })  # fmt: skip
        none = RouterStats(jnp.zeros((ranks, 0)), jnp.zeros((ranks, 0)), jnp.zeros((0, 1), int))
        head = NamedSharding(mesh, PartitionSpec(None, "tensor"))
        with jax.set_mesh(mesh):
            run = jax.jit(functools.partial(
                loss_and_gradients,
                apply=lambda params, bias, b, none=none: ModelOutputs(
                    jnp.asarray(toy["emb"])[b.inputs], (), none
                ),
                logits=lambda params, hidden, depth: hidden @ params["head"],
                config=config,
            ))  # fmt: skip
            terms, grads = run(
                {"head": jax.device_put(toy["W"], head)}, jnp.zeros((0, 1)),
                jax.device_put(batch, batch_sharding(mesh)),
            )  # fmt: skip
        errors[f"{case}/lm_loss"] = abs(float(terms.lm - golden[f"{case}/lm_loss"]))
        wrong = np.abs(np.asarray(grads["head"]) - golden[f"{case}/grad_W"]).max()
        errors[f"{case}/grad_W"] = float(wrong)
    return errors


def main() -> None:
    init = functools.partial(ling2.init_params, CONFIG.model, seed=3)
    shape = (CONFIG.model.num_routers, CONFIG.model.num_experts)
    bias = jnp.asarray(0.05 * np.random.default_rng(1).normal(size=shape), jnp.float32)
    params = jax.device_get(jax.jit(init, compiler_options=FAST_COMPILE)())
    inputs = SimpleNamespace(init=init, params=params, bias=bias, batch=make_batch())
    alone = compiled("dense")
    expected = jax.device_get(alone(params, bias, inputs.batch))
    nearby = jax.device_get(alone(perturbed(params), bias, inputs.batch))
    print(json.dumps({"one_device": True} | against(nearby, expected)), flush=True)
    for case in json.loads(sys.argv[1]):
        print(json.dumps(compare(case, inputs, expected)), flush=True)
    print(json.dumps(golden_groups()), flush=True)


if __name__ == "__main__":
    main()
