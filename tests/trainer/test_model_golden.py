"""Ling2 against numbers of the public reference code (tests/golden/ling)."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from ling_trainer import convert
from ling_trainer.batch import Batch
from ling_trainer.model import ling2
from ling_trainer.model.block import Block
from ling_trainer.model.gla import log_decays
from ling_trainer.model.layers import Tokens
from ling_trainer.model.moe import MixtureOfExperts
from ling_trainer.model_config import ModelConfig

FOLDER = Path(__file__).parents[1] / "golden" / "ling" / "ling_v2_5_tiny"
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
LOGITS = 2e-5  # the fixture's: real mistakes move logits by 4e-5 and more
LOSS = 5e-6


@pytest.fixture(scope="module")
def golden() -> SimpleNamespace:
    expected = load_file(FOLDER / "expected.safetensors")
    facts = json.loads((FOLDER / "expected.json").read_text())
    hf_config = json.loads((FOLDER / "config.json").read_text())
    settings = convert.config_from_hf(hf_config)
    config = ModelConfig.model_validate(settings, strict=True)
    params, router_bias = convert.hf_to_params(load_file(FOLDER / "model.safetensors"), config)
    ids, real = expected["input_ids"].astype(np.int32), expected["attention_mask"] == 1
    batch = Batch(
        inputs=jnp.asarray(ids),
        targets=jnp.asarray(ids),
        positions=jnp.tile(jnp.arange(ids.shape[1]), (ids.shape[0], 1)),
        segment_ids=jnp.asarray(real, jnp.int32),
        loss_mask=jnp.asarray(real),
    )
    return SimpleNamespace(
        config=config, params=params, router_bias=router_bias, batch=batch,
        expected=expected, facts=facts, real=real, ops=load_file(FOLDER / "ops.safetensors"),
    )  # fmt: skip


def run(golden: SimpleNamespace, params: Any, config: ModelConfig) -> Any:
    out = ling2.apply(
        params,
        jnp.asarray(golden.router_bias),
        golden.batch,
        config=config,
        loss_groups=1,
        mtp_roll="plain",
        reset_attention_mask=False,
    )
    main = ling2.logits(params, out.hidden, 0)
    return main, ling2.logits(params, out.mtp_hidden[0], 1), out.router


def mean_nll(logits: Any, labels: np.ndarray, shift: int) -> Any:
    labels = np.pad(labels[:, shift:], ((0, 0), (0, shift)), constant_values=-100)
    log_probs = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_probs, np.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return -jnp.where(labels != -100, picked, 0.0).sum() / (labels != -100).sum()


@pytest.fixture(scope="module")
def found(golden: SimpleNamespace) -> SimpleNamespace:
    """Logits, losses, statistics and gradients of the fixture's total loss, in one compilation."""
    labels = golden.expected["labels"].astype(np.int32)

    def total(params: Any) -> Any:
        main, mtp, router = run(golden, params, golden.config)
        lm, ahead = mean_nll(main, labels, 1), mean_nll(mtp, labels, 2)
        return lm + 0.1 * ahead, (lm, ahead, main, mtp, router)

    step = jax.jit(jax.value_and_grad(total, has_aux=True), compiler_options=FAST_COMPILE)
    (value, (lm, ahead, main, mtp, router)), gradients = jax.device_get(step(golden.params))
    return SimpleNamespace(
        total=value, lm=lm, mtp_loss=ahead, logits=main, mtp_logits=mtp, router=router,
        gradients=convert.params_to_hf(gradients, golden.config),
    )  # fmt: skip


def test_logits_equal_the_golden(
    golden: SimpleNamespace, found: SimpleNamespace, show_golden: Callable[..., None]
) -> None:
    errors = [
        np.abs(getattr(found, name) - golden.expected[name])[golden.real].max()
        for name in ("logits", "mtp_logits")
    ]
    cases = f"{golden.real.sum()} x 256 logits, main and mtp"
    show_golden("ling_v2_5_tiny", cases=cases, worst=max(errors), tolerance=LOGITS)
    assert max(errors) <= LOGITS


def test_losses_equal_the_golden(
    golden: SimpleNamespace, found: SimpleNamespace, show_golden: Callable[..., None]
) -> None:
    pairs = (("lm_loss", found.lm), ("mtp_loss", found.mtp_loss), ("total_loss", found.total))
    worst = max(abs(float(value) - golden.facts[name]) for name, value in pairs)
    show_golden("ling_v2_5_tiny", cases="3 losses", worst=worst, tolerance=LOSS)
    assert worst <= LOSS


