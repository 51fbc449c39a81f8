"""Each health rule: what makes it hold, what does not, and what every fold promises."""

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ling_operator.api import HealthPolicy, HealthState
from ling_operator.verdict import HealthSample, findings, fold, judge

START = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)
DEFAULTS = HealthPolicy()


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def policy(**rules: dict[str, Any]) -> HealthPolicy:
    return HealthPolicy.model_validate(rules)


def page(step: int, *, seconds: float | None = None, **series: Any) -> HealthSample:
    """A page that shows a calm run at a step; one step takes 5 s."""
    time = at(5.0 * step if seconds is None else seconds)
    calm = {
        "lm_loss": 3.0,
        "raw_grad_norm": 1.0,
        "num_zeros": 600.0,
        "num_grad_elements": 1000.0,
        "total_weights": 4096.0,
        "last_step_time": time,
        "heartbeat": time,
    }
    return HealthSample(time=time, pod_uid="pod-0", step=step, **(calm | series))


def pages(series: str, values: Iterable[float | None], *, first: int = 1) -> list[HealthSample]:
    return [page(step, **{series: value}) for step, value in enumerate(values, first)]


def folded(
    samples: Iterable[HealthSample],
    rules: HealthPolicy = DEFAULTS,
    state: HealthState | None = None,
) -> HealthState:
    state = HealthState() if state is None else state
    for sample in samples:
        state = fold(state, sample, rules)
    return state


def reasons(state: HealthState, rules: HealthPolicy = DEFAULTS) -> list[str]:
    return [str(verdict.reason) for verdict in findings(state, rules)]


CALM = [3.0, 3.02, 2.98, 3.01, 2.99] * 8
NOISY = [3.0, 3.5, 2.5, 3.25, 2.75] * 8


@pytest.mark.parametrize(
    ("series", "before", "now", "reason"),
    [
        ("lm_loss", CALM, [8.0] * 3, "LossSpike"),
        ("lm_loss", CALM, [8.0, 7.0, 4.1], "LossSpike"),
        ("lm_loss", CALM, [8.0] * 2, None),
        ("lm_loss", CALM, [8.0, 8.0, 3.0, 8.0], None),
        ("lm_loss", CALM, [3.9] * 9, None),  # below the floor
        ("lm_loss", NOISY, [5.0] * 9, None),  # within the run's own spread
        ("lm_loss", NOISY, [8.0] * 3, "LossSpike"),
        ("lm_loss", CALM, [0.5] * 9, None),  # a loss that falls is no spike
        ("lm_loss", CALM[:4], [8.0] * 9, None),  # too short a past
        ("lm_loss", CALM, [0.0] * 9, None),
        ("lm_loss", CALM, [0.0] * 10, "ZeroLoss"),
        ("lm_loss", [-loss for loss in CALM], [-9.0] * 20, None),  # somebody else's objective
        ("lm_loss", [-loss for loss in CALM], [1.0] * 3, "LossSpike"),
        ("lm_loss", [*CALM, *[3.0, *[0.0] * 9] * 5], CALM, None),  # from 0 to 3 is no spike
        ("raw_grad_norm", CALM, [29.0] * 9, None),
        ("raw_grad_norm", CALM, [31.0] * 3, "GradNormSpike"),
        ("raw_grad_norm", [1.0, 3.0, 10.0, 30.0] * 10, [90.0] * 9, None),
        ("raw_grad_norm", [*CALM, *[0.0] * 60], [3.0] * 3, None),  # steps without a token
        ("num_zeros", [600.0, 650.0, 550.0] * 9, [880.0] * 9, None),  # within its spread
        ("num_zeros", [*[500.0] * 20, *[50.0] * 60], [620.0] * 9, None),  # idle once before
        ("num_zeros", [600.0, 605.0, 595.0] * 9, [839.0] * 9, None),
        ("num_zeros", [600.0, 605.0, 595.0] * 9, [841.0] * 5, "ZeroGradients"),
        ("num_zeros", [990.0] * 20, [990.0] * 20, None),  # experts idle from the start
        ("num_zeros", [1.0] * 20, [610.0] * 4, None),
        ("num_zeros", [1.0] * 20, [610.0] * 5, "ZeroGradients"),
        ("num_zeros", [1000.0] * 20, [1000.0] * 9, None),
        ("total_weights", [4000.0] * 12, [2001.0] * 9, None),
        ("total_weights", [4000.0] * 12, [1999.0] * 5, "LossMaskCollapse"),
        ("total_weights", [4000.0] * 12, [1999.0] * 4, None),
    ],
)
def test_a_rule_holds_from_its_thresholds_on_and_not_before(
    series: str, before: list[float], now: list[float], reason: str | None
) -> None:
    state = folded(pages(series, before))
    assert reasons(state) == []
    state = folded(pages(series, now, first=len(before) + 1), state=state)
    assert reasons(state) == ([] if reason is None else [reason])


