"""The optimizer's state in the hosts' memory: the same numbers from another place."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from ling_trainer.batch import Batch
from ling_trainer.checkpoint import Checkpoints
from ling_trainer.config import CheckpointConfig, MeshConfig, RunConfig
from ling_trainer.data.order import SampleOrder
from ling_trainer.health_metrics import LOGGED
from ling_trainer.optimizer import make_optimizer
from ling_trainer.report import to_log
from ling_trainer.run_record import RunRecord
from ling_trainer.settings import resolve
from ling_trainer.sharding import make_mesh, on_hosts, replicated
from ling_trainer.startup import build_program
from ling_trainer.step import apply_gradients, init_state, loss_and_gradients

STEPS = 5
ZEROS = {"learning/num_zeros", "learning/num_grad_elements"}


def kinds(tree: Any) -> set[str | None]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def kinds_by_field(state: Any) -> dict[str, set[str | None]]:
    return {name: kinds(getattr(state, name)) for name in state.__dataclass_fields__}


OFFLOADED = {name: {"device"} for name in ("step", "params", "router_bias")} | {
    "opt_state": {"pinned_host"}
}
"""What kinds_by_field says of an offloaded state."""


def _always(value: Any, _: Any) -> Any:
    return value


def random_like(tree: Any, *, seed: int) -> Any:
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), jnp.float32), tree)


@pytest.fixture(scope="module")
def runs(
    product: Any, toy: SimpleNamespace, step_config: Callable[..., RunConfig]
) -> dict[bool, SimpleNamespace]:
    """The same updates of a toy model, offloaded and not; the fourth gradient is not finite."""
    model, tokens = toy.build(product()), jnp.zeros((2, 5), jnp.int32)
    batch = Batch(
        inputs=tokens, targets=tokens, positions=tokens, segment_ids=tokens, loss_mask=tokens == 0
    )
    done: dict[bool, SimpleNamespace] = {}
    for offload in (True, False):
        config = step_config(optimizer={"optimizer_memory_host_offload": offload})
        tx = make_optimizer(config.optimizer)
        gradients = functools.partial(loss_and_gradients, config=config, **model)
        terms, grads = jax.tree.map(
            lambda leaf: jnp.ones(leaf.shape, leaf.dtype),
            jax.eval_shape(gradients, toy.params, toy.bias, batch),
        )
        state = init_state(toy.params, toy.bias, tx)
        everywhere = replicated(make_mesh(MeshConfig(), jax.devices()))
        places = jax.tree.map(functools.partial(_always, everywhere), state)
        if offload:
            places = replace(places, opt_state=on_hosts(places.opt_state))
        update = jax.jit(
            functools.partial(apply_gradients, tx=tx, config=config),
            out_shardings=(places, None),
            donate_argnums=0,
        )
        state, logs = jax.device_put(jax.tree.map(jnp.copy, state), places), []
        for number in range(STEPS):
            grads = random_like(grads, seed=number)
            if number == 3:
                grads["W"] *= jnp.nan
            state, report = update(state, terms, grads, total_weights=jnp.int32(10))
            logs.append(to_log(jax.device_get(report)))
        done[offload] = SimpleNamespace(state=state, logs=logs, places=places)
    return done


def test_the_whole_optimizer_state_is_in_host_memory_after_a_step(
    runs: dict[bool, SimpleNamespace],
) -> None:
    state = runs[True].state
    assert kinds_by_field(state) == OFFLOADED
    moments = 2 * len(jax.tree.leaves(state.params))
    assert len(jax.tree.leaves(state.opt_state)) == moments + 1  # and the number of updates
    assert kinds(runs[False].state) == {"device"}


def test_offloaded_updates_are_those_of_the_device_to_the_bit(
    runs: dict[bool, SimpleNamespace], toy: SimpleNamespace
) -> None:
    ours, theirs = runs[True].state, runs[False].state
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert int(ours.opt_state[0].count) == STEPS - 1  # the step that was not finite is skipped
    for name, before in toy.params.items():
        assert (np.asarray(ours.params[name]) != before).any(), name


def test_an_offloaded_run_reports_all_but_the_zeros_of_its_gradients(
    runs: dict[bool, SimpleNamespace],
) -> None:
    for ours, theirs in zip(runs[True].logs, runs[False].logs, strict=True):
        assert theirs.keys() - ours.keys() == ZEROS
        np.testing.assert_equal(ours, {k: v for k, v in theirs.items() if k not in ZEROS})
    # What is optional has no series where it has no value (see the exporter's tests).
    assert {metric.log_key for metric in LOGGED if metric.optional} >= ZEROS


@pytest.mark.parametrize("offload", [True, False])
def test_a_checkpoint_is_restored_into_the_memory_that_the_new_attempt_asks_for(
    runs: dict[bool, SimpleNamespace], tmp_path: Path, offload: bool
) -> None:
    directory = epath.Path(tmp_path / "checkpoints")
    record = RunRecord(attempt=1, sample_order=SampleOrder((6,)), identity={})
    saved = runs[True].state
    checkpoints = Checkpoints(directory, CheckpointConfig())
    checkpoints.save(STEPS, saved, record)
    checkpoints.wait()
    like = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        saved,
        runs[offload].places,
    )
    restored = Checkpoints(directory, CheckpointConfig()).restore(STEPS, like)
    assert kinds_by_field(restored)["opt_state"] == {"pinned_host" if offload else "device"}
    assert kinds(restored.params) == {"device"}
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def tiny(**optimizer: Any) -> RunConfig:
    model = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8,
        "intermediate_size": 16, "first_k_dense_replace": 1, "layer_group_size": 2,
        "group_norm_size": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 2, "moe_intermediate_size": 8,
        "num_nextn_predict_layers": 0,
    }  # fmt: skip
    return resolve(
        {"preset": "ling2_tiny", "enable_checkpointing": False, "model": model},
        {"dataset_type": "synthetic", "max_target_length": 16, "global_batch_size": 2},
        {"optimizer": optimizer},
    )


def test_only_the_optimizer_state_of_a_program_is_planned_in_host_memory() -> None:
    program = build_program(tiny(optimizer_memory_host_offload=True))
    assert kinds_by_field(program.abstract_state) == OFFLOADED
    assert kinds(build_program(tiny()).abstract_state) == {"device"}


@pytest.mark.slow
def test_a_real_step_leaves_the_optimizer_state_in_host_memory() -> None:
    program = build_program(tiny(optimizer_memory_host_offload=True))
    ones = np.ones((2, 16), np.int32)
    names = ("inputs", "targets", "positions", "segment_ids")
    batch = program.place(dict.fromkeys(names, ones) | {"loss_mask": ones.astype(np.bool_)})
    state = program.initial_state()
    assert kinds_by_field(state) == OFFLOADED
    result = program.compile(with_poison=False)(state, batch, program.flag(stop=False))
    assert kinds_by_field(result.state) == OFFLOADED
    assert int(result.state.opt_state[0].count) == 1
    assert not to_log(jax.device_get(result.report)).keys() & ZEROS
