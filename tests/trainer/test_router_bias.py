"""Router biases, counts and statistics over whole steps of a small ling2 with two depths."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling_trainer.batch import Batch
from ling_trainer.model import ling2
from ling_trainer.optimizer import make_optimizer
from ling_trainer.report import to_log
from ling_trainer.settings import resolve
from ling_trainer.step import TrainState, init_state, train_step

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
SMALL = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "head_dim": 8, "intermediate_size": 16, "first_k_dense_replace": 0, "layer_group_size": 2,
    "group_norm_size": 2, "q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
    "n_group": 4, "topk_group": 2, "moe_intermediate_size": 8, "num_nextn_predict_layers": 2,
    "initializer_range": 0.2, "chunk_size": 8,
}  # fmt: skip
ROWS, LENGTH = 4, 16


@pytest.fixture(scope="module")
def trained() -> SimpleNamespace:
    """A compiled step at rate 0 with weight decay, and batches with padding."""
    config = resolve(
        {"preset": "ling2_tiny", "checkpoint": {"enable_checkpointing": False}},
        {"model": SMALL, "gradient_accumulation_steps": 2},
        {"data": {"dataset_type": "synthetic", "max_target_length": LENGTH}},
        {"data": {"eod_id": 63, "pad_id": 63}},
        {"optimizer": {"routed_bias_update_rate": 0.0, "adam_weight_decay": 0.1}},
        {"loss": {"load_balance_loss_weight": 0.1, "moe_z_loss_weight": 0.1}},
    )
    model, tx = config.model, make_optimizer(config.optimizer)
    apply = partial(
        ling2.apply, config=model, loss_groups=1, mtp_roll="segment", reset_attention_mask=True
    )
    step = jax.jit(
        partial(train_step, apply=apply, logits=ling2.logits, tx=tx, config=config),
        compiler_options=FAST_COMPILE,
    )
    numbers = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: ling2.init_params(model, seed=0))
    params = jax.tree.map(lambda x: numbers.normal(0.2, 0.2, x.shape).astype(np.float32), shapes)
    bias = jnp.asarray(numbers.normal(0, 0.1, (model.num_routers, model.num_experts)), jnp.float32)

    def batches() -> Iterator[Batch]:
        while True:
            tokens = numbers.integers(0, 63, (ROWS, LENGTH + 1)).astype(np.int32)
            segments = np.ones((ROWS, LENGTH), np.int32)
            segments[1, 9:] = 0
            segments[3, 5:] = 2
            yield Batch(
                inputs=jnp.asarray(tokens[:, :-1]),
                targets=jnp.asarray(tokens[:, 1:]),
                positions=jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH)),
                segment_ids=jnp.asarray(segments),
                loss_mask=jnp.asarray(segments != 0),
            )

    return SimpleNamespace(
        config=config, step=step, batches=batches(), bias=bias, state=init_state(params, bias, tx)
    )


def test_weight_decay_and_a_hundred_steps_at_rate_0_leave_the_bias_bitwise(
    trained: SimpleNamespace,
) -> None:
    state: TrainState = trained.state
    for _ in range(100):
        state, _ = trained.step(state, next(trained.batches))
    assert int(state.step) == 100
    assert np.asarray(state.router_bias).tobytes() == np.asarray(trained.bias).tobytes()
    before, after = jax.tree.leaves(trained.state.params), jax.tree.leaves(state.params)
    assert all((np.asarray(a) != b).any() for a, b in zip(after, before, strict=True))


def test_a_bias_changes_neither_zeros_nor_norms_for_it_is_no_leaf(
    trained: SimpleNamespace,
) -> None:
    batch, found = next(trained.batches), []
    # The same for every expert of a router, so no choice changes.
    for bias in (jnp.zeros_like(trained.bias), jnp.full_like(trained.bias, 0.5)):
        _, report = trained.step(trained.state.replace(router_bias=bias), batch)
        found.append(to_log(jax.device_get(report)))
    without, with_bias = found
    size = sum(x.size for x in jax.tree.leaves(trained.state.params))
    assert with_bias["learning/num_grad_elements"] == size
    for name in ("num_zeros", "num_grad_elements", "raw_grad_norm", "grad_norm", "param_norm"):
        assert with_bias[f"learning/{name}"] == without[f"learning/{name}"], name
    assert without["learning/router_bias_mean"] == without["learning/router_bias_std"] == 0
    assert with_bias["learning/router_bias_mean"] == 0.5


def test_counts_are_integers_over_valid_tokens_of_every_micro_batch_and_prediction_depth(
    trained: SimpleNamespace,
) -> None:
    batch = next(trained.batches)
    _, report = trained.step(trained.state, batch)
    counts = np.asarray(report.terms.expert_counts)
    assert counts.dtype == np.int32
    assert counts.shape == (4, 8)  # two layers, then two prediction depths
    valid = int((np.asarray(batch.segment_ids) != 0).sum())
    np.testing.assert_array_equal(counts.sum(1), [2 * valid] * 4)


def test_the_log_has_the_routers_statistics_and_each_depths_loss(
    trained: SimpleNamespace,
) -> None:
    _, report = trained.step(trained.state, next(trained.batches))
    log = to_log(jax.device_get(report))
    bias = np.asarray(trained.bias, float)
    assert log["learning/router_bias_mean"] == pytest.approx(bias.mean(), rel=1e-5)
    assert log["learning/router_bias_std"] == pytest.approx(bias.std(1).mean(), rel=1e-5)
    assert 1 / 8 < log["learning/router_topk_weight_mean"] < 1
    assert 0 < log["learning/router_probs_std"] < 1 / 8
    depths = [log[f"learning/mtp_{depth}_loss"] for depth in (1, 2)]
    assert depths[0] != depths[1]
    assert log["learning/raw_mtp_loss"] == pytest.approx(np.mean(depths), rel=1e-6)
    assert "learning/mtp_3_loss" not in log
