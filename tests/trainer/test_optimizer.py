"""AdamW, schedule, clipping and the routers' bias rule, against Megatron's numbers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ling_trainer.config import OptimizerConfig
from ling_trainer.model_config import ModelConfig
from ling_trainer.optimizer import (
    clip_factor,
    decay_mask,
    global_norm,
    learning_rate,
    make_optimizer,
    router_bias_update,
)
from ling_trainer.presets import ling2_tiny

GOLDEN = Path(__file__).parents[1] / "golden"
ATOL = 2e-7  # fixtures/megatron/README.md
NAMES = ("matrix", "stacked", "embedding", "norm", "bias")
ADAMW_CASES = ("constant_clip1", "constant_noclip_bigeps")


@pytest.fixture(scope="module")
def golden() -> SimpleNamespace:
    folder = GOLDEN / "megatron" / "optimizer"
    cases = json.loads((folder / "optimizer.json").read_text())
    return SimpleNamespace(data=dict(np.load(folder / "optimizer.npz")), **cases)


def _config(case: dict[str, Any]) -> OptimizerConfig:
    return OptimizerConfig(
        learning_rate=case["max_lr"],
        warmup_steps=case["warmup"],
        adam_b1=case["betas"][0],
        adam_b2=case["betas"][1],
        adam_eps=case["eps"],
        adam_weight_decay=case["weight_decay"],
        gradient_clipping_threshold=case["clip"],
    )


@pytest.mark.parametrize("name", ADAMW_CASES)
def test_golden_adamw_follows_megatron_for_forty_steps(
    golden: SimpleNamespace, name: str, show_golden: Any
) -> None:
    config, data = _config(golden.cases[name]), golden.data
    tx = make_optimizer(config)
    params = {key: jnp.asarray(data[f"init/{key}"]) for key in NAMES}
    worst = 0.0
    opt_state: Any = tx.init(params)

    @jax.jit
    def update(params: Any, opt_state: Any, grads: Any, step: Any) -> Any:
        norm, rate = global_norm(grads), learning_rate(config, step)
        factor = clip_factor(norm, threshold=config.gradient_clipping_threshold)
        clipped = jax.tree.map(lambda g: g * factor, grads)
        updates, opt_state = tx.update(clipped, opt_state, params, learning_rate=rate)
        return optax.apply_updates(params, updates), opt_state, norm, rate

    for step in range(40):
        grads = {key: jnp.asarray(data[f"grads/{key}"][step]) for key in NAMES}
        params, opt_state, norm, rate = update(params, opt_state, grads, jnp.int32(step))
        assert float(rate) == pytest.approx(data[f"{name}/lr"][step], abs=1e-9)
        assert float(norm) == pytest.approx(data[f"{name}/raw_grad_norm"][step], rel=1e-6)
        for key in NAMES:
            wanted = data.get(f"{name}/step{step + 1}/{key}")
            if wanted is not None:
                worst = max(worst, np.abs(params[key] - wanted).max())
    adam = opt_state[0]
    np.testing.assert_allclose(adam.mu["matrix"], data[f"{name}/final/m/matrix"], atol=ATOL)
    np.testing.assert_allclose(adam.nu["matrix"], data[f"{name}/final/v/matrix"], atol=ATOL)
    show_golden(f"megatron/optimizer ({name})", cases="1/1", worst=worst, tolerance=ATOL)
    assert worst < ATOL


def test_golden_steps_that_are_clipped_would_show_another_epsilon(
    golden: SimpleNamespace,
) -> None:
    norms = golden.data["constant_clip1/raw_grad_norm"]
    assert set(np.flatnonzero(norms > 1.0)) >= {2, 3, 16} or (norms > 1).sum() >= 3
    factor = float(clip_factor(jnp.float32(norms.max()), threshold=1.0))
    assert factor == pytest.approx(1 / (norms.max() + 1e-6), rel=1e-7)


def test_golden_decay_is_chosen_by_path_as_in_megatron(golden: SimpleNamespace) -> None:
    mask = decay_mask({key: golden.data[f"init/{key}"] for key in NAMES})
    assert {key for key, decays in mask.items() if decays} == set(golden.decayed)


def test_a_stacked_norm_is_not_decayed_and_an_expert_is() -> None:
    tree = {
        "groups": {"input_norm": {"weight": jnp.ones((3, 8))}, "experts": jnp.ones((3, 4, 8))},
        "head": {"weight": jnp.ones((8, 8)), "bias": jnp.ones((2, 8)), "scale": jnp.ones(8)},
    }
    assert decay_mask(tree) == {
        "groups": {"input_norm": {"weight": False}, "experts": True},
        "head": {"weight": True, "bias": False, "scale": False},
    }


def test_in_ling2_exactly_the_norms_escape_decay() -> None:
    from ling_trainer.model.ling2 import init_params

    config = ModelConfig(**ling2_tiny()["model"])
    params = jax.eval_shape(lambda: init_params(config, seed=0))
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    decays = jax.tree.leaves(decay_mask(params))
    # Every norm starts at one and every matrix is drawn; a constant leaf must not be decayed.
    real = jax.tree.leaves(init_params(config, seed=0))
    for (path, _), decay, leaf in zip(flat, decays, real, strict=True):
        constant = bool((np.asarray(leaf) == np.asarray(leaf).ravel()[0]).all())
        assert decay != constant, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("warmup", "step", "factor"),
    [(0, 0, 1.0), (0, 9, 1.0), (8, 0, 0.0), (8, 2, 0.25), (8, 8, 1.0)],
)
def test_warmup_starts_at_zero_and_none_starts_at_the_peak(
    warmup: int, step: int, factor: float
) -> None:
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=warmup)
    assert float(learning_rate(config, jnp.int32(step))) == 2.0 * factor


def test_norm_of_bfloat16_leaves_is_summed_in_float32() -> None:
    tree = [jnp.full((4096,), 1.0, jnp.bfloat16), jnp.full((512,), 1.0, jnp.bfloat16)]
    assert float(global_norm(tree)) == pytest.approx(4608**0.5, rel=1e-6)


def test_clipping_threshold_zero_does_not_clip() -> None:
    assert float(clip_factor(jnp.float32(1e9), threshold=0.0)) == 1.0


def _bias_cases(maxtext: SimpleNamespace) -> dict[str, Any]:
    router = np.load(GOLDEN / "megatron" / "loss" / "moe_router.npz")
    ling = json.loads((GOLDEN / "megatron" / "loss" / "ling_bias_update.json").read_text())
    small = maxtext.small
    counts = small["bias/counts"].sum(0)[None]
    before = small["bias/bias_before"][None]
    ling_counts, ling_bias = np.float32(ling["tokens_per_expert"]), np.float32(ling["expert_bias"])
    megatron, zero = "megatron", "ling_zero_mean"
    names = router["bias_counts"], router["bias_before"]
    centred = small["bias/after_centered_update_from_bias_before"][None]
    shifted = small["bias/bias_before_nonzero_mean"][None]
    shifted_after = small["bias/after_centered_update__ling_megatron_patch"][None]
    return {
        "megatron": (*names, megatron, router["bias_after_rate1e-3"]),
        "megatron zero mean": (*names, zero, router["bias_after_rate1e-3_ling_zero_mean"]),
        "ling": (ling_counts, ling_bias, megatron, np.float32(ling["plain"])),
        "ling zero mean": (ling_counts, ling_bias, zero, np.float32(ling["zero_mean"])),
        "maxtext": (counts, before, megatron, small["bias/bias_after"][None]),
        "maxtext zero mean": (counts, before, zero, centred),
        "maxtext shifted": (counts, shifted, zero, shifted_after),
    }


def test_golden_router_bias_moves_by_the_sign_of_summed_counts(
    maxtext: SimpleNamespace, show_golden: Any
) -> None:
    worst, cases = 0.0, _bias_cases(maxtext)
    for counts, before, rule, after in cases.values():
        integers = [jnp.asarray(counts, jnp.int32)] if (counts == counts.astype(int)).all() else []
        for given in (jnp.asarray(counts, jnp.float32), *integers):
            got = router_bias_update(
                jnp.asarray(before, jnp.float32), given, rate=1e-3, bias_update=rule
            )
            worst = max(worst, float(np.abs(np.asarray(got) - after).max()))
    show_golden(
        "moe_router.npz, bias_update.json, small.npz (bias)",
        cases=f"{len(cases)}/7", worst=worst, tolerance=1e-7,
    )  # fmt: skip
    assert worst < 1e-7


def test_sign_of_large_integer_counts_is_not_lost_to_float32_rounding() -> None:
    counts = np.full((1, 256), 655_360, np.int32)
    counts[0, 0] += 1  # the mean is 655360 + 1/256, which float32 rounds to 655360
    exact = np.sign(counts.sum(dtype=np.int64) - 256 * counts.astype(np.int64))
    moved = router_bias_update(
        jnp.zeros((1, 256)), jnp.asarray(counts), rate=1.0, bias_update="megatron"
    )
    np.testing.assert_array_equal(moved, exact)
    rounded = router_bias_update(
        jnp.zeros((1, 256)), jnp.asarray(counts, jnp.float32), rate=1.0, bias_update="megatron"
    )
    assert (np.asarray(rounded) != exact).any()  # what the exact comparison is for


@pytest.mark.parametrize("rule", ["megatron", "ling_zero_mean"])
def test_equal_loads_or_rate_zero_leave_the_bias_bitwise(rule: Any) -> None:
    bias = jnp.asarray([[0.1, -0.0, 0.3, 1e-30]])
    even = jnp.full((1, 4), 7, jnp.int32)
    uneven = jnp.asarray([[1, 2, 3, 400]])
    for counts, rate in ((even, 1e-3), (uneven, 0.0), (jnp.zeros((1, 4), jnp.int32), 1e-3)):
        after = router_bias_update(bias, counts, rate=rate, bias_update=rule)
        if rate:
            np.testing.assert_array_equal(after, bias)
        else:
            assert np.asarray(after).tobytes() == np.asarray(bias).tobytes()
