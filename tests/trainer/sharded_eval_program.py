"""Evaluate a small Ling2 on 8 devices, an uneven last batch included, and print the results."""

import functools
import hashlib
import json

import jax
import numpy as np

from ling_trainer.batch import Batch
from ling_trainer.data.loader import Loader
from ling_trainer.data.order import SampleOrder
from ling_trainer.data.packing import pack_samples
from ling_trainer.data.source import open_source
from ling_trainer.data.validation import ValidationSplit
from ling_trainer.eval_step import eval_log, eval_step
from ling_trainer.model import ling2
from ling_trainer.settings import resolve
from ling_trainer.sharding import batch_sharding
from ling_trainer.startup import build_program

NUM_SAMPLES = 21  # a batch of 16, then one of 5
CONFIG = resolve(
    {
        "preset": "ling2_tiny",
        "gradient_accumulation_steps": 2,
        "evaluation": {"eval_interval": 1, "eval_steps": 1},
        "checkpoint": {"enable_checkpointing": False},
        "mesh": {"ici_fsdp_parallelism": 2, "ici_expert_parallelism": 2},
        "model": {
            "num_hidden_layers": 2,
            "first_k_dense_replace": 0,
            "vocab_size": 64,
            "hidden_size": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "initializer_range": 0.1,
        },
        "data": {
            "dataset_type": "synthetic",
            "global_batch_size": 16,
            "max_target_length": 32,
            "eod_id": 0,
            "pad_id": 0,
            "reset_attention_mask": True,
        },
    }
)


def hashed(tree):
    return [hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for x in jax.tree.leaves(tree)]


def placed_where_it_belongs(program, arrays):
    """Place host arrays straight on their devices: never whole on one, to be spread from there."""
    assert all(type(rows) is np.ndarray for rows in arrays.values())
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        batch = program.place(arrays)
    for leaf in jax.tree.leaves(batch):
        assert leaf.sharding == batch_sharding(program.mesh), leaf.sharding
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(2, 32)}
        assert len(leaf.addressable_shards) == 8
    return batch


def main():
    program = build_program(CONFIG)
    assert len(jax.devices()) == 8
    state = program.initial_state()
    step = program.compile_eval_step()
    samples = open_source(
        CONFIG.data,
        vocab_size=CONFIG.model.vocab_size,
        order=SampleOrder((NUM_SAMPLES,)),
        split_name="valid",
    )
    split = ValidationSplit(
        samples=samples,
        num_samples=NUM_SAMPLES,
        evaluation=CONFIG.evaluation.model_copy(update={"eval_steps": -1}),
        data=CONFIG.data,
        global_batch_size=16,
        num_microbatches=2,
    )
    before, done = hashed(state), []
    batches: Loader = split.batches(1, rows=program.local_rows())
    with batches:
        for arrays in batches:
            batch = placed_where_it_belongs(program, arrays._asdict())
            result = step(state.params, state.router_bias, batch, program.flag(stop=False))
            assert all(x.is_fully_replicated for x in jax.tree.leaves(result))
            # Placing what is placed changes nothing.
            again = jax.device_put(batch, batch_sharding(program.mesh))
            same = step(state.params, state.router_bias, again, program.flag(stop=False))
            assert hashed((again, same)) == hashed((batch, result))
            done.append(jax.device_get(result[0]))
    sharded = eval_log(done, mtp_per_layer_loss_norm=True)

    # The same samples without any padding row, in one micro-batch, on one device.
    rows = pack_samples([samples.read(i) for i in range(NUM_SAMPLES)], CONFIG.data)
    config = CONFIG.model_copy(update={"gradient_accumulation_steps": 1})
    apply = functools.partial(
        ling2.apply,
        config=CONFIG.model,
        loss_groups=1,
        mtp_roll=CONFIG.loss.mtp_roll,
        reset_attention_mask=True,
    )
    whole = jax.jit(functools.partial(eval_step, apply=apply, logits=ling2.logits, config=config))(
        jax.device_get(state.params), jax.device_get(state.router_bias), Batch(**rows._asdict())
    )
    alone = eval_log([jax.device_get(whole)], mtp_per_layer_loss_norm=True)
    means = [eval_log([sums], mtp_per_layer_loss_norm=True)["eval/lm_loss"] for sums in done]
    print(
        json.dumps(
            {
                "batches": len(done),
                "sharded": sharded,
                "alone": alone,
                "mean_of_means": float(np.mean(means)),
                "state_unchanged": before == hashed(state),
            }
        )
    )


main()
