"""What does counting the gradient's zeros cost a step of ling2_tiny?

Runs the product's step as it is and with the count replaced by a constant, alternating, and
reports CPU seconds a step (all threads), the figure that other work on the machine moves least.

    python benchmarks/num_zeros_cost.py > benchmarks/results/DATE-num-zeros-cost.json
"""

import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from provenance import provenance

from ling_trainer import step as step_module
from ling_trainer.batch import Batch
from ling_trainer.model import ling2
from ling_trainer.optimizer import make_optimizer
from ling_trainer.settings import resolve

ROUNDS, STEPS = 10, 5
CONFIG = resolve({"preset": "ling2_tiny", "base_output_directory": "-", "dataset_path": "-"})


def make_batch() -> Batch:
    """One global batch of random bytes."""
    shape = (CONFIG.data.global_batch_size or 0, CONFIG.data.max_target_length)
    ids = np.random.default_rng(0).integers(0, 256, (shape[0], shape[1] + 1))
    return Batch(
        inputs=jnp.asarray(ids[:, :-1], jnp.int32),
        targets=jnp.asarray(ids[:, 1:], jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape),
        segment_ids=jnp.ones(shape, jnp.int32),
        loss_mask=jnp.ones(shape, bool),
    )


def compile_step(state: Any, batch: Batch) -> Callable[[Any, Batch], Any]:
    """Compile one step; whatever step_module.count_zeros is now is in it."""
    apply = functools.partial(
        ling2.apply,
        config=CONFIG.model,
        loss_groups=1,
        mtp_roll="segment",
        reset_attention_mask=False,
    )
    run = functools.partial(
        step_module.train_step,
        apply=apply,
        logits=ling2.logits,
        tx=make_optimizer(CONFIG.optimizer),
        config=CONFIG,
    )
    return jax.jit(run).lower(state, batch).compile()


def cpu_seconds(compiled: Callable[[Any, Batch], Any], state: Any, batch: Batch) -> float:
    """CPU seconds of one step, averaged over STEPS."""
    report: Any = None
    began = time.process_time()
    for _ in range(STEPS):
        state, report = compiled(state, batch)
    jax.block_until_ready((state, report))
    return (time.process_time() - began) / STEPS


def main() -> None:
    """Measure and print JSON."""
    tx = make_optimizer(CONFIG.optimizer)
    quick = {"xla_backend_optimization_level": 0}
    params = jax.jit(lambda: ling2.init_params(CONFIG.model, seed=0)).lower().compile(quick)()
    state = step_module.init_state(params, ling2.init_router_bias(CONFIG.model), tx)
    batch = make_batch()
    counted = compile_step(state, batch)
    with mock.patch.object(
        step_module,
        "count_zeros",
        lambda grads: [jnp.zeros(1, jnp.int32) for _ in jax.tree.leaves(grads)],
    ):
        uncounted = compile_step(state, batch)
    sides: dict[str, list[float]] = {"counted": [], "uncounted": []}
    for _ in range(2):  # warm-up
        cpu_seconds(counted, state, batch)
        cpu_seconds(uncounted, state, batch)
    for _ in range(ROUNDS):
        sides["counted"].append(cpu_seconds(counted, state, batch))
        sides["uncounted"].append(cpu_seconds(uncounted, state, batch))
    medians = {side: statistics.median(times) for side, times in sides.items()}
    print(
        json.dumps(
            {
                "question": "CPU seconds a step of ling2_tiny, with and without num_zeros",
                **provenance("jax", "flax", "optax"),
                "rounds": ROUNDS,
                "median_seconds": medians,
                "spread_seconds": {s: max(t) - min(t) for s, t in sides.items()},
                "cost_percent": 100 * (medians["counted"] / medians["uncounted"] - 1),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