def test_every_parameter_has_the_golden_gradient_statistics(
    golden: SimpleNamespace, found: SimpleNamespace, show_golden: Callable[..., None]
) -> None:
    stats = golden.facts["grad_stats_l2_sum_proj"]
    assert set(stats) == set(found.gradients)
    sums, norms = 0.0, 0.0
    for name, (l2, total, projection) in stats.items():
        g = found.gradients[name].astype(np.float64).ravel()
        wave = np.cos(0.7 * np.arange(g.size) + 0.3)
        sums = max(sums, abs(g.sum() - total) / l2, abs(g @ wave - projection) / l2)
        norms = max(norms, abs(np.linalg.norm(g) - l2) / l2)
    cases = f"{len(stats)} gradients"
    show_golden("ling_v2_5_tiny", cases=f"{cases}: sum, projection", worst=sums, tolerance=1e-5)
    show_golden("ling_v2_5_tiny", cases=f"{cases}: L2", worst=norms, tolerance=1e-4)
    assert sums <= 1e-5
    assert norms <= 1e-4


def test_full_gradients_equal_the_golden(
    found: SimpleNamespace, show_golden: Callable[..., None]
) -> None:
    stored = load_file(FOLDER / "grads.safetensors")
    worst = max(np.abs(found.gradients[k] - g).max() for k, g in stored.items())
    cases = f"{len(stored)} full gradients"
    show_golden("ling_v2_5_tiny", cases=cases, worst=worst, tolerance=2e-6)
    for name, gradient in stored.items():
        np.testing.assert_allclose(found.gradients[name], gradient, rtol=1e-4, atol=2e-6)


def test_expert_counts_equal_the_golden(golden: SimpleNamespace, found: SimpleNamespace) -> None:
    counts = list(golden.facts["expert_counts_real_tokens"].values())
    np.testing.assert_array_equal(found.router.expert_counts, counts)


def test_logits_with_megatrons_slope_offset_equal_the_golden(
    golden: SimpleNamespace, show_golden: Callable[..., None]
) -> None:
    config = golden.config.model_copy(update={"lightning_slope_layer_offset": 0})
    forward = jax.jit(lambda p: run(golden, p, config)[:2], compiler_options=FAST_COMPILE)
    errors = [
        np.abs(np.asarray(logits) - golden.ops[f"{name}_slope_zero_based"])[golden.real].max()
        for name, logits in zip(("logits", "mtp_logits"), forward(golden.params), strict=True)
    ]
    show_golden(
        "ling_v2_5_tiny", cases="logits, slope offset 0", worst=max(errors), tolerance=LOGITS
    )
    assert max(errors) <= LOGITS


@pytest.mark.parametrize("layer", [0, 1])
def test_attention_of_one_layer_equals_the_golden(
    golden: SimpleNamespace, layer: int, show_golden: Callable[..., None]
) -> None:
    kind = "mla" if golden.config.is_mla(layer) else "lightning"
    empty = Block(golden.config, attention=kind, feed_forward="dense", rngs=nnx.Rngs(0))
    block = nnx.merge(
        nnx.split(empty)[0], jax.tree.map(jnp.asarray, golden.params["prefix"][layer])
    )
    tokens = Tokens(
        positions=golden.batch.positions,
        documents=None,
        valid=golden.batch.segment_ids != 0,
        loss_groups=1,
    )
    x = jnp.asarray(golden.ops[f"model.layers.{layer}.attention/in"])
    decay = (jnp.asarray(log_decays(golden.config)[layer]),) if kind == "lightning" else ()
    y = np.asarray(block.attention(x, tokens, *decay))
    error = np.abs(y - golden.ops[f"model.layers.{layer}.attention/out"])[golden.real].max()
    show_golden("ling_v2_5_tiny", cases=f"{kind} attention", worst=error, tolerance=1e-5)
    assert error <= 1e-5


def test_mixture_of_experts_of_one_layer_equals_the_golden(
    golden: SimpleNamespace, show_golden: Callable[..., None]
) -> None:
    weights = jax.tree.map(lambda a: jnp.asarray(a[0]), golden.params["groups"][0]["mlp"])
    mixture = nnx.merge(nnx.split(MixtureOfExperts(golden.config, rngs=nnx.Rngs(0)))[0], weights)
    tokens = Tokens(
        positions=golden.batch.positions,
        documents=None,
        valid=golden.batch.segment_ids != 0,
        loss_groups=1,
    )
    x = jnp.asarray(golden.ops["model.layers.2.mlp.gate/in"])
    y, _ = mixture(x, tokens, jnp.asarray(golden.router_bias[0]))
    error = np.abs(np.asarray(y) - golden.ops["model.layers.2.mlp/out"])[golden.real].max()
    show_golden("ling_v2_5_tiny", cases="mixture of experts", worst=error, tolerance=1e-5)
    assert error <= 1e-5


@pytest.mark.parametrize(
    "mistake",
    [
        {"rms_norm_eps": 1e-5},
        {"topk_group": 4},
    ],
    ids=lambda mistake: next(iter(mistake)),
)
def test_golden_logits_notice_one_wrong_setting(
    golden: SimpleNamespace, mistake: dict[str, Any]
) -> None:
    config = ModelConfig.model_validate(golden.config.model_dump() | mistake)
    forward = jax.jit(lambda p: run(golden, p, config)[0], compiler_options=FAST_COMPILE)
    error = np.abs(np.asarray(forward(golden.params)) - golden.expected["logits"])[golden.real]
    assert error.max() > LOGITS
