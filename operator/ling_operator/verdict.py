"""Is this run healthy? A fold over samples, and a judgement of the fold. Pure."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Literal


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
