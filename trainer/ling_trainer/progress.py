"""What a run has been through so far, folded step by step. Pure: no clock, no device, no I/O."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ling_trainer.health_metrics import NonFinite, Signal
from ling_trainer.report import NonFiniteStep

type NonFiniteCounts = Mapping[tuple[NonFinite, Signal], int]

NO_NONFINITE_STEPS: NonFiniteCounts = MappingProxyType(
    dict.fromkeys(itertools.product(NonFinite, Signal), 0)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands. Counts are of this process; a restart starts them at 0.

    Attributes:
      step: last finished step, counted from the run's first; 0 before it.
      last_finite_step: last step with finite loss and gradients. After a restore it is the
        checkpoint's step, since no other state is ever saved.
      last_nonfinite_step: last step without; 0 while there is none.
      nonfinite_row: non-finite steps in a row up to now.
      longest_nonfinite_row: the longest such row.
      nonfinite_steps: steps by kind and signal; every combination is present from the start.
      steps_total: steps this process finished.
      tokens_total: tokens with a loss in them.
      empty_steps_total: steps without such a token.
      last_step_time: when the last step finished, in seconds since the epoch; 0 before.
    """

    step: int = 0
    last_finite_step: int = 0
    last_nonfinite_step: int = 0
    nonfinite_row: int = 0
    longest_nonfinite_row: int = 0
    nonfinite_steps: NonFiniteCounts = NO_NONFINITE_STEPS
    steps_total: int = 0
    tokens_total: int = 0
    empty_steps_total: int = 0
    last_step_time: float = 0.0


def resumed_at(step: int) -> Progress:
    """Start from a checkpoint of a step, or from nothing at step 0."""
    return Progress(step=step, last_finite_step=step)


def fold(
    progress: Progress, *, step: int, tokens: int, bad: NonFiniteStep | None, now: float
) -> Progress:
    """Add one finished step.

    Args:
      progress: before the step.
      step: the step's number.
      tokens: its tokens with a loss.
      bad: what was not finite, or None. A step without tokens is finite.
      now: when it finished, in seconds since the epoch.
    """
    counted = dataclasses.replace(
        progress,
        step=step,
        steps_total=progress.steps_total + 1,
        tokens_total=progress.tokens_total + tokens,
        empty_steps_total=progress.empty_steps_total + (tokens == 0),
        last_step_time=now,
    )
    if bad is None:
        return dataclasses.replace(counted, last_finite_step=step, nonfinite_row=0)
    counts, key = dict(progress.nonfinite_steps), (bad.kind, bad.signal)
    counts[key] += 1
    row = progress.nonfinite_row + 1
    return dataclasses.replace(
        counted,
        last_nonfinite_step=step,
        nonfinite_row=row,
        longest_nonfinite_row=max(row, progress.longest_nonfinite_row),
        nonfinite_steps=MappingProxyType(counts),
    )


def may_be_saved(bad: NonFiniteStep | None, param_norm: float) -> bool:
    """Tell whether the state after a step may become a checkpoint.

    The step itself must be finite, and so must what it left: an update can overflow although loss
    and gradients did not, and the next step would be the first to notice.
    """
    return bad is None and math.isfinite(param_norm)