def test_a_verdict_says_first_bad_step_value_median_and_setting() -> None:
    verdict = judge(folded(pages("lm_loss", [*CALM, 7.5, 8.0, 8.25])), DEFAULTS)
    assert (verdict.reason, verdict.action) == ("LossSpike", "Alert")
    assert (verdict.step, verdict.value) == (41, "8.25")
    assert "From step 41 on lm_loss is above its median 3: 8.25" in verdict.message
    assert "spec.health.lossSpike.consecutiveSteps is 3" in verdict.message


def test_the_checkpoint_to_restore_is_older_than_the_last_step_that_was_in_order() -> None:
    seen_every_third = [page(step, lm_loss=3.0) for step in range(1, 121, 3)]
    spike = [page(step, lm_loss=8.0) for step in range(121, 130, 3)]
    verdict = judge(folded([*seen_every_third, *spike]), DEFAULTS)
    assert (verdict.step, verdict.restore_before_step) == (121, 118)


def test_a_spike_that_lasts_for_hours_is_one_to_its_end() -> None:
    state = folded(pages("lm_loss", [*CALM, *[8.0] * 1000]))
    assert reasons(state) == ["LossSpike"]
    assert state.loss.first_step == 41
    state = folded([page(2000, lm_loss=3.0)], state=state)
    assert reasons(state) == []


def test_a_mask_that_is_lost_little_by_little_is_noticed() -> None:
    fading = [4096 * (0.95 - 0.84 * i / 60) for i in range(60)]
    assert reasons(folded(pages("total_weights", [*fading, *[4096 * 0.11] * 5]))) == [
        "LossMaskCollapse"
    ]


def test_a_run_that_goes_back_to_its_start_does_not_spike() -> None:
    fallen = [*(12 - 0.3 * i for i in range(30)), *[3.0] * 60]
    state = folded(pages("lm_loss", fallen))
    again = [
        replace(p, time=at(600 + 5 * i), pod_uid="pod-0b")
        for i, p in enumerate(pages("lm_loss", fallen))
    ]
    for sample in again:
        state = folded([sample], state=state)
        assert reasons(state) == []


def test_a_run_that_restarts_from_within_a_spike_is_still_in_it() -> None:
    state = folded(pages("lm_loss", [*CALM, *[8.0] * 20]))
    resumed = [
        replace(page(50 + i, lm_loss=8.0), time=at(900 + 5 * i), pod_uid="pod-0b")
        for i in range(2)
    ]
    state = folded(resumed, state=state)
    assert (state.pod_uid, state.loss.first_step) == ("pod-0b", 41)
    assert reasons(state) == ["LossSpike"]


def test_a_run_that_goes_back_before_its_spike_begins_a_new_row() -> None:
    state = folded(pages("lm_loss", [*CALM, 8.0, 8.0]))
    again = [
        replace(page(30 + i, lm_loss=8.0), time=at(900 + 5 * i), pod_uid="pod-0b")
        for i in range(3)
    ]
    state = folded(again[:2], state=state)
    assert reasons(state) == []
    verdict = judge(folded(again[2:], state=state), DEFAULTS)
    assert (verdict.step, verdict.restore_before_step) == (30, 29)


def test_values_that_are_no_numbers_are_left_to_the_rule_for_them() -> None:
    bad = [math.nan, math.inf, -math.inf, None] * 5
    for series in ("lm_loss", "raw_grad_norm", "num_zeros", "total_weights"):
        state = folded(pages(series, [*CALM, *bad]))
        assert reasons(state, policy(nonFinite={"action": "Ignore"})) == []
        json.dumps(state.model_dump(mode="json"), allow_nan=False)


