"""status.health: the fold over samples, all that verdicts rest on, bounded in size.

Numbers here are finite: what is not is told by `value` as text, and never enters a window.
"""

from datetime import datetime

from ling_operator.api_names import Seen


class Window(Seen):
    """The last unsuspicious values of a series, oldest first, as many as the rule's window."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()


class SeriesState(Seen):
    """What a rule keeps of its series."""

    window: Window = Window()
    row: int = 0
    """Suspicious steps in a row up to the last one seen, counted up to consecutiveSteps."""
    first_step: int | None = None
    """First step of the row."""
    good_step: int | None = None
    """Last step seen that was not suspicious."""
    value: float | None = None
    """The series at the last suspicious step."""
    reference: float | None = None
    """Highest median of the attempt, where the rule compares with that."""


class Alert(Seen):
    """A rule that holds, or held a moment ago."""

    reason: str
    message: str = ""
    step: int | None = None
    """First bad step."""
    since: datetime
    """When it began."""
    last_time: datetime
    """When it last held."""


class HealthState(Seen):
    """The fold over samples: all that verdicts rest on, so that a restart forgets nothing."""

    pod_uid: str | None = None
    """Pod of the process that the counters below belong to."""
    sample_time: datetime | None = None
    """When the last page was read."""
    progress_time: datetime | None = None
    """When a page first showed the current step."""
    alive_time: datetime | None = None
    """When a page last showed a sign of life: a step, or a validation batch."""
    heartbeat_time: datetime | None = None
    """Heartbeat of process 0, by its own clock."""
    stepping: bool = False
    """The current process has finished a step; until then it starts, restores and compiles."""
    step: int = 0
    """Last finished step of the last page."""
    highest_step: int = 0
    """Highest step of the attempt, restarts included."""
    nonfinite_steps: int = 0
    """Non-finite steps of the attempt, each counted once."""
    process_nonfinite_steps: int = 0
    """Those of the current process."""
    new_nonfinite_steps: int = 0
    """Those that the last page told of and the one before did not."""
    nonfinite_row: int = 0
    """Non-finite steps in a row up to the last one seen."""
    longest_nonfinite_row: int = 0
    """Longest row of the current process."""
    first_nonfinite_step: int | None = None
    """First step of the last row."""
    last_nonfinite_step: int | None = None
    last_finite_step: int = 0
    signal: str | None = None
    """NonFiniteLoss or NonFiniteGradient."""
    value: str | None = None
    """nan or inf."""
    loss: SeriesState = SeriesState()
    """lm_loss, for lossSpike."""
    grad_norm: SeriesState = SeriesState()
    """raw_grad_norm, for gradNormSpike."""
    zeros: SeriesState = SeriesState()
    """num_zeros / num_grad_elements, for numZeros."""
    weights: SeriesState = SeriesState()
    """total_weights, for totalWeights."""
    zero_loss: SeriesState = SeriesState()
    """lm_loss, for zeroLoss; its window is empty."""
    step_seconds: Window = Window()
    """Seconds a step took between two pages; its median is the time of a step."""
    straggler: str | None = None
    """Host whose heartbeat is behind the others'."""
    straggler_seconds: int | None = None
    """How far."""
    shows_step: bool = True
    """The last page had a step number."""
    missing: tuple[str, ...] = ()
    """Rules that cannot be judged for want of series, each with the names of these."""
    alerts: tuple[Alert, ...] = ()
