"""The fold over pages and the judgement: what counts as divergence, and what never does."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ling_operator.api import HealthPolicy, HealthState, NonFinitePolicy
from ling_operator.verdict import Health, HealthSample, fold, judge

NAN = (("nan", "NonFiniteLoss"), 1)


def policy(consecutive: int = 1, action: str = "Halt") -> HealthPolicy:
    rule = NonFinitePolicy.model_validate({"consecutive_steps": consecutive, "action": action})
    return HealthPolicy(non_finite=rule)


def folded(*samples: HealthSample) -> HealthState:
    state = HealthState()
    for sample in samples:
        state = fold(state, sample, policy())
    return state


def foreign(scene: Any, step: int, seconds: float, *, bad: bool) -> HealthSample:
    """A page of a trainer that exports step, loss and is_nan, and nothing else of the contract."""
    page = scene.sample(step, seconds)
    return HealthSample(
        time=page.time, pod_uid="pod-0", step=step, loss=float("nan") if bad else 3.0, is_nan=bad
    )


def test_without_a_page_there_is_no_verdict() -> None:
    verdict = judge(HealthState(), policy())
    assert (verdict.health, verdict.reason) == (Health.UNKNOWN, "NoSampleYet")


def test_finite_steps_are_healthy(scene: Any) -> None:
    assert judge(folded(scene.sample(10), scene.sample(12, 5)), policy()).health == Health.HEALTHY


def test_a_nan_at_the_scraped_step_is_divergence_with_step_value_and_reason(scene: Any) -> None:
    verdict = judge(folded(scene.sample(10), scene.nan_sample(12, 5)), policy())
    assert verdict.health == Health.DIVERGED
    assert (verdict.reason, verdict.step, verdict.value) == ("NonFiniteLoss", 12, "nan")
    assert verdict.action == "Halt"


def test_a_nan_step_between_two_scrapes_is_not_missed(scene: Any) -> None:
    later = scene.sample(19, 5, nonfinite_steps=(NAN,), consecutive_max=1, last_nonfinite_step=12)
    verdict = judge(folded(scene.sample(10), later), policy())
    assert (verdict.health, verdict.step, verdict.value) == (Health.DIVERGED, 12, "nan")


def test_an_infinite_gradient_is_named_as_such(scene: Any) -> None:
    page = scene.sample(
        12,
        grad_is_nonfinite=True,
        nonfinite_steps=((("inf", "NonFiniteGradient"), 1),),
        consecutive_max=1,
        last_finite_step=11,
        last_nonfinite_step=12,
    )
    verdict = judge(folded(page), policy())
    assert (verdict.reason, verdict.value, verdict.step) == ("NonFiniteGradient", "inf", 12)


def test_a_row_shorter_than_the_threshold_is_not_divergence(scene: Any) -> None:
    state = folded(
        scene.nan_sample(12),
        scene.sample(20, 5, nonfinite_steps=((NAN[0], 2),), consecutive_max=2),
    )
    assert judge(state, policy(3)).health == Health.HEALTHY
    assert state.nonfinite_steps == 2
    assert judge(state, policy(2)).health == Health.DIVERGED


def test_a_row_is_counted_in_steps_and_not_in_scrapes(scene: Any) -> None:
    same_step = [scene.nan_sample(12, seconds) for seconds in range(0, 50, 5)]
    assert judge(folded(*same_step), policy(2)).health == Health.HEALTHY
    jumped = scene.nan_sample(
        15, 55, nonfinite_steps=((NAN[0], 4),), consecutive_max=4, last_finite_step=11
    )
    verdict = judge(folded(*same_step, jumped), policy(4))
    assert (verdict.health, verdict.step) == (Health.DIVERGED, 12)


def test_a_trainer_without_counters_is_judged_by_its_gauges(scene: Any) -> None:
    pages = [foreign(scene, step, step, bad=True) for step in (5, 5, 6, 7)]
    assert judge(folded(*pages[:2]), policy(2)).health == Health.HEALTHY
    verdict = judge(folded(*pages), policy(3))
    assert (verdict.health, verdict.step) == (Health.DIVERGED, 5)


def test_a_finite_step_ends_the_row_of_a_trainer_without_counters(scene: Any) -> None:
    pages = [foreign(scene, s, s, bad=s != 6) for s in (5, 6, 7)]
    assert judge(folded(*pages), policy(2)).health == Health.HEALTHY


def test_an_older_page_changes_nothing(scene: Any) -> None:
    state = folded(scene.sample(20, 10))
    assert fold(state, scene.nan_sample(12, 5), policy()) == state


@pytest.mark.parametrize(
    "restarted",
    [
        {"pod_uid": "pod-0b", "page_pod_uid": "pod-0b"},
        {},  # the same pod: only the counters and the step fell
    ],
    ids=["new pod", "same pod"],
)
def test_a_restarted_process_starts_a_new_row_and_keeps_the_attempts_sums(
    scene: Any, restarted: dict[str, Any]
) -> None:
    before = folded(scene.nan_sample(12))
    after = fold(before, scene.sample(8, 60, **restarted), policy())
    assert judge(after, policy()).health == Health.HEALTHY
    assert (after.nonfinite_steps, after.highest_step, after.step) == (1, 12, 8)
    again = fold(after, scene.nan_sample(12, 70, **restarted), policy())
    assert again.nonfinite_steps == 2
    assert judge(again, policy()).health == Health.DIVERGED


@pytest.mark.parametrize(("action", "health"), [("Alert", "Diverged"), ("Ignore", "Healthy")])
def test_the_policy_decides_what_follows(scene: Any, action: str, health: str) -> None:
    verdict = judge(folded(scene.nan_sample(12)), policy(action=action))
    assert verdict.health == health
    assert verdict.action != "Halt"


def test_a_page_without_a_single_series_of_the_contract_proves_nothing(scene: Any) -> None:
    empty = HealthSample(time=scene.now, pod_uid="pod-0", shows_nonfinite=False)
    assert judge(folded(empty), policy()).health == Health.HEALTHY


@pytest.mark.parametrize("step", [None, 12])
@pytest.mark.parametrize(
    ("series", "reason", "value"),
    [
        ({"is_nan": True}, "NonFiniteLoss", "nan"),
        ({"is_inf": True}, "NonFiniteLoss", "inf"),
        ({"loss": math.nan}, "NonFiniteLoss", "nan"),
        ({"lm_loss": math.inf}, "NonFiniteLoss", "inf"),
        ({"raw_grad_norm": math.nan}, "NonFiniteGradient", "nan"),
        ({"raw_grad_norm": math.inf}, "NonFiniteGradient", "inf"),
        ({"grad_is_nonfinite": True}, "NonFiniteGradient", "nan"),
        ({"nonfinite_steps": ((NAN[0], 1),)}, "NonFiniteLoss", "nan"),
    ],
    ids=str,
)
def test_any_one_series_of_a_foreign_page_is_enough_for_a_verdict(
    scene: Any, series: dict[str, Any], reason: str, value: str, step: int | None
) -> None:
    bare = HealthSample(time=scene.now, pod_uid="pod-0", step=step, **series)
    state = folded(bare)
    verdict = judge(state, policy())
    assert (verdict.health, verdict.reason, verdict.value) == (Health.DIVERGED, reason, value)
    assert verdict.step == step
    assert state.nonfinite_steps == 1


def test_pages_without_a_step_number_are_a_row_of_one(scene: Any) -> None:
    state = HealthState()
    for second in range(5):
        bare = HealthSample(time=scene.at(second), pod_uid="pod-0", is_nan=True)
        state = fold(state, bare, policy(2))
    assert (state.longest_nonfinite_row, state.nonfinite_steps) == (1, 1)
    assert judge(state, policy(2)).health == Health.HEALTHY
    assert "nonFinite (ling_step)" in state.missing


def test_a_loss_gauge_that_begins_as_nan_is_no_step(scene: Any) -> None:
    before = HealthSample(
        time=scene.now, pod_uid="pod-0", step=0, loss=math.nan, raw_grad_norm=math.nan
    )
    assert judge(folded(before), policy()).health == Health.HEALTHY


SAMPLES = st.builds(
    HealthSample,
    time=st.datetimes(),
    pod_uid=st.sampled_from(["a", "b"]),
    step=st.none() | st.integers(0, 50),
    loss=st.none() | st.floats(),
    is_nan=st.booleans(),
    is_inf=st.booleans(),
    grad_is_nonfinite=st.booleans(),
    nonfinite_steps=st.just(()) | st.tuples(st.tuples(st.just(NAN[0]), st.integers(0, 9))),
    consecutive_max=st.none() | st.integers(0, 9),
    last_finite_step=st.none() | st.integers(0, 50),
    last_nonfinite_step=st.none() | st.integers(0, 50),
)


@given(st.lists(SAMPLES, max_size=8))
@settings(deadline=None)
def test_folding_a_page_twice_is_folding_it_once(samples: list[HealthSample]) -> None:
    state = HealthState()
    for sample in samples:
        once = fold(state, sample, policy())
        assert fold(once, sample, policy()) == once
        state = once
    text = state.model_dump_json(by_alias=True)
    assert HealthState.model_validate_json(text) == state


@given(st.lists(SAMPLES, max_size=8))
@settings(deadline=None)
def test_pages_of_finite_steps_never_diverge(samples: list[HealthSample]) -> None:
    good = {"is_nan": False, "is_inf": False, "grad_is_nonfinite": False, "loss": 3.0}
    state = HealthState()
    for sample in samples:
        counted = replace(sample, nonfinite_steps=(), consecutive_max=0, **good)
        state = fold(state, counted, policy())
        assert judge(state, policy()).health != Health.DIVERGED
