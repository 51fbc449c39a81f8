"""Rows of a table of observations and plans, each with the reason why it exists."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ling_operator.api import TrainingRun
from ling_operator.plan import CreateJobSet, DeleteJobSet, Observed, Plan, SetSuspend
from ling_operator.views import Owner

type Facts = dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Row:
    """What is seen, what is wanted, and why the row exists."""

    reason: str
    observed: Callable[[Any], Observed]
    phase: str
    actions: tuple[str, ...] = ()
    conditions: Facts | None = None
    says: str = ""
    """Part of the message of the first of `conditions`."""

    def check(self, scene: Any) -> None:
        """Reconcile what is seen, and compare with what is wanted."""
        plan = scene.reconcile(self.observed(scene))
        got = {c.type: (c.status, c.reason) for c in plan.status.conditions}
        want = self.conditions or {}
        assert (plan.status.phase, act(plan)) == (self.phase, self.actions), f"got {got}"
        assert {kind: got.get(kind) for kind in want} == want
        if self.says:
            said = next(c.message for c in plan.status.conditions if c.type == next(iter(want)))
            assert self.says in said


def act(plan: Plan) -> tuple[str, ...]:
    names = {CreateJobSet: "create", DeleteJobSet: "delete"}
    return tuple(
        ("suspend" if action.suspend else "resume")
        if isinstance(action, SetSuspend)
        else names[type(action)]
        for action in plan.actions
    )


def world(scene: Any, run: TrainingRun, **rest: Any) -> Observed:
    return scene.observed(run, **({"jobset": scene.jobset(), "pods": scene.pods()} | rest))


def foreign_owner(**changes: Any) -> Owner:
    owner = Owner(api_version="apps/v1", kind="Deployment", name="other", uid="other-uid")
    return replace(owner, **changes)
