"""Finite series that go wrong: loss, gradient norm, zeros, loss mask. Pure.

A rule compares a step with the run's own recent past: a median, and how far values lie from it
(MAD, the median absolute deviation), over a window that suspicious steps never enter. A warm-up
cannot fire: a loss that falls lies below the window's median, and the window's MAD is as large as
the fall.
"""

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

from ling_operator.api import HealthPolicy, HealthState, Reason
from ling_operator.health import Health, HealthSample, Verdict
from ling_operator.health_policy import (
    GradNormSpikePolicy,
    LossSpikePolicy,
    NumZerosPolicy,
    RuleAction,
    TotalWeightsPolicy,
    ZeroLossPolicy,
)
from ling_operator.health_state import SeriesState, Window
from ling_trainer.health_metrics import (
    LM_LOSS,
    NUM_GRAD_ELEMENTS,
    NUM_ZEROS,
    RAW_GRAD_NORM,
    STEP,
    TOTAL_WEIGHTS,
    Metric,
)

MIN_VALUES = 10
"""Values that a window must hold before a step is judged by it."""
_LARGEST = 1e300
_NORMAL = 1.4826  # MAD times this is a normal distribution's standard deviation


class _Rule(Protocol):
    """What all rules over a series have."""

    @property
    def consecutive_steps(self) -> int: ...

    @property
    def action(self) -> RuleAction: ...


def fold_series(
    before: HealthState, sample: HealthSample, policy: HealthPolicy, *, step: int
) -> dict[str, object]:
    """Return what a step that was not seen before changes of the series.

    A value that is absent or not finite changes nothing; nonFinite judges the latter. A step in
    which nothing was learned (see zeroLoss) says nothing of loss and gradients.

    Args:
      before: at an earlier step, or of a process that went back to one.
      sample: the step's page.
      policy: thresholds; they decide which steps are suspicious.
      step: of the page.
    """
    loss = _finite(sample.loss if sample.lm_loss is None else sample.lm_loss)
    learned, norm = loss, _finite(sample.raw_grad_norm)
    if loss is not None and abs(loss) <= policy.zero_loss.floor:
        learned, norm = None, None
    norm = None if norm is not None and norm <= 0 else norm
    zeros, weights = _share_of_zeros(sample), _finite(sample.total_weights)
    spike, grad = policy.loss_spike, policy.grad_norm_spike
    dead, mask = policy.num_zeros, policy.total_weights
    return {
        "loss": _fold(before.loss, step, learned, spike, _loss_is_high, spike.window),
        "grad_norm": _fold(before.grad_norm, step, norm, grad, _norm_is_high, grad.window),
        "zeros": _with_reference(
            _fold(before.zeros, step, zeros, dead, _zeros_are_many, dead.window)
        ),
        "weights": _with_reference(
            _fold(before.weights, step, weights, mask, _weights_are_few, mask.window)
        ),
        "zero_loss": _fold(before.zero_loss, step, loss, policy.zero_loss, _loss_is_zero, 0),
    }


def judge_series(state: HealthState, policy: HealthPolicy) -> tuple[Verdict, ...]:
    """Return the verdicts of the rules that hold, the gravest first."""
    loss, norm = _centre(state.loss), _centre(state.grad_norm)
    zeros, weights = state.zeros.reference or 0.0, state.weights.reference or 0.0
    found = (
        _verdict(
            state.zero_loss,
            policy.zero_loss,
            Reason.ZERO_LOSS,
            "zeroLoss",
            "lm_loss is stuck at 0",
        ),
        _verdict(
            state.weights,
            policy.total_weights,
            Reason.LOSS_MASK_COLLAPSE,
            "totalWeights",
            f"total_weights is below its highest median {weights:.6g}",
        ),
        _verdict(
            state.zeros,
            policy.num_zeros,
            Reason.ZERO_GRADIENTS,
            "numZeros",
            f"num_zeros / num_grad_elements is above its highest median {zeros:.6g}",
        ),
        _verdict(
            state.loss,
            policy.loss_spike,
            Reason.LOSS_SPIKE,
            "lossSpike",
            f"lm_loss is above its median {loss:.6g}",
        ),
        _verdict(
            state.grad_norm,
            policy.grad_norm_spike,
            Reason.GRAD_NORM_SPIKE,
            "gradNormSpike",
            f"raw_grad_norm is above its median {norm:.6g}",
        ),
    )
    return tuple(verdict for verdict in found if verdict is not None)


def _fold[Rule: _Rule](
    state: SeriesState,
    step: int,
    value: float | None,
    rule: Rule,
    is_suspicious: Callable[[SeriesState, float, Rule], bool],
    window: int,
) -> SeriesState:
    """Add one step: to the row if it is suspicious, else to the window, which ends the row."""
    state = _rewound(state, step)
    if value is None:
        return state
    if is_suspicious(state, value, rule):
        update: dict[str, object] = {
            "row": min(state.row + 1, rule.consecutive_steps),
            "first_step": state.first_step if state.row else step,
            "value": value,
        }
        return state.model_copy(update=update)
    kept = slice(max(len(state.window.steps) + 1 - window, 0), None)
    after = Window(
        steps=(*state.window.steps, step)[kept], values=(*state.window.values, value)[kept]
    )
    update = {"row": 0, "first_step": None, "value": None, "good_step": step}
    return state.model_copy(update=update | {"window": after if window else Window()})