def test_values_so_large_that_their_median_is_no_number_are_left_out() -> None:
    for series in ("lm_loss", "raw_grad_norm", "total_weights"):
        state = folded(pages(series, [1.7e308] * 40))
        json.dumps(state.model_dump(mode="json"), allow_nan=False)
        assert state.weights.reference in {None, 4096.0}


def test_a_foreign_page_is_judged_by_what_it_has_and_says_what_it_lacks() -> None:
    bare = [
        HealthSample(time=at(5 * s), pod_uid="pod-0", step=s, loss=3.0 if s < 30 else 8.0)
        for s in range(1, 33)
    ]
    state = folded(bare)
    assert reasons(state) == ["LossSpike"]
    assert state.missing == (
        "gradNormSpike (ling_learning_raw_grad_norm)",
        "numZeros (ling_learning_num_zeros, ling_learning_num_grad_elements)",
        "totalWeights (ling_learning_total_weights)",
        "straggler (ling_heartbeat_timestamp_seconds)",
    )
    quiet = policy(gradNormSpike={"action": "Ignore"}, numZeros={"action": "Ignore"})
    assert folded(bare, quiet).missing == state.missing[2:]


def test_a_page_without_a_step_number_leaves_only_non_finite_to_judge() -> None:
    state = folded([HealthSample(time=at(0), pod_uid="pod-0", is_nan=False, heartbeat=at(0))])
    needing = {name.partition(" ")[0] for name in state.missing if "ling_step" in name}
    assert needing == {"lossSpike", "gradNormSpike", "numZeros", "totalWeights", "zeroLoss"}
    mute = HealthSample(time=at(0), pod_uid="pod-0", step=None, shows_nonfinite=False)
    assert folded([mute]).missing[0] == "nonFinite (ling_learning_is_nan)"
    assert "stall (ling_step)" in folded([mute]).missing


def test_what_a_first_step_brings_is_not_missed_before_it() -> None:
    restored = HealthSample(time=at(0), pod_uid="pod-0", step=0, shows_nonfinite=False)
    later = replace(restored, time=at(5), step=100)
    assert folded([restored, later]).missing == ()


@pytest.mark.parametrize(
    ("rule", "samples"),
    [
        ("loss_spike", pages("lm_loss", [*CALM, *[8.0] * 3])),
        ("grad_norm_spike", pages("raw_grad_norm", [*CALM, *[80.0] * 3])),
        ("num_zeros", pages("num_zeros", [*[600.0] * 20, *[900.0] * 5])),
        ("total_weights", pages("total_weights", [*[4000.0] * 20, *[400.0] * 5])),
        ("zero_loss", pages("lm_loss", [*CALM, *[0.0] * 10])),
        ("stall", [page(1), page(2), replace(page(2), time=at(700))]),
    ],
)
def test_the_action_of_every_rule_is_the_users(rule: str, samples: list[HealthSample]) -> None:
    for action in ("Halt", "Alert"):
        rules = policy(**{rule: {"action": action}})
        assert judge(folded(samples, rules), rules).action == action
    ignoring = policy(**{rule: {"action": "Ignore"}})
    assert reasons(folded(samples, ignoring), ignoring) == []


def test_without_a_page_nothing_that_is_kept_makes_a_verdict() -> None:
    bad = [page(41 + i, lm_loss=8.0) for i in range(3)]
    state = folded([*pages("lm_loss", CALM), *bad])
    assert reasons(state.model_copy(update={"sample_time": None})) == []


def test_a_rule_that_halts_goes_before_those_that_alert() -> None:
    rules = policy(grad_norm_spike={"action": "Halt"})
    bad = [page(41 + i, lm_loss=8.0, raw_grad_norm=99.0) for i in range(3)]
    state = folded([*pages("lm_loss", CALM), *bad], rules)
    assert reasons(state, rules) == ["GradNormSpike", "LossSpike"]
    assert reasons(state, DEFAULTS) == ["LossSpike", "GradNormSpike"]


def test_thresholds_act_at_once() -> None:
    state = folded(pages("lm_loss", [*CALM, *[8.0] * 3]))
    strict, patient = policy(loss_spike={"consecutive_steps": 2}), {"consecutive_steps": 4}
    assert reasons(state, strict) == ["LossSpike"]
    assert reasons(state, policy(loss_spike=patient)) == []
    state = folded([page(44, lm_loss=8.0)], policy(loss_spike=patient), state)
    assert reasons(state, policy(loss_spike=patient)) == ["LossSpike"]


