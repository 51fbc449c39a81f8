"""Learning rates against those of Megatron's own scheduler, step by step."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from ling_trainer.optimizer_config import OptimizerConfig
from ling_trainer.schedule import learning_rate

FOLDER = Path(__file__).parents[1] / "golden" / "megatron" / "optimizer"
CASES: dict[str, dict[str, Any]] = json.loads((FOLDER / "schedules.json").read_text())["cases"]
STYLES = {
    "lr_decay_style": {"constant", "linear", "cosine", "inverse-square-root", "WSD"},
    "lr_wsd_decay_style": {"linear", "cosine", "exponential", "minus_sqrt"},
}
# Some float32 operations, and what Megatron's float64 loses of 1 + cos just before the end.
RTOL, ATOL = 5e-7, 1e-19


def config_of(case: dict[str, Any]) -> OptimizerConfig:
    names = {
        "max_lr": "learning_rate",
        "min_lr": "min_lr",
        "init_lr": "lr_warmup_init",
        "warmup": "warmup_steps",
        "decay_steps": "learning_rate_schedule_steps",
        "lr_decay_style": "lr_decay_style",
        "wsd_decay_steps": "wsd_decay_steps",
        "lr_wsd_decay_style": "lr_wsd_decay_style",
    }
    return OptimizerConfig(
        **{names[key]: value for key, value in case.items() if value is not None}
    )


def rates(config: OptimizerConfig, steps: Any, fraction: float = 0.0) -> np.ndarray:
    """Compute the rates of many steps; not under jit, which would compile each schedule."""

    def rate(step: Any) -> Any:
        return learning_rate(config, step, fraction=fraction)

    return np.asarray(jax.vmap(rate)(jnp.asarray(steps, jnp.int32)), np.float64)


def exact(config: OptimizerConfig, t: float) -> float:
    """Compute the documented formula in float64."""
    peak, floor, warmup = config.learning_rate, config.min_lr, config.warmup_steps
    end, wsd = config.learning_rate_schedule_steps or 0, config.wsd_decay_steps or 0
    if warmup and t <= warmup:
        return config.lr_warmup_init + (peak - config.lr_warmup_init) * t / warmup
    if config.lr_decay_style == "constant":
        return peak
    if t > end:
        return floor
    if config.lr_decay_style == "inverse-square-root":
        return max(floor, peak * math.sqrt(max(warmup, 1) / max(t, 1)))
    curve, begin = config.lr_decay_style, warmup
    if config.lr_decay_style == "WSD":
        curve, begin = config.lr_wsd_decay_style, end - wsd
    r = max(0.0, (t - begin) / (end - begin))
    share = {
        "linear": 1 - r,
        "cosine": (1 + math.cos(math.pi * r)) / 2,
        "exponential": 2 * 0.5**r - 1,
        "minus_sqrt": 1 - math.sqrt(r),
    }
    return floor + share[curve] * (peak - floor)


def test_the_golden_schedules_show_every_style_with_and_without_warmup() -> None:
    assert len(CASES) == 26
    for key, styles in STYLES.items():
        for warmup in (True, False):
            seen = {case[key] for case in CASES.values() if bool(case["warmup"]) == warmup}
            assert styles <= seen, (key, warmup)


@pytest.mark.parametrize("name", CASES)
def test_golden_schedule_is_megatrons_at_every_step(name: str, show_golden: Any) -> None:
    with np.load(FOLDER / "schedules.npz") as data:
        assert set(data) == {*CASES, "steps", "million_steps"}
        steps = data["million_steps" if name.startswith("million") else "steps"]
        wanted = data[name]
    ours = rates(config_of(CASES[name]), steps)
    error = np.abs(ours - wanted)
    worst = float((error / np.where(wanted == 0, 1, wanted))[wanted > 1e-12].max())
    show_golden(
        f"megatron/optimizer/schedules.npz ({name})",
        cases=f"{len(steps)}/{len(wanted)} steps", worst=worst, tolerance=RTOL,
    )  # fmt: skip
    assert (error <= RTOL * wanted + ATOL).all()
    assert ((ours == 0) == (wanted == 0)).all()


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("inside_warmup")])
def test_a_position_between_two_steps_has_the_rate_of_the_formula_there(name: str) -> None:
    config = config_of(CASES[name])
    end = CASES[name]["decay_steps"]
    begin = end - (CASES[name]["wsd_decay_steps"] or 0)
    # At the end of a million steps, a float32 position would have lost what is after the point.
    steps = sorted({0, 1, 7, 8, end // 2, begin - 1, begin, begin + 1, end - 2, end - 1, end})
    ours = rates(config, steps, fraction=0.375)
    wanted = np.array([exact(config, step + 0.375) for step in steps])
    np.testing.assert_allclose(ours, wanted, rtol=2e-6, atol=ATOL)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_lr": 2e-3}, r"min_lr=0\.002 is above learning_rate=0\.001"),
        ({"lr_warmup_init": 2e-3}, r"lr_warmup_init=0\.002 is above learning_rate=0\.001"),
        (
            {"lr_decay_style": "cosine"},
            "learning_rate_schedule_steps is not set; lr_decay_style=c",
        ),
        (
            {"lr_decay_style": "linear", "warmup_steps": 9, "learning_rate_schedule_steps": 9},
            "warmup_steps=9 must be below learning_rate_schedule_steps=9",
        ),
        (
            {"lr_decay_style": "WSD", "learning_rate_schedule_steps": 9},
            "wsd_decay_steps is not set; lr_decay_style=WSD needs",
        ),
        ({"lr_decay_style": "wsd"}, "'constant', 'linear', 'cosine', 'inverse-square-root' or 'W"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_by_field(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        OptimizerConfig(learning_rate=1e-3, **settings)


def test_a_long_warmup_is_no_fault_of_a_constant_rate() -> None:
    config = OptimizerConfig(learning_rate=1e-3, warmup_steps=10, learning_rate_schedule_steps=5)
    assert rates(config, [5])[0] == pytest.approx(5e-4)
