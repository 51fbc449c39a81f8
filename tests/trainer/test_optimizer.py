"""AdamW, clipping and the routers' bias rule, against Megatron's numbers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ling_trainer.model_config import ModelConfig
from ling_trainer.optimizer import (
    clip_factor,
    decay_mask,
    global_norm,
    make_optimizer,
    router_bias_update,
)
from ling_trainer.optimizer_config import OptimizerConfig
from ling_trainer.presets import ling2_tiny
from ling_trainer.schedule import learning_rate

GOLDEN = Path(__file__).parents[1] / "golden"
ATOL = 2e-7  # fixtures/megatron/README.md
NAMES = ("matrix", "stacked", "embedding", "norm", "bias")
ADAMW_CASES = ("constant_clip1", "constant_noclip_bigeps")


FOLDER = GOLDEN / "megatron" / "optimizer"
SETTINGS = json.loads((FOLDER / "optimizer.json").read_text())
CASES: dict[str, dict[str, Any]] = SETTINGS["cases"]
TOLERANCE = {"lr": 1e-9, "raw_grad_norm": 1e-6, "step": ATOL, "final": ATOL}  # by kind of key


@pytest.fixture(scope="module")
def golden() -> SimpleNamespace:
    return SimpleNamespace(data=dict(np.load(FOLDER / "optimizer.npz")), **SETTINGS)


def _config(case: dict[str, Any]) -> OptimizerConfig:
    wsd = {"lr_wsd_decay_style": case["lr_wsd_decay_style"]} if case["lr_wsd_decay_style"] else {}
    return OptimizerConfig(
        learning_rate=case["max_lr"],
        min_lr=case["min_lr"],
        warmup_steps=case["warmup"],
        lr_decay_style=case["lr_decay_style"],
        learning_rate_schedule_steps=case["decay_steps"],
        wsd_decay_steps=case["wsd_decay_steps"],
        **wsd,
        adam_b1=case["betas"][0],
        adam_b2=case["betas"][1],
        adam_eps=case["eps"],
        adam_weight_decay=case["weight_decay"],
        gradient_clipping_threshold=case["clip"],
    )


def _train(config: OptimizerConfig, params: Any, grads: Any) -> dict[str, Any]:
    """Do the golden's steps in one program, and name what comes out as the golden does."""
    tx = make_optimizer(config)

    def update(carry: Any, given: Any) -> Any:
        (params, opt_state), (step, grads) = carry, given
        norm, rate = global_norm(grads), learning_rate(config, step)
        factor = clip_factor(norm, threshold=config.gradient_clipping_threshold)
        clipped = jax.tree.map(lambda g: g * factor, grads)
        updates, opt_state = tx.update(clipped, opt_state, params, learning_rate=rate)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), (rate, norm, params)

    steps = jnp.arange(SETTINGS["steps"], dtype=jnp.int32)
    scan = jax.jit(lambda *start: jax.lax.scan(update, start, (steps, grads)))
    (_, opt_state), (rates, norms, after) = scan(params, tx.init(params))
    found = {"lr": rates, "raw_grad_norm": norms}
    found |= {f"step{n + 1}/{key}": after[key][n] for n in steps.tolist() for key in NAMES}
    for letter, moment in (("m", opt_state[0].mu), ("v", opt_state[0].nu)):
        found |= {f"final/{letter}/{key}": moment[key] for key in NAMES}
    return found


@pytest.mark.parametrize("name", CASES)
def test_golden_optimizer_follows_megatron_in_every_key(
    golden: SimpleNamespace, name: str, show_golden: Any
) -> None:
    data = golden.data
    params = {key: jnp.asarray(data[f"init/{key}"]) for key in NAMES}
    grads = {key: jnp.asarray(data[f"grads/{key}"]) for key in NAMES}
    found = _train(_config(CASES[name]), params, grads)
    keys = [key for key in data if key.startswith(f"{name}/")]
    assert len(keys) == (34 if name in ADAMW_CASES else 2)
    worst = 0.0
    for key in keys:
        ours, wanted = np.asarray(found[key.removeprefix(f"{name}/")], np.float64), data[key]
        kind = next(kind for kind in TOLERANCE if key.startswith(f"{name}/{kind}"))
        scale = wanted if kind == "raw_grad_norm" else 1.0
        error = float(np.abs((ours - wanted) / scale).max())
        assert error < TOLERANCE[kind], key
        worst = max(worst, error)
    show_golden(
        f"megatron/optimizer ({name})",
        cases=f"{len(keys)}/{len(keys)} keys", worst=worst, tolerance=ATOL,
    )  # fmt: skip


def test_every_key_of_the_golden_belongs_to_a_case_or_is_an_input(golden: SimpleNamespace) -> None:
    owners = [key.split("/")[0] for key in golden.data]
    assert len(CASES) == 6
    assert set(owners) == {*CASES, "init", "grads"}
    assert len(owners) == 2 * 34 + 4 * 2 + 2 * len(NAMES) == 86


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
    quick = {"xla_backend_optimization_level": 0}
    draw = jax.jit(lambda: init_params(config, seed=0), compiler_options=quick)
    real = jax.tree.leaves(draw())
    for (path, _), decay, leaf in zip(flat, decays, real, strict=True):
        constant = bool((np.asarray(leaf) == np.asarray(leaf).ravel()[0]).all())
        assert decay != constant, jax.tree_util.keystr(path)


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
