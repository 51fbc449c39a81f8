"""Is this run healthy? A fold over samples, and a judgement of the fold. Pure.

A trainer's counters are latched: a NaN between two scrapes is still there at the next. What the
fold keeps is in the object's status, so that a restarted operator goes on where the last one was.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Literal

from ling_operator.api import HealthPolicy, HealthState, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSample:
    """One page of a trainer's /metrics; None for a series that the page does not have.

    Attributes:
      time: when it was read.
      pod_uid: the pod that was asked.
      page_pod_uid: the pod that the page says it is of (ling_run_info); None if it does not say.
      is_nan, is_inf: of the loss of `step`; grad_is_nonfinite: of its raw gradient norm.
      nonfinite_steps: ling_nonfinite_steps_total by (kind, signal), as in ("nan",
        "NonFiniteLoss"); empty if the page has no such series.
      consecutive_max: longest row of non-finite steps since the process started.
      last_step_time: when the trainer finished `step`.
    """

    time: datetime
    pod_uid: str
    page_pod_uid: str | None = None
    step: int | None = None
    target_steps: int | None = None
    loss: float | None = None
    lm_loss: float | None = None
    raw_grad_norm: float | None = None
    num_zeros: float | None = None
    num_grad_elements: float | None = None
    total_weights: float | None = None
    is_nan: bool = False
    is_inf: bool = False
    grad_is_nonfinite: bool = False
    nonfinite_steps: tuple[tuple[tuple[str, str], int], ...] = ()
    consecutive_max: int | None = None
    last_finite_step: int | None = None
    last_nonfinite_step: int | None = None
    last_finite_checkpoint: int | None = None
    last_step_time: datetime | None = None
    tokens_per_second: float | None = None


class Health(StrEnum):
    """The possible judgements."""

    UNKNOWN = "Unknown"
    HEALTHY = "Healthy"
    DIVERGED = "Diverged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A judgement and why.

    Attributes:
      reason: CamelCase, for machines.
      message: a sentence, for people.
      action: what the policy wants done about it.
      step: first bad step.
      value: nan or inf.
    """

    health: Health
    reason: str
    message: str
    action: Literal["Halt", "Alert", "Ignore"] = "Ignore"
    step: int | None = None
    value: str | None = None


def fold(state: HealthState, sample: HealthSample) -> HealthState:
    """Take one page into account; the same page again, or an older one, changes nothing.

    A process that started anew (another pod, or a counter or step that fell) starts a new row of
    non-finite steps: it goes on from a checkpoint, and its own counters say what it has seen.
    The attempt's sums and its highest step go on.
    """
    if state.sample_time is not None and sample.time <= state.sample_time:
        return state
    before = _of_this_process(state, sample)
    step = before.step if sample.step is None else sample.step
    advanced = step > before.step or before.pod_uid is None
    seen = _nonfinite_steps(before, sample)
    row, longest = _rows(before, sample, seen)
    update: dict[str, object] = {
        "pod_uid": sample.pod_uid,
        "sample_time": sample.time,
        "progress_time": sample.time if advanced else before.progress_time,
        "step": step,
        "highest_step": max(before.highest_step, step),
        "nonfinite_steps": before.nonfinite_steps + seen - before.process_nonfinite_steps,
        "process_nonfinite_steps": seen,
        "nonfinite_row": row,
        "longest_nonfinite_row": longest,
        "last_finite_step": _last_finite(before, sample),
    }
    if seen > before.process_nonfinite_steps or longest > before.longest_nonfinite_row:
        update |= _evidence(before, sample, row)
    return before.model_copy(update=update)


