"""When a status is worth a write: evidence at once, progress every ten seconds. Pure.

What is not written is not lost: a trainer's counters are latched, and the next page has them.
"""

from ling_operator.api import SeriesState, TrainingRunStatus, Window
from ling_operator.plan import Observed

_SERIES = ("loss", "grad_norm", "zeros", "weights", "zero_loss")


def settle(observed: Observed, status: TrainingRunStatus) -> TrainingRunStatus:
    """Return the status to write; the one observed where nothing has to be written yet."""
    old = observed.run.status
    if status == old or _without_progress(status) != _without_progress(old):
        return status
    written = old.health.sample_time
    due = written is None or abs(observed.now - written) >= observed.steady_write
    return status if due else old


def _without_progress(status: TrainingRunStatus) -> TrainingRunStatus:
    """Return the status less what moves with every step while nothing is wrong."""
    moving: dict[str, object] = {
        "sample_time": None,
        "progress_time": None,
        "alive_time": None,
        "heartbeat_time": None,
        "stepping": False,
        "missing": (),
        "step": 0,
        "highest_step": 0,
        "last_finite_step": 0,
        "new_nonfinite_steps": 0,
        "step_seconds": Window(),
        "straggler_seconds": None,
        "alerts": tuple(
            alert.model_copy(update={"message": "", "last_time": alert.since})
            for alert in status.health.alerts
        ),
        **{name: _rows(getattr(status.health, name)) for name in _SERIES},
    }
    return status.model_copy(
        update={
            "training": status.training.model_copy(
                update={
                    "step": 0,
                    "loss": None,
                    "tokens_per_second": None,
                    "estimated_completion_time": None,
                }
            ),
            "health": status.health.model_copy(update=moving),
            "conditions": tuple(
                c.model_copy(update={"message": "", "observed_generation": 0})
                for c in status.conditions
            ),
            "attempts": tuple(a.model_copy(update={"last_step": None}) for a in status.attempts),
        }
    )


def _rows(series: SeriesState) -> SeriesState:
    """Return what is evidence: the row. Its window moves with every step."""
    return SeriesState(row=series.row, first_step=series.first_step)