def _rewound(state: SeriesState, step: int) -> SeriesState:
    """Forget what lies at or after the step: the run went back to a checkpoint from before it.

    A row that began earlier goes on: the checkpoint was taken within it.
    """
    good, first = state.good_step or 0, state.first_step or 0
    if good < step and first < step:
        return state
    count = sum(s < step for s in state.window.steps)
    window = Window(steps=state.window.steps[:count], values=state.window.values[:count])
    update: dict[str, object] = {"window": window, "row": 0, "first_step": None, "value": None}
    if good >= step:
        update["good_step"] = window.steps[-1] if count else None
    return state.model_copy(update=update)


def _with_reference(state: SeriesState) -> SeriesState:
    """Keep the highest median: a series that fades takes its own median along."""
    if len(state.window.values) < MIN_VALUES:
        return state
    highest = max(state.reference or 0.0, median(state.window.values))
    return state.model_copy(update={"reference": highest})


def _loss_is_high(state: SeriesState, value: float, rule: LossSpikePolicy) -> bool:
    rise, spread = _rise(state.window.values, value)
    return rise > max(rule.floor, rule.deviations * spread)


def _norm_is_high(state: SeriesState, value: float, rule: GradNormSpikePolicy) -> bool:
    logs = [math.log(norm) for norm in state.window.values]
    rise, spread = _rise(logs, math.log(value))
    return rise > max(math.log(rule.factor), rule.deviations * spread)


def _zeros_are_many(state: SeriesState, value: float, rule: NumZerosPolicy) -> bool:
    if state.reference is None:
        return False
    _, spread = _rise(state.window.values, value)
    rise, used = value - state.reference, 1 - state.reference
    return rise > rule.deviations * spread and rise >= rule.lost_fraction * used


def _weights_are_few(state: SeriesState, value: float, rule: TotalWeightsPolicy) -> bool:
    return state.reference is not None and value < rule.min_fraction * state.reference


def _loss_is_zero(_: SeriesState, value: float, rule: ZeroLossPolicy) -> bool:
    return abs(value) <= rule.floor


def _rise(values: Sequence[float], value: float) -> tuple[float, float]:
    """Return how far a value lies above the median, and the window's robust deviation.

    With too few values there is no rise.
    """
    if len(values) < MIN_VALUES:
        return 0.0, 0.0
    middle = median(values)
    return value - middle, _NORMAL * median(abs(v - middle) for v in values)


def _centre(state: SeriesState) -> float:
    return median(state.window.values) if state.window.values else 0.0


def _finite(value: float | None) -> float | None:
    """Return a number that JSON can hold, in six digits: windows are kept in the object.

    So is the sum of two, of which a median may be made.
    """
    if value is None or not abs(value) <= _LARGEST:  # true for NaN too
        return None
    return float(f"{value:.6g}")


def _share_of_zeros(sample: HealthSample) -> float | None:
    zeros, elements = sample.num_zeros, sample.num_grad_elements
    if zeros is None or elements is None or not 0 <= zeros <= elements or elements == 0:
        return None  # NaN fails the comparison
    return _finite(zeros / elements)


def series_missing(sample: HealthSample) -> dict[str, tuple[str, ...]]:
    """Return the series that each rule over series needs and the page lacks."""
    loss = None if sample.lm_loss is None and sample.loss is None else 0.0
    needed: dict[str, tuple[tuple[Metric, float | None], ...]] = {
        "lossSpike": ((LM_LOSS, loss),),
        "gradNormSpike": ((RAW_GRAD_NORM, sample.raw_grad_norm),),
        "numZeros": (
            (NUM_ZEROS, sample.num_zeros),
            (NUM_GRAD_ELEMENTS, sample.num_grad_elements),
        ),
        "totalWeights": ((TOTAL_WEIGHTS, sample.total_weights),),
        "zeroLoss": ((LM_LOSS, loss),),
    }
    steps = ((STEP, sample.step),)
    return {
        rule: tuple(metric.name for metric, value in (*steps, *series) if value is None)
        for rule, series in needed.items()
    }


def _verdict(
    state: SeriesState, rule: _Rule, reason: Reason, name: str, what: str
) -> Verdict | None:
    """Return what follows from a row that is long enough.

    The state that a checkpoint of step s holds is judged by the values of step s + 1: the last
    checkpoint that is known to be good is older than the last step that was in order.
    """
    if state.row < rule.consecutive_steps or state.value is None:
        return None
    value = f"{state.value:.6g}"
    return Verdict(
        health=Health.DIVERGED,
        reason=reason,
        message=(
            f"From step {state.first_step} on {what}: {value} at the last one. "
            f"spec.health.{name}.consecutiveSteps is {rule.consecutive_steps}."
        ),
        action=rule.action,
        step=state.first_step,
        value=value,
        restore_before_step=state.first_step if state.good_step is None else state.good_step,
    )
