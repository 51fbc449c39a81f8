"""NaN and infinities, by distinct steps in a row. Pure.

A trainer's counters are latched: a NaN between two scrapes is still there at the next. A trainer
that is not ours may have no more than a gauge, or a loss that is NaN: then a step counts that a
page was read in, and without a step number a row is never longer than one.
"""

import math

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
        "new_nonfinite_steps": max(seen - before.process_nonfinite_steps, 0),
        "nonfinite_row": row,
        "longest_nonfinite_row": longest,
        "last_finite_step": _last_finite(before, sample),
    }
    if seen > before.process_nonfinite_steps or longest > before.longest_nonfinite_row:
        update |= _evidence(before, sample, row)
    return update


def judge_nonfinite(state: HealthState, policy: HealthPolicy) -> Verdict | None:
    """Return the verdict of nonFinite if it holds.

    What is to halt the run holds for good. An alert ends with the row that it is about, or the
    next one would not be told.
    """
    rule, longest = policy.non_finite, state.longest_nonfinite_row
    if longest < rule.consecutive_steps:
        return None
    present = max(state.nonfinite_row, state.new_nonfinite_steps)
    if rule.action == "Alert" and present < rule.consecutive_steps:
        return None
    reason = state.signal or Reason.DIVERGED
    what = "gradients are" if reason == Reason.NON_FINITE_GRADIENT else "loss is"
    first = state.first_nonfinite_step
    since = f"From step {first} on the" if first is not None else "The"
    return Verdict(
        health=Health.DIVERGED,
        reason=reason,
        message=(
            f"{since} {what} {state.value or 'not finite'}; "
            f"{longest} in a row, and spec.health.nonFinite.consecutiveSteps is "
            f"{rule.consecutive_steps}."
        ),
        action=rule.action,
        step=state.first_nonfinite_step,
        value=state.value,
    )


def _is_bad(sample: HealthSample) -> bool:
    return _loss_is_nan(sample) or _loss_is_inf(sample) or _gradient_is_bad(sample)


def _loss_is_nan(sample: HealthSample) -> bool:
    return sample.is_nan or any(map(math.isnan, _losses(sample)))


def _loss_is_inf(sample: HealthSample) -> bool:
    return sample.is_inf or any(map(math.isinf, _losses(sample)))


def _gradient_is_bad(sample: HealthSample) -> bool:
    norm = sample.raw_grad_norm
    return sample.grad_is_nonfinite or (
        norm is not None and sample.step != 0 and not math.isfinite(norm)
    )


def _losses(sample: HealthSample) -> list[float]:
    """Return the losses of a step; before the first a gauge may hold whatever it began with."""
    if sample.step == 0:
        return []
    return [loss for loss in (sample.loss, sample.lm_loss) if loss is not None]


def _nonfinite_steps(before: HealthState, sample: HealthSample) -> int:
    """Count the process's non-finite steps: its own counter, or the bad steps seen without one."""
    if sample.nonfinite_steps:
        return sum(count for _, count in sample.nonfinite_steps)
    is_new = before.nonfinite_row == 0 if sample.step is None else sample.step > before.step
    return before.process_nonfinite_steps + int(_is_bad(sample) and is_new)


def _rows(before: HealthState, sample: HealthSample, seen: int) -> tuple[int, int]:
    """Return the row of non-finite steps that reaches the sample, and the longest one known.

    The trainer's own longest row wins. Without it a row is what distinct steps prove: every step
    after the last finite one where the page tells it, else one for each bad step that was seen;
    pages without a step number may all be of one step.
    """
    if not _is_bad(sample):
        row = 0
    elif sample.last_finite_step is not None and sample.step is not None:
        row = max(sample.step - sample.last_finite_step, 1)
    elif sample.step is None:
        row = 1
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
    first = max(last - length + 1, 1) if last else None  # a page may have no step number
    counts = {key: count for key, count in sample.nonfinite_steps if count}
    kinds = {kind for kind, _ in counts}
    signals = {signal for _, signal in counts}
    loss_is_nan, loss_is_inf = _loss_is_nan(sample), _loss_is_inf(sample)
    loss_is_bad = loss_is_nan or loss_is_inf or Reason.NON_FINITE_LOSS in signals
    norm = sample.raw_grad_norm
    norm_is_inf = not loss_is_bad and norm is not None and math.isinf(norm)
    is_inf = (loss_is_inf and not loss_is_nan) or kinds == {"inf"} or norm_is_inf
    return {
        "first_nonfinite_step": first,
        "last_nonfinite_step": last or None,
        "signal": Reason.NON_FINITE_LOSS if loss_is_bad else Reason.NON_FINITE_GRADIENT,
        "value": "inf" if is_inf else "nan",
    }
