"""NaN and infinities, by distinct steps in a row. Pure.

A trainer's counters are latched: a NaN between two scrapes is still there at the next.
"""

from ling_operator.api import HealthPolicy, HealthState, Reason
from ling_operator.health import Health, HealthSample, Verdict


def fold_nonfinite(before: HealthState, sample: HealthSample) -> dict[str, object]:
    """Return what a new page changes of the counts of non-finite steps.

    Args:
      before: of the same process; see verdict.fold.
      sample: a page that was not folded yet.
    """
    seen = _nonfinite_steps(before, sample)
    row, longest = _rows(before, sample, seen)
    update: dict[str, object] = {
        "nonfinite_steps": before.nonfinite_steps + seen - before.process_nonfinite_steps,
        "process_nonfinite_steps": seen,
        "nonfinite_row": row,
        "longest_nonfinite_row": longest,
        "last_finite_step": _last_finite(before, sample),
    }
    if seen > before.process_nonfinite_steps or longest > before.longest_nonfinite_row:
        update |= _evidence(before, sample, row)
    return update


def judge_nonfinite(state: HealthState, policy: HealthPolicy) -> Verdict | None:
    """Return the verdict of nonFinite if it holds."""
    rule, longest = policy.non_finite, state.longest_nonfinite_row
    if longest < rule.consecutive_steps:
        return None
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
