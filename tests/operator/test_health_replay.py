"""Whole streams of metrics, recorded and made: what is bad is found in time, and nothing else."""

import json
import math
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ling_operator.api import HealthPolicy, HealthState
from ling_operator.verdict import HealthSample, findings, fold

STREAMS = Path(__file__).parent / "streams"
START = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)
HALT = {"action": "Halt"}
EVERY_RULE_HALTS = HealthPolicy.model_validate(
    dict.fromkeys(
        (
            "loss_spike",
            "grad_norm_spike",
            "num_zeros",
            "total_weights",
            "zero_loss",
            "stall",
            "straggler",
        ),
        HALT,
    )
)
SEEDS = range(8)

type Row = dict[str, float]
"""A step's values, by the field of HealthSample."""


def recorded(name: str) -> list[Row]:
    rows = [json.loads(line) for line in (STREAMS / name).read_text().splitlines()]
    return [{key.removeprefix("learning/"): value for key, value in row.items()} for row in rows]


def calm(steps: int, seed: int, **series: Callable[[int], float]) -> list[Row]:
    """A run of 5 s steps: noisy, and nothing is wrong but what `series` says of a step."""
    noise = random.Random(seed)
    rows: list[Row] = []
    for step in range(1, steps + 1):
        loss = series.get("lm_loss", lambda _: 3.0)(step)
        rows.append({
            "step": step,
            "time": 5.0 * step,
            "lm_loss": max(loss + noise.gauss(0, 0.05), 0.0) if loss else 0.0,
            "raw_grad_norm": noise.lognormvariate(0, 0.4)
            * series.get("raw_grad_norm", lambda _: 1.0)(step),
            "num_zeros": 1e6 * series.get("zeros", lambda _: 0.1 + 0.02 * noise.random())(step),
            "num_grad_elements": 1e6,
            "total_weights": 1e5 * series.get("weights", lambda _: 0.95)(step),
        })  # fmt: skip
    return rows


def pages(rows: list[Row], *, stride: int = 1) -> Iterator[HealthSample]:
    """Scrape every so many steps."""
    for row in rows[::stride]:
        values: dict[str, Any] = {key: value for key, value in row.items() if key != "time"}
        time = START + timedelta(seconds=row["time"])
        yield HealthSample(
            time=time, pod_uid="pod-0", last_step_time=time, heartbeat=time, **values
        )


def first_halt(
    rows: list[Row], *, stride: int = 1, policy: HealthPolicy = EVERY_RULE_HALTS
) -> tuple[str, int, int] | None:
    """Return reason, first bad step and step of the halt; the state is stored at every page."""
    state = HealthState()
    for sample in pages(rows, stride=stride):
        text = fold(state, sample, policy).model_dump_json(by_alias=True, exclude_none=True)
        state = HealthState.model_validate_json(text, strict=True)
        assert "NaN" not in text
        assert "Infinity" not in text
        for verdict in findings(state, policy):
            if verdict.action == "Halt":
                return str(verdict.reason), verdict.step or 0, state.step
    return None


@pytest.mark.parametrize("stride", [1, 2, 5])
@pytest.mark.parametrize("name", [path.name for path in sorted(STREAMS.glob("*.jsonl"))])
def test_a_recorded_run_is_never_halted(name: str, stride: int) -> None:
    rows = recorded(name)
    assert len(rows) >= 150
    assert first_halt(rows, stride=stride) is None


def test_a_spike_in_a_recorded_run_is_found() -> None:
    rows = recorded("ling2_tiny.jsonl")
    spike = [row | {"lm_loss": row["lm_loss"] + 5 * (150 < row["step"] <= 170)} for row in rows]
    assert first_halt(spike) == ("LossSpike", 151, 153)


