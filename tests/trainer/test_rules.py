"""One rule of the numerics a test, through modules that a mutant's can replace.

Most rules have tests of their own elsewhere, against goldens. These are small, take `package`, and
are what test_mutants.py turns red.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling_trainer.batch import Batch
from ling_trainer.config import LossConfig
from ling_trainer.model.layers import Tokens
from ling_trainer.model.outputs import ModelOutputs, RouterStats
from ling_trainer.model_config import ModelConfig
from ling_trainer.optimizer_config import OptimizerConfig
from ling_trainer.presets import ling2_tiny

SEGMENTS = np.array([[1, 1, 1, 2, 2, 0]])


def _config(**change: Any) -> ModelConfig:
    return ModelConfig.model_validate(ling2_tiny()["model"] | change)


def test_row_i_belongs_to_micro_batch_i_mod_k(package: str, product: Any) -> None:
    split = product(package).batch.split_microbatches(jnp.arange(8), num_microbatches=2)
    np.testing.assert_array_equal(split, [[0, 2, 4, 6], [1, 3, 5, 7]])


def test_sums_over_micro_batches_are_float32(package: str, product: Any) -> None:
    _, total = product(package).accumulate.accumulate(
        lambda params, x, carry: (jnp.int32(1), params * x, carry),
        jnp.ones((), jnp.bfloat16),
        jnp.ones(512, jnp.bfloat16),
        num_microbatches=512,
    )
    assert float(total) == 512.0


def test_the_clip_factor_has_megatrons_epsilon(package: str, product: Any) -> None:
    factor = product(package).optimizer.clip_factor(jnp.float32(1e-3), threshold=1e-3)
    assert float(factor) == pytest.approx(1e-3 / (1e-3 + 1e-6), rel=1e-6)


def test_the_rate_of_the_first_step_is_zero_and_the_peak_comes_after_the_warm_up(
    package: str, product: Any
) -> None:
    rate = product(package).schedule.learning_rate
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4)
    found = [float(rate(config, jnp.int32(step))) for step in range(6)]
    assert found == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "middle"),
    [
        ({"lr_decay_style": "cosine", "warmup_steps": 2}, 0.1 + 0.9 * (1 + 2**-0.5) / 2),
        ({"lr_decay_style": "linear"}, 0.1 + 0.9 * 0.6),
        ({"lr_decay_style": "WSD", "wsd_decay_steps": 8, "lr_wsd_decay_style": "minus_sqrt"},
         0.1 + 0.9 * 0.5),
    ],
)  # fmt: skip
def test_a_schedule_passes_through_its_formula_and_ends_at_min_lr(
    package: str, settings: dict[str, Any], middle: float, product: Any
) -> None:
    rate = product(package).schedule.learning_rate
    fixed = {"learning_rate": 1.0, "min_lr": 0.1, "learning_rate_schedule_steps": 10}
    config = OptimizerConfig(**fixed, **settings)
    assert float(rate(config, jnp.int32(4))) == pytest.approx(middle, abs=1e-6)
    assert float(rate(config, jnp.int32(99))) == pytest.approx(0.1, abs=1e-7)


def test_norms_and_biases_escape_decay_whatever_their_shape(package: str, product: Any) -> None:
    tree = {"norm": {"weight": jnp.ones((2, 3))}, "head": jnp.ones(3), "bias": jnp.ones((2, 3))}
    mask = product(package).optimizer.decay_mask(tree)
    assert mask == {"norm": {"weight": False}, "head": True, "bias": False}


def test_weight_decay_is_decoupled_and_times_the_rate(package: str, product: Any) -> None:
    config = OptimizerConfig(learning_rate=1.0, adam_weight_decay=0.1)
    tx = product(package).optimizer.make_optimizer(config)
    params = {"head": jnp.full(3, 2.0)}
    zeros = {"head": jnp.zeros(3)}
    updates, _ = tx.update(zeros, tx.init(params), params, learning_rate=jnp.float32(0.5))
    np.testing.assert_allclose(updates["head"], -0.5 * 0.1 * 2.0, rtol=1e-6)


@pytest.mark.parametrize("rule", ["megatron", "ling_zero_mean"])
def test_a_routers_bias_moves_against_its_load(package: str, rule: str, product: Any) -> None:
    counts = jnp.asarray([[1, 2, 3, 14]], jnp.int32)  # mean 5
    bias = jnp.asarray([[0.1, 0.2, 0.3, 0.4]])
    found = product(package).optimizer.router_bias_update(bias, counts, rate=1.0, bias_update=rule)
    signs = np.array([1.0, 1.0, 1.0, -1.0]) - (0.5 if rule == "ling_zero_mean" else 0.0)
    np.testing.assert_allclose(found - bias, [signs], atol=1e-6)


def test_zeros_are_counted_exactly_and_tiny_values_are_none(package: str, product: Any) -> None:
    tree = {"a": jnp.asarray([0.0, -0.0, 1e-30, jnp.nan]), "b": jnp.zeros((3, 2))}
    assert int(product(package).report.count_zeros(tree).sum()) == 8


def test_the_next_token_never_comes_from_another_document(package: str, product: Any) -> None:
    rolled = product(package).mtp.roll(
        jnp.asarray([[10, 11, 12, 20, 21, 30]]), jnp.asarray(SEGMENTS), shift=1, fill=0,
        by="segment",
    )  # fmt: skip
    np.testing.assert_array_equal(rolled, [[11, 12, 0, 21, 0, 0]])


def test_depth_d_predicts_d_tokens_further_than_the_target_and_its_mask_too(
    package: str, product: Any
) -> None:
    mask = np.array([[True, True, False, True, True, True]])
    batch = Batch(
        inputs=jnp.zeros((1, 6), int), targets=jnp.arange(6)[None],
        positions=jnp.arange(6)[None], segment_ids=jnp.ones((1, 6), int),
        loss_mask=jnp.asarray(mask),
    )  # fmt: skip
    targets, found = product(package).loss.mtp_targets(batch, depth=2, mtp_roll="plain")
    np.testing.assert_array_equal(found, [[False, True, True, True, False, False]])
    np.testing.assert_array_equal(targets, [[2, 3, 4, 5, 0, 0]])


def _router_case(product: Any, package: str) -> Any:
    modules, config = product(package), _config()
    scores = 2 * jax.random.normal(jax.random.key(2), (12, 16))
    bias = jnp.linspace(-1, 1, 16)
    routing = modules.router.route(scores, bias, config=config)
    return modules, config, scores, bias, routing


def test_an_experts_weight_is_its_own_score_and_not_the_biased_one(
    package: str, product: Any
) -> None:
    _, config, scores, bias, routing = _router_case(product, package)
    shares = np.asarray(jax.nn.sigmoid(scores))
    chosen = np.take_along_axis(shares, np.asarray(routing.indices), -1)
    wanted = config.routed_scaling_factor * chosen / chosen.sum(-1, keepdims=True)
    np.testing.assert_allclose(routing.weights, wanted, rtol=1e-5)
    unbiased = jax.lax.top_k(scores, config.num_experts_per_tok)[1]
    assert (np.sort(unbiased) != np.sort(routing.indices)).any()
    del bias


def test_padding_is_in_no_statistic_of_a_router(package: str, product: Any) -> None:
    modules, config, scores, bias, routing = _router_case(product, package)
    valid = np.ones((2, 6), bool)
    valid[1, 2:] = False

    def measure(rows: Any, valid: Any) -> Any:
        tokens = Tokens(
            positions=jnp.zeros(valid.shape, int), documents=None, valid=jnp.asarray(valid),
            loss_groups=1,
        )  # fmt: skip
        part = routing.replace(indices=routing.indices[rows], weights=routing.weights[rows])
        return modules.router.router_stats(scores[rows], part, bias, tokens, config=config)

    padded, alone = measure(np.arange(12), valid), measure(np.arange(8), np.ones((1, 8), bool))
    np.testing.assert_array_equal(padded.expert_counts, alone.expert_counts)
    assert int(padded.expert_counts.sum()) == 8 * config.num_experts_per_tok
    for name in ("aux", "z"):
        np.testing.assert_allclose(getattr(padded, name), getattr(alone, name), rtol=1e-5)


def test_the_global_balance_loss_looks_at_the_mean_load_so_far(package: str, product: Any) -> None:
    modules = product(package)
    previous = modules.auxiliaries.RunningLoads(jnp.asarray([[6.0, 0.0]]), jnp.float32(1))
    router = RouterStats(
        aux=jnp.zeros((1, 1)), z=jnp.zeros((1, 1)), expert_counts=jnp.asarray([[0, 2]]),
        loads=jnp.asarray([[0, 2]]), mean_scores=jnp.asarray([[[0.4, 0.6]]]),
    )  # fmt: skip
    config = LossConfig(
        load_balance_loss_weight=0.5, moe_router_load_balancing_type="global_aux_loss"
    )
    loss = modules.auxiliaries.balance_loss(router, jnp.ones(1), config=config, previous=previous)
    # E sum_i mean_load_i / assignments * mean score: 2 (3/2 * 0.4 + 1/2 * 0.6)
    assert float(loss.objective) == pytest.approx(0.5 * 2 * (1.5 * 0.4 + 0.5 * 0.6))


@pytest.mark.parametrize("tiles", [1, 3])
def test_what_is_masked_reaches_neither_loss_nor_gradient(
    package: str, tiles: int, product: Any
) -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    hidden, head = jax.random.normal(keys[0], (2, 4, 3)), jax.random.normal(keys[1], (3, 5))
    mask = jnp.asarray([[True, True, False, True], [False, True, True, True]])
    settings = {"depth": 0, "z_loss_multiplier": 0.1, "num_vocab_tiling": tiles}

    def total(head: Any, hidden: Any) -> Any:
        return 2.0 * product(package).head_loss.head_loss(
            head, hidden, jnp.ones((2, 4), int), mask, jnp.where(mask, 0.25, 0.0),
            logits=lambda p, h, depth: h @ p, **settings,
        ).objective  # fmt: skip

    def plain(head: Any, hidden: Any) -> Any:
        logits = (hidden @ head)[mask]
        log_z = jax.nn.logsumexp(logits, axis=-1)
        return 2.0 * 0.25 * (log_z - logits[:, 1] + 0.1 * log_z**2).sum()

    spoiled = jnp.where(mask[..., None], hidden, jnp.nan)
    wanted, slopes = jax.value_and_grad(plain, (0, 1))(head, hidden)
    found, gradients = jax.value_and_grad(total, (0, 1))(head, spoiled)
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)
    for a, b in zip(gradients, slopes, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_step_without_a_token_changes_no_parameter(
    package: str, tokens: int, product: Any, step_config: Any
) -> None:
    modules = product(package)
    config = step_config(optimizer={"warmup_steps": 0})
    tx = modules.optimizer.make_optimizer(config.optimizer)
    params = {"head": jnp.ones((2, 2))}
    state = modules.step.init_state(params, jnp.zeros((0, 1)), tx)
    terms = modules.loss.LossTerms(
        **dict.fromkeys(
            ("objective", "lm", "z", "xent_sum", "z_sum", "mtp_loss", "raw_mtp_loss",
             "moe_lb_loss", "load_balancing_loss", "moe_z_loss", "raw_moe_z_loss"),
            jnp.zeros(()),
        ),
        mtp_depth_losses=jnp.zeros(0), expert_counts=jnp.zeros((0, 1), jnp.int32),
    )  # fmt: skip
    after, _ = modules.step.apply_gradients(
        state, terms, params, total_weights=jnp.int32(tokens), tx=tx, config=config
    )
    assert bool((after.params["head"] == 1).all()) == (tokens == 0)
    assert int(after.step) == 1


def test_a_loss_group_without_a_token_keeps_its_zero(package: str, product: Any) -> None:
    weights = product(package).token_weights.token_weights(
        jnp.asarray([[[True, True], [False, False]]]),
        calculate_per_token_loss=False,
        loss_groups=2,
    )
    np.testing.assert_allclose(weights, [[[0.25, 0.25], [0.0, 0.0]]])


def test_depths_are_averaged_each_by_its_own_tokens_or_pooled(package: str, product: Any) -> None:
    modules, keys = product(package), jax.random.split(jax.random.key(1), 3)
    hidden = tuple(jax.random.normal(key, (1, 6, 3)) for key in keys)
    batch = Batch(
        inputs=jnp.zeros((1, 6), int), targets=jnp.asarray([[0, 1, 2, 3, 4, 0]]),
        positions=jnp.arange(6)[None], segment_ids=jnp.asarray(SEGMENTS),
        loss_mask=jnp.asarray(SEGMENTS != 0),
    )  # fmt: skip
    none = RouterStats(jnp.zeros((1, 0)), jnp.zeros((1, 0)), jnp.zeros((0, 1), jnp.int32))

    def raw(*, per_layer: bool) -> float:
        _, terms = modules.loss.microbatch_loss(
            jnp.eye(3, 5), jnp.zeros((0, 1)), batch, jnp.zeros((1, 6)), jnp.ones(1),
            apply=lambda *_: ModelOutputs(hidden[0], hidden[1:], none),
            logits=lambda p, h, depth: h @ p, num_microbatches=1,
            config=LossConfig(mtp_per_layer_loss_norm=per_layer),
        )  # fmt: skip
        return float(terms.raw_mtp_loss)

    def xent(depth: int, place: int) -> float:
        logits = np.asarray(hidden[depth][0, place] @ jnp.eye(3, 5))
        return float(np.log(np.exp(logits).sum()) - logits[batch.targets[0, place + depth]])

    one, two = [xent(1, t) for t in (0, 1, 3)], [xent(2, 0)]
    each = (np.mean(one) + np.mean(two)) / 2
    assert raw(per_layer=True) == pytest.approx(each, rel=1e-5)
    assert raw(per_layer=False) == pytest.approx(np.mean(one + two), rel=1e-5)
    assert abs(each - np.mean(one + two)) > 1e-3


def test_an_evaluation_is_sum_over_sum(package: str, product: Any) -> None:
    modules = product(package)
    nothing = np.zeros((1, 1, 0))
    batches = [
        modules.eval_step.EvalSums(np.array([[xent]]), np.array([[count]]), nothing, nothing)
        for xent, count in ((100.0, 50), (80.0, 20))
    ]
    log = modules.eval_step.eval_log(batches, mtp_per_layer_loss_norm=False)
    assert log["eval/lm_loss"] == pytest.approx(180 / 70)
    assert log["eval/total_weights"] == 70


def test_a_ramp_up_adds_micro_batches_as_samples_are_read(package: str, product: Any) -> None:
    sizes = product(package).ramp_up.ramp_up_stages((2, 2, 24), batch_size=8, num_microbatches=4)
    # 8 samples an increment; 0, 2, 4, 6, 8, 12, 16, 22 and 28 have been read before each step.
    found = [sizes.stage_at(step).batch_size for step in range(9)]
    assert found == [2, 2, 2, 2, 4, 4, 6, 6, 8]