FLOATS = st.none() | st.floats() | st.floats(0, 12)
SAMPLES = st.builds(
    HealthSample,
    time=st.integers(0, 5000).map(at),
    pod_uid=st.sampled_from(["a", "b"]),
    step=st.none() | st.integers(0, 60),
    loss=FLOATS,
    lm_loss=FLOATS,
    raw_grad_norm=FLOATS,
    num_zeros=FLOATS,
    num_grad_elements=FLOATS,
    total_weights=FLOATS,
    last_step_time=st.none() | st.integers(0, 5000).map(at),
    heartbeat=st.none() | st.integers(0, 5000).map(at),
)
TOUCHY = policy(
    loss_spike={"window": 10, "floor": 0.1, "deviations": 1, "consecutive_steps": 1},
    grad_norm_spike={"window": 10, "factor": 1.1, "deviations": 1, "consecutive_steps": 1},
    num_zeros={"window": 10, "lost_fraction": 0.1, "deviations": 1, "consecutive_steps": 1},
    total_weights={"window": 10, "min_fraction": 0.9, "consecutive_steps": 1},
    zero_loss={"floor": 1, "consecutive_steps": 1},
)
RISING = st.lists(SAMPLES, max_size=40).map(lambda s: sorted(s, key=lambda p: p.time))


def stored(state: HealthState) -> HealthState:
    """Return the state as an operator that restarts reads it: through strict JSON."""
    fields = state.model_dump(mode="json", by_alias=True, exclude_none=True)
    return HealthState.model_validate_json(json.dumps(fields, allow_nan=False), strict=True)


@given(RISING)
@settings(max_examples=60, deadline=None)
def test_a_restart_forgets_nothing_and_a_repeated_page_changes_nothing(
    samples: list[HealthSample],
) -> None:
    state = restarted = HealthState()
    assert findings(state, TOUCHY) == ()
    for sample in samples:
        state = fold(state, sample, TOUCHY)
        assert fold(state, sample, TOUCHY) == state
        restarted = fold(stored(restarted), sample, TOUCHY)
        assert restarted == state
        assert findings(stored(restarted), TOUCHY) == findings(state, TOUCHY)


@given(st.lists(st.floats(0.01, 12), min_size=20, max_size=60))
@settings(max_examples=60, deadline=None)
def test_a_loss_that_only_falls_never_spikes(losses: list[float]) -> None:
    rules = policy(loss_spike={"floor": 0.01, "deviations": 0.01, "consecutive_steps": 1})
    falling = sorted(losses, reverse=True)
    state = HealthState()
    for sample in pages("lm_loss", falling):
        state = fold(state, sample, rules)
        assert "LossSpike" not in reasons(state, rules)


@given(st.lists(st.floats(0.1, 10), min_size=15, max_size=40), st.sampled_from([1e-6, 8.0, 1e6]))
@settings(max_examples=40, deadline=None)
def test_a_gradient_norm_is_judged_whatever_its_unit(norms: list[float], unit: float) -> None:
    rules = policy(grad_norm_spike={"factor": 3, "consecutive_steps": 1})

    def rows(scale: float) -> list[int]:
        state, seen = HealthState(), list[int]()
        for sample in pages("raw_grad_norm", [float(f"{n:.3g}") * scale for n in norms]):
            state = fold(state, sample, rules)
            seen.append(state.grad_norm.row)
        return seen

    assert rows(unit) == rows(1.0)


def test_the_state_of_a_long_run_is_small() -> None:
    widest: dict[str, Any] = {"window": 128}
    names = ("loss_spike", "grad_norm_spike", "num_zeros", "total_weights")
    rules = policy(**dict.fromkeys(names, widest))
    state = HealthState()
    for i in range(1, 400):
        wave = 3.123456 + math.sin(i)
        values = {"lm_loss": wave, "raw_grad_norm": wave, "num_zeros": 100 * wave}
        state = fold(state, page(900_000 + i, seconds=5.0 * i, **values), rules)
    assert len(state.loss.window.values) == 128
    assert len(state.model_dump_json(by_alias=True)) < 12_000
