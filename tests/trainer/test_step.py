"""What a step leaves alone: non-finite and empty steps, drills, donated buffers, bf16 sums."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling_trainer.health_metrics import LOGGED, NonFinite, Signal
from ling_trainer.optimizer import make_optimizer
from ling_trainer.report import StepReport, nonfinite, to_log
from ling_trainer.step import Poison, TrainState, init_state, train_step

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture(scope="module")
def toy_step(
    product: Any, toy: SimpleNamespace, step_config: Any, maxtext: SimpleNamespace
) -> SimpleNamespace:
    modules = product("ling_trainer")
    config = step_config(
        gradient_accumulation_steps=4,
        loss={
            "load_balance_loss_weight": 0.7,
            "z_loss_multiplier": 1e-3,
            "moe_z_loss_weight": 1e-2,
        },
        optimizer={"learning_rate": 1e-2, "warmup_steps": 4},
    )
    tx = make_optimizer(config.optimizer)
    run = partial(train_step, tx=tx, config=config, **toy.build(modules, with_z=True))
    full, empty = maxtext.inputs["seg_uneven"], maxtext.inputs["seg_allpad"]
    return SimpleNamespace(
        run=run,
        jitted=jax.jit(run, compiler_options=FAST_COMPILE),
        state=init_state(toy.params, toy.bias, tx),
        batch=toy.batch(modules, full),
        empty=toy.batch(modules, empty),
    )


def _bytes(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def _same_but_step(before: TrainState, after: TrainState) -> bool:
    assert int(after.step) == int(before.step) + 1
    return all(
        _bytes(getattr(before, name)) == _bytes(getattr(after, name))
        for name in ("params", "opt_state", "router_bias")
    )


def _advance(toy_step: SimpleNamespace, steps: int) -> TrainState:
    state = toy_step.state
    for _ in range(steps):
        state, _ = toy_step.jitted(state, toy_step.batch, poison=jnp.int32(Poison.NONE))
    return state


@pytest.mark.parametrize(
    ("poison", "signal", "kind", "is_nan", "is_inf", "grad"),
    [
        (Poison.NAN_LOSS, Signal.NON_FINITE_LOSS, NonFinite.NAN, 1, 0, 0),
        (Poison.INF_LOSS, Signal.NON_FINITE_LOSS, NonFinite.INF, 0, 1, 0),
        (Poison.NAN_GRADIENT, Signal.NON_FINITE_GRADIENT, NonFinite.NAN, 0, 0, 1),
    ],
)
def test_a_nonfinite_step_changes_nothing_but_the_step_and_says_why(
    toy_step: SimpleNamespace, poison: Poison, signal: Signal, kind: NonFinite, is_nan: int,
    is_inf: int, grad: int,
) -> None:  # fmt: skip
    before = _advance(toy_step, 2)
    after, report = toy_step.jitted(before, toy_step.batch, poison=jnp.int32(poison))
    assert _same_but_step(before, after)
    host = jax.device_get(report)
    found = nonfinite(host)
    assert not host.is_finite
    assert found is not None
    assert (found.signal, found.kind) == (signal, kind)
    assert not np.isfinite(found.value)
    log = to_log(host)
    assert log["learning/is_nan"] == is_nan
    assert log["learning/is_inf"] == is_inf
    assert log["learning/grad_is_nonfinite"] == grad
    again, _ = toy_step.jitted(after, toy_step.batch, poison=jnp.int32(Poison.NONE))
    assert not _same_but_step(after, again)


def test_the_rate_follows_the_step_and_not_the_updates(toy_step: SimpleNamespace) -> None:
    state, rates = toy_step.state, []
    for poison in (Poison.NONE, Poison.NAN_LOSS, Poison.NONE):
        state, report = toy_step.jitted(state, toy_step.batch, poison=jnp.int32(poison))
        rates.append(float(report.learning_rate))
    np.testing.assert_allclose(rates, [0.0, 0.0025, 0.005], rtol=1e-6)
    assert int(state.opt_state[0].count) == 2


def test_a_step_without_tokens_changes_nothing_and_is_no_divergence(
    toy_step: SimpleNamespace,
) -> None:
    before = _advance(toy_step, 2)
    after, report = toy_step.jitted(before, toy_step.empty, poison=jnp.int32(Poison.NONE))
    assert _same_but_step(before, after)
    host = jax.device_get(report)
    assert host.is_finite
    assert nonfinite(host) is None
    assert to_log(host)["learning/total_weights"] == 0
    assert to_log(host)["learning/lm_loss"] == 0.0


def test_a_drill_that_does_not_strike_leaves_every_bit_as_it_is(toy_step: SimpleNamespace) -> None:
    plain, armed = jax.jit(toy_step.run), jax.jit(toy_step.run)
    expected = plain(toy_step.state, toy_step.batch)
    found = armed(toy_step.state, toy_step.batch, poison=jnp.int32(Poison.NONE))
    assert _bytes(found) == _bytes(expected)


def test_a_real_nan_reaches_the_report_and_not_the_state(toy_step: SimpleNamespace) -> None:
    params = dict(toy_step.state.params)
    params["W"] = params["W"].at[0, 0].set(jnp.nan)
    before = toy_step.state.replace(params=params)
    after, report = toy_step.jitted(before, toy_step.batch, poison=jnp.int32(Poison.NONE))
    assert _same_but_step(before, after)
    log = to_log(jax.device_get(report))
    assert log["learning/is_nan"] == 1
    assert log["learning/grad_is_nonfinite"] == 1


def test_the_log_has_exactly_the_contracts_keys_and_its_loss_is_the_sum_of_parts(
    toy_step: SimpleNamespace,
) -> None:
    _, report = toy_step.jitted(toy_step.state, toy_step.batch, poison=jnp.int32(Poison.NONE))
    log = to_log(jax.device_get(report))
    keys = {str(metric.log_key) for metric in LOGGED}
    of_the_loop = {key for key in keys if key.startswith("perf/")}
    not_of_the_toy = {
        f"learning/{name}"
        for name in ("indexer_loss", "router_topk_weight_mean", "router_probs_std")
    }
    depths = {"learning/mtp_1_loss", "learning/mtp_2_loss"}
    assert set(log) == keys - of_the_loop - not_of_the_toy | depths
    assert all(type(value) in {int, float} for value in log.values())
    parts = ("lm_loss", "z_loss", "moe_lb_loss", "moe_z_loss", "mtp_loss")
    values = [log[f"learning/{part}"] for part in parts]
    assert all(value > 0 for value in values)
    assert log["learning/loss"] == pytest.approx(sum(values), abs=1e-6)
    assert log["learning/moe_lb_loss"] == pytest.approx(0.7 * log["learning/load_balancing_loss"])
    assert log["learning/moe_z_loss"] == pytest.approx(0.01 * log["learning/raw_moe_z_loss"])
    assert log["learning/mtp_loss"] == pytest.approx(0.1 * log["learning/raw_mtp_loss"])
    counts = ("num_zeros", "num_grad_elements", "total_weights", "is_nan", "is_inf")
    assert all(type(log[f"learning/{name}"]) is int for name in counts)


def test_a_donated_state_gives_the_same_step(toy_step: SimpleNamespace) -> None:
    expected = toy_step.jitted(toy_step.state, toy_step.batch, poison=jnp.int32(0))
    donated = jax.jit(toy_step.run, donate_argnums=0, compiler_options=FAST_COMPILE)
    copy = jax.tree.map(jnp.copy, toy_step.state)
    found = donated(copy, toy_step.batch, poison=jnp.int32(0))
    assert _bytes(found) == _bytes(expected)
    assert copy.params["W"].is_deleted()


def test_the_state_builds_abstractly(toy_step: SimpleNamespace, toy: SimpleNamespace) -> None:
    tx = toy_step.run.keywords["tx"]
    shapes = jax.eval_shape(lambda p: init_state(p, toy.bias, tx), toy.params)
    assert shapes.params["W"].shape == (12, 24)
    state, report = jax.eval_shape(toy_step.run, toy_step.state, toy_step.batch)
    assert state.router_bias.shape == (1, 4)
    assert report.num_grad_elements == 12 * (24 * 3 + 4)


def test_parameters_and_gradients_of_a_bfloat16_model_stay_float32(
    product: Any, toy: SimpleNamespace, step_config: Any, maxtext: SimpleNamespace
) -> None:
    modules = product("ling_trainer")
    config = step_config(gradient_accumulation_steps=4)
    model: dict[str, Any] = toy.build(modules, dtype=jnp.bfloat16)
    _, grads = jax.eval_shape(
        partial(modules.step.loss_and_gradients, config=config, **model),
        toy.params, toy.bias, toy.batch(modules, maxtext.inputs["seg_uneven"]),
    )  # fmt: skip
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_every_router_bias_of_ling2_moves_and_keeps_its_mean_over_twenty_steps() -> None:
    """And every parameter array has had a gradient: nothing of the model is left out."""
    from ling_trainer.batch import Batch
    from ling_trainer.model import ling2
    from ling_trainer.settings import resolve

    config = resolve(
        {"preset": "ling2_tiny", "checkpoint": {"enable_checkpointing": False}},
        {"data": {"dataset_type": "synthetic"}, "gradient_accumulation_steps": 2},
        {"loss": {"load_balance_loss_weight": 1e-3}},
    )
    model, tx = config.model, make_optimizer(config.optimizer)
    apply = partial(
        ling2.apply, config=model, loss_groups=1, mtp_roll="segment", reset_attention_mask=False
    )
    state = init_state(
        jax.jit(partial(ling2.init_params, model, seed=config.seed))(),
        ling2.init_router_bias(model),
        tx,
    )
    step = jax.jit(
        partial(train_step, apply=apply, logits=ling2.logits, tx=tx, config=config),
        donate_argnums=0,
    )
    rng, shape = np.random.default_rng(0), (4, 256)
    reports: list[StepReport] = []
    for _ in range(20):
        tokens = rng.zipf(1.3, (4, 257)).clip(max=511).astype(np.int32)
        arrays = {
            "inputs": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "positions": np.broadcast_to(np.arange(256, dtype=np.int32), shape),
            "segment_ids": np.ones(shape, np.int32),
            "loss_mask": tokens[:, :-1] != 256,
        }
        batch = Batch(**{name: jnp.asarray(array) for name, array in arrays.items()})
        state, report = step(state, batch)
        reports.append(jax.device_get(report))
    bias = np.asarray(state.router_bias)
    assert bias.shape == (model.num_routers, model.num_experts)
    assert (np.abs(bias).max(1) > 0).all()
    assert np.abs(bias.sum(1)).max() < 1e-6
    assert reports[-1].loss < reports[0].loss - 1
    counts = np.asarray(reports[-1].terms.expert_counts)
    assert (counts.sum(1) == 4 * 256 * model.num_experts_per_tok).all()
    for path, moment in jax.tree_util.tree_flatten_with_path(state.opt_state[0].nu)[0]:
        assert np.asarray(moment).any(), jax.tree_util.keystr(path)
