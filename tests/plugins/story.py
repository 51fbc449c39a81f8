"""A TrainingRun seen pass after pass: what the operator's tests tell their histories with."""

from typing import Any

from ling_operator.api import TrainingRun, TrainingRunStatus
from ling_operator.plan import Plan

WORDS = {"reason": "NonFiniteLoss", "step": 12, "last_finite_step": 11, "value": "nan"}
"""What a trainer says that ends with 90."""


class Story:
    """A run seen again and again; its status is what the last pass wrote.

    Args:
      scene: the builders of tests/operator/conftest.py.
      world: what is seen besides the running JobSet and its pods.
      spec: fields of the run's spec.
    """

    def __init__(self, scene: Any, *, world: dict[str, Any] | None = None, **spec: Any) -> None:
        self.scene = scene
        self.spec = spec
        self.run: TrainingRun = scene.running(**spec)
        self.world: dict[str, Any] = {
            "jobset": scene.jobset(), "pods": scene.pods(), **(world or {}),
        }  # fmt: skip

    @property
    def status(self) -> TrainingRunStatus:
        return self.run.status

    def edit(self, **spec: Any) -> None:
        """Change the spec; the status stays."""
        self.spec |= spec
        self.run = self.scene.run(self.run.status, **self.spec)

    def see(self, seconds: float, **world: Any) -> Plan:
        """Make a pass; what `world` does not name is as it was."""
        self.world |= world
        now = self.scene.at(seconds)
        plan = self.scene.reconcile(self.scene.observed(self.run, **self.world, now=now))
        self.run = self.scene.after(self.run, plan)
        return plan

    def condition(self, kind: str) -> tuple[str, str] | None:
        """Return a condition's status and reason."""
        found = (c for c in self.status.conditions if c.type == kind)
        return next(((c.status, c.reason) for c in found), None)


def kinds(plan: Plan) -> list[str]:
    """Return what a plan does."""
    return [type(action).__name__ for action in plan.actions]


def reasons(plan: Plan) -> list[str]:
    """Return what a plan tells."""
    return [event.reason for event in plan.events]
