"""status.health: the fold over samples, all that verdicts rest on."""

from datetime import datetime

from ling_operator.api_names import Seen


class HealthState(Seen):
    """The fold over samples: all that verdicts rest on, so that a restart forgets nothing."""

    pod_uid: str | None = None
    """Pod of the process that the counters below belong to."""
    sample_time: datetime | None = None
    """When the last page was read."""
    progress_time: datetime | None = None
    """When a page first showed the current step."""
    step: int = 0
    """Last finished step of the last page."""
    highest_step: int = 0
    """Highest step of the attempt, restarts included."""
    nonfinite_steps: int = 0
    """Non-finite steps of the attempt, each counted once."""
    process_nonfinite_steps: int = 0
    """Those of the current process."""
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
