"""spec.health: when a run is stopped, when people are told, and by which thresholds."""

from typing import Annotated, Literal

from pydantic import Field

from ling_operator.api_names import PositiveInt
from ling_trainer.schema import Schema


class NonFinitePolicy(Schema):
    """What follows a NaN or an infinity in the loss or in the gradients."""

    consecutive_steps: PositiveInt = 1
    """Non-finite steps in a row that make the run diverged."""
    action: Literal["Halt", "Alert", "Ignore"] = "Halt"
    """Halt stops the run; Alert only sets the condition Healthy to False; Ignore looks away."""


class HealthPolicy(Schema):
    """When a run is stopped. Thresholds act at once; trainerStops from the next attempt on."""

    scrape_interval_seconds: Annotated[int, Field(ge=1, le=3600)] = 5
    """Seconds between two reads of the trainer's metrics."""
    trainer_stops: bool = True
    """The trainer itself stops after nonFinite.consecutiveSteps, without waiting for a scrape."""
    non_finite: NonFinitePolicy = NonFinitePolicy()
