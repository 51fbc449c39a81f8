"""What rules read and what they say: one page of a trainer, heartbeats of hosts, verdicts."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from ling_operator.health_policy import RuleAction


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSample:
    """One page of a trainer's /metrics; None for a series that the page does not have.

    Attributes:
      time: when it was read.
      pod_uid: the pod that was asked.
      page_pod_uid: the pod that the page says it is of (ling_run_info); None if it does not say.
      is_nan, is_inf: of the loss of `step`; grad_is_nonfinite: of its raw gradient norm.
      shows_nonfinite: the page has a series by which a step can be told to be not finite.
      nonfinite_steps: ling_nonfinite_steps_total by (kind, signal), as in ("nan",
        "NonFiniteLoss"); empty if the page has no such series.
      consecutive_max: longest row of non-finite steps since the process started.
      last_step_time: when the trainer finished `step`; None before its first.
      heartbeat: when the process last finished a step or a validation batch, or started.
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
    shows_nonfinite: bool = True
    nonfinite_steps: tuple[tuple[tuple[str, str], int], ...] = ()
    consecutive_max: int | None = None
    last_finite_step: int | None = None
    last_nonfinite_step: int | None = None
    last_finite_checkpoint: int | None = None
    last_step_time: datetime | None = None
    tokens_per_second: float | None = None
    heartbeat: datetime | None = None

    @property
    def is_nonfinite(self) -> bool:
        """Tell whether the page shows a step that was not finite, its last or an earlier one."""
        now = self.is_nan or self.is_inf or self.grad_is_nonfinite
        return now or any(count for _, count in self.nonfinite_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """One host's sign of life.

    Attributes:
      host: name of its node.
      pod_uid: the pod that was asked.
      read_time: when its page was read.
      time: the heartbeat on it.
      container: of the trainer's on the host, from 0.
    """

    host: str
    pod_uid: str
    container: int = 0
    read_time: datetime
    time: datetime


class Health(StrEnum):
    """The possible judgements."""

    UNKNOWN = "Unknown"
    HEALTHY = "Healthy"
    DIVERGED = "Diverged"
    STALLED = "Stalled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A judgement and why.

    Attributes:
      reason: CamelCase, for machines.
      message: a sentence, for people.
      action: what the policy wants done about it.
      step: first bad step.
      value: the bad value, as text.
      restore_before_step: checkpoints of this step and later ones are not trusted; None trusts
        all of them.
    """

    health: Health
    reason: str
    message: str
    action: RuleAction = "Ignore"
    step: int | None = None
    value: str | None = None
    restore_before_step: int | None = None