def judge(state: HealthState, policy: HealthPolicy) -> Verdict:
    """Read a verdict off the state; without a page there is none."""
    rule = policy.non_finite
    if state.sample_time is None:
        return Verdict(
            health=Health.UNKNOWN, reason=Reason.NO_SAMPLE_YET, message="No metrics were read yet."
        )
    longest = state.longest_nonfinite_row
    if rule.action == "Ignore" or longest < rule.consecutive_steps:
        return Verdict(
            health=Health.HEALTHY,
            reason=Reason.HEALTHY,
            message=f"{state.nonfinite_steps} non-finite steps so far.",
        )
    reason = state.signal or Reason.DIVERGED
    what = "gradients are" if reason == Reason.NON_FINITE_GRADIENT else "loss is"
    return Verdict(
        health=Health.DIVERGED,
        reason=reason,
        message=(
            f"From step {state.first_nonfinite_step} on the {what} {state.value or 'not finite'}; "
            f"{longest} in a row, and spec.health.nonFinite.consecutiveSteps is "
            f"{rule.consecutive_steps}."
        ),
        action=rule.action,
        step=state.first_nonfinite_step,
        value=state.value,
    )


def _of_this_process(state: HealthState, sample: HealthSample) -> HealthState:
    """Return the state with the per-process part cleared if the process is a new one."""
    counted = sum(count for _, count in sample.nonfinite_steps)
    restarted = state.pod_uid is not None and (
        state.pod_uid != sample.pod_uid
        or (sample.step is not None and sample.step < state.step)
        or (bool(sample.nonfinite_steps) and counted < state.process_nonfinite_steps)
    )
    if not restarted:
        return state
    return state.model_copy(
        update={
            "pod_uid": None,
            "step": 0,
            "process_nonfinite_steps": 0,
            "nonfinite_row": 0,
            "longest_nonfinite_row": 0,
            "last_finite_step": 0,
        }
    )


def _is_bad(sample: HealthSample) -> bool:
    return sample.is_nan or sample.is_inf or sample.grad_is_nonfinite


def _nonfinite_steps(before: HealthState, sample: HealthSample) -> int:
    """Count the process's non-finite steps: its own counter, or the bad steps seen without one."""
    if sample.nonfinite_steps:
        return sum(count for _, count in sample.nonfinite_steps)
    new = _is_bad(sample) and sample.step is not None and sample.step > before.step
    return before.process_nonfinite_steps + int(new)


def _rows(before: HealthState, sample: HealthSample, seen: int) -> tuple[int, int]:
    """Return the row of non-finite steps that reaches the sample, and the longest one known.

    The trainer's own longest row wins. Without it a row is what distinct steps prove: every step
    after the last finite one where the page tells it, else one for each bad step that was seen.
    """
    if not _is_bad(sample):
        row = 0
    elif sample.last_finite_step is not None and sample.step is not None:
        row = max(sample.step - sample.last_finite_step, 1)
    else:
        row = before.nonfinite_row + int((sample.step or 0) > before.step)
    latched = int(seen > 0)
    longest = max(before.longest_nonfinite_row, row, latched, sample.consecutive_max or 0)
    return row, longest


def _last_finite(before: HealthState, sample: HealthSample) -> int:
    if sample.last_finite_step is not None:
        return sample.last_finite_step
    finite = sample.step is not None and not _is_bad(sample)
    return sample.step if finite and sample.step is not None else before.last_finite_step


def _evidence(before: HealthState, sample: HealthSample, row: int) -> dict[str, object]:
    """Say which step, which signal and which value: of the row's first step where it is known."""
    last = sample.last_nonfinite_step or sample.step or before.step
    length = row or sample.consecutive_max or 1
    counts = {key: count for key, count in sample.nonfinite_steps if count}
    kinds = {kind for kind, _ in counts}
    signals = {signal for _, signal in counts}
    loss_is_bad = sample.is_nan or sample.is_inf or Reason.NON_FINITE_LOSS in signals
    is_inf = (sample.is_inf and not sample.is_nan) or kinds == {"inf"}
    return {
        "first_nonfinite_step": max(last - length + 1, 1),
        "last_nonfinite_step": last,
        "signal": Reason.NON_FINITE_LOSS if loss_is_bad else Reason.NON_FINITE_GRADIENT,
        "value": "inf" if is_inf else "nan",
    }
