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
from safetensors.numpy import load_file

from ling_trainer import convert
from ling_trainer.batch import Batch
from ling_trainer.model import ling2
from ling_trainer.model_config import ModelConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "ling"
FOLDERS = ("ling_v2_5_tiny", "ling_v2_tiny")
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
LOGITS = 2e-5  # the fixture's: real mistakes move logits by 4e-5 and more
LOSS = 5e-6


@pytest.fixture(scope="module", params=FOLDERS)
def golden(request: pytest.FixtureRequest) -> SimpleNamespace:
    return load(GOLDEN / request.param)


@pytest.fixture(scope="module")
def hybrid() -> SimpleNamespace:
    return load(GOLDEN / "ling_v2_5_tiny")


def load(folder: Path) -> SimpleNamespace:
    expected = load_file(folder / "expected.safetensors")
    facts = json.loads((folder / "expected.json").read_text())
    hf_config = json.loads((folder / "config.json").read_text())
    config = ModelConfig.model_validate(convert.config_from_hf(hf_config), strict=True)
    params, router_bias = convert.hf_to_params(load_file(folder / "model.safetensors"), config)
    ids, real = expected["input_ids"].astype(np.int32), expected["attention_mask"] == 1
    batch = Batch(
        inputs=jnp.asarray(ids),
        targets=jnp.asarray(ids),
        positions=jnp.tile(jnp.arange(ids.shape[1]), (ids.shape[0], 1)),
        segment_ids=jnp.asarray(real, jnp.int32),
        loss_mask=jnp.asarray(real),
    )
    return SimpleNamespace(
        folder=folder, name=f"ling/{folder.name}", config=config, params=params,
        router_bias=router_bias, batch=batch,
        expected=expected, facts=facts, real=real,
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
    show_golden(
        f"{golden.name}/expected.safetensors", cases=cases, worst=max(errors), tolerance=LOGITS
    )
    assert max(errors) <= LOGITS


def test_losses_equal_the_golden(
    golden: SimpleNamespace, found: SimpleNamespace, show_golden: Callable[..., None]
) -> None:
    """Of all real tokens, and of a file's other labels, which leave the first two out."""
    values = {"lm_loss": found.lm, "mtp_loss": found.mtp_loss, "total_loss": found.total}
    labels = golden.expected["labels_sft"].astype(np.int32)
    values["lm_loss_sft"] = mean_nll(found.logits, labels, 1)
    values["mtp_loss_sft"] = mean_nll(found.mtp_logits, labels, 2)
    values["total_loss_sft"] = values["lm_loss_sft"] + 0.1 * values["mtp_loss_sft"]
    worst = max(abs(float(value) - golden.facts[name]) for name, value in values.items())
    show_golden(f"{golden.name}/expected.json", cases="6 losses", worst=worst, tolerance=LOSS)
    assert worst <= LOSS


def test_the_global_gradient_norm_equals_the_golden(
    golden: SimpleNamespace, found: SimpleNamespace
) -> None:
    squares = sum(np.square(g.astype(np.float64)).sum() for g in found.gradients.values())
    np.testing.assert_allclose(np.sqrt(squares), golden.facts["grad_global_norm"], rtol=1e-5)


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
    name = f"{golden.name}/expected.json"
    show_golden(name, cases=f"{cases}: sum, projection", worst=sums, tolerance=1e-5)
    show_golden(name, cases=f"{cases}: L2", worst=norms, tolerance=1e-4)
    assert sums <= 1e-5
    assert norms <= 1e-4


def test_full_gradients_equal_the_golden(
    golden: SimpleNamespace, found: SimpleNamespace, show_golden: Callable[..., None]
) -> None:
    stored = load_file(golden.folder / "grads.safetensors")
    worst = max(np.abs(found.gradients[k] - g).max() for k, g in stored.items())
    cases = f"{len(stored)} full gradients"
    show_golden(f"{golden.name}/grads", cases=cases, worst=worst, tolerance=2e-6)
    for name, gradient in stored.items():
        np.testing.assert_allclose(found.gradients[name], gradient, rtol=1e-4, atol=2e-6)


def test_expert_counts_equal_the_golden(golden: SimpleNamespace, found: SimpleNamespace) -> None:
    counts = list(golden.facts["expert_counts_real_tokens"].values())
    np.testing.assert_array_equal(found.router.expert_counts, counts)


def test_variants_equal_the_golden(
    hybrid: SimpleNamespace, show_golden: Callable[..., None]
) -> None:
    """Slopes counted from zero; the file's other variant, YaRN, is a feature we refuse."""
    variants = load_file(hybrid.folder / "variants.safetensors")
    names = ("logits_slope_zero_based", "mtp_logits_slope_zero_based")
    yarn = {name for name in variants if "yarn" in name}
    assert set(variants) == {*names, *yarn}
    assert len(yarn) == 4
    config = hybrid.config.model_copy(update={"lightning_slope_layer_offset": 0})
    labels = hybrid.expected["labels"].astype(np.int32)

    def forward(params: Any) -> Any:
        main, mtp, _ = run(hybrid, params, config)
        return main, mtp, mean_nll(main, labels, 1)

    *logits, loss = jax.jit(forward, compiler_options=FAST_COMPILE)(hybrid.params)
    errors = [
        np.abs(np.asarray(found) - variants[name])[hybrid.real].max()
        for name, found in zip(names, logits, strict=True)
    ]
    name = f"{hybrid.name}/variants.safetensors"
    show_golden(name, cases="slopes from zero", worst=max(errors), tolerance=LOGITS)
    assert max(errors) <= LOGITS
    stored = json.loads((hybrid.folder / "variants.json").read_text())
    assert abs(float(loss) - stored["loss_slope_zero_based"]) <= LOSS


@pytest.mark.parametrize(
    "mistake",
    [
        {"rms_norm_eps": 1e-5},
        {"topk_group": 4},
    ],
    ids=lambda mistake: next(iter(mistake)),
)
def test_golden_logits_notice_one_wrong_setting(
    hybrid: SimpleNamespace, mistake: dict[str, Any]
) -> None:
    config = ModelConfig.model_validate(hybrid.config.model_dump() | mistake)
    forward = jax.jit(lambda p: run(hybrid, p, config)[0], compiler_options=FAST_COMPILE)
    error = np.abs(np.asarray(forward(hybrid.params)) - hybrid.expected["logits"])[hybrid.real]
    assert error.max() > LOGITS