def warm_up(step: int) -> float:
    """ln(157184), Ling2's vocabulary, to 2 nats."""
    return 2 + (math.log(157_184) - 2) * math.exp(-max(step - 10, 0) / 60)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_warm_up_from_ln_of_the_vocabulary_is_never_halted(seed: int) -> None:
    rows = calm(400, seed, lm_loss=warm_up, raw_grad_norm=lambda s: 1 + 30 / s)
    assert rows[0]["lm_loss"] > 11.7
    assert rows[-1]["lm_loss"] < 2.3
    for stride in (1, 7):
        assert first_halt(rows, stride=stride) is None


@pytest.mark.parametrize("seed", SEEDS)
def test_experts_that_fall_idle_and_come_back_are_never_halted(seed: int) -> None:
    noise = random.Random(seed)
    idle = [0.03, *(min(max(noise.gauss(0.35, 0.12), 0.0), 0.6) for _ in range(400))]
    assert first_halt(calm(400, seed, zeros=lambda s: idle[0] if s < 15 else idle[s])) is None


@pytest.mark.parametrize("seed", SEEDS)
def test_batches_of_uneven_masks_are_never_halted(seed: int) -> None:
    noise = random.Random(seed)
    assert first_halt(calm(400, seed, weights=lambda _: noise.uniform(0.6, 1.0))) is None


@pytest.mark.parametrize("seed", SEEDS)
def test_one_odd_batch_now_and_then_is_never_halted(seed: int) -> None:
    def odd(step: int) -> float:
        return 6.0 if step % 50 == 0 else 3.0

    assert first_halt(calm(400, seed, lm_loss=odd)) is None


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stride", [1, 3])
def test_3_to_8_and_back_is_halted_within_three_pages(seed: int, stride: int) -> None:
    def spike(step: int) -> float:
        return 8.0 if 200 < step <= 400 else 3.0

    found = first_halt(calm(500, seed, lm_loss=spike), stride=stride)
    assert found is not None
    reason, first, seen = found
    assert reason == "LossSpike"
    assert 200 < first <= 200 + stride
    assert seen == first + 2 * stride


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_climb_out_of_the_valley_is_halted_before_it_is_over(seed: int) -> None:
    def climb(step: int) -> float:
        return 3.0 + 5.0 * min(max((step - 200) / 20, 0), 1)

    found = first_halt(calm(500, seed, lm_loss=climb))
    assert found is not None
    assert found[0] == "LossSpike"
    assert found[2] < 215


@pytest.mark.parametrize(
    ("series", "reason", "within"),
    [
        ({"weights": lambda s: 0.95 - 0.84 * min(max((s - 100) / 60, 0), 1)}, "LossMask", 60),
        ({"lm_loss": lambda s: 3.0 if s <= 100 else 0.0}, "ZeroLoss", 10),
        ({"raw_grad_norm": lambda s: 1.0 if s <= 100 else 100.0}, "GradNormSpike", 3),
        ({"zeros": lambda s: 0.3 if s <= 100 else 0.95}, "ZeroGradients", 5),
    ],
    ids=["95 to 11 % of tokens", "loss is 0", "gradients x 100", "dead gradients"],
)
def test_what_public_runs_died_of_is_halted_in_time(
    series: dict[str, Callable[[int], float]], reason: str, within: int
) -> None:
    for seed in SEEDS:
        found = first_halt(calm(300, seed, **series))
        assert found is not None
        assert found[0].startswith(reason)
        assert found[1] > 100
        assert found[2] <= 100 + within


def test_by_default_a_finite_series_only_halts_a_run_that_learns_nothing() -> None:
    rules = HealthPolicy()
    actions = {
        name: getattr(rules, name).action
        for name in HealthPolicy.model_fields
        if name not in {"scrape_interval_seconds", "trainer_stops", "halt_mode"}
    }
    halting = {name for name, action in actions.items() if action == "Halt"}
    assert halting == {"non_finite", "zero_loss"}
    assert set(actions.values()) == {"Halt", "Alert"}
