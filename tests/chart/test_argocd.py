"""Argo CD's health check, run by Lua 5.1, the language of Argo CD's own interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa import lua51

from ling_operator.api import Phase
from lingcluster.client import Manifest


@pytest.fixture(scope="module")
def script(repository: Path) -> str:
    """The check, as its users paste it."""
    return (repository / "manifests" / "argocd" / "trainingrun-health.lua").read_text()


def run_of(phase: str | None, *, seen: int = 2, conditions: tuple[Manifest, ...] = ()) -> Manifest:
    status = {"phase": phase, "observedGeneration": seen, "conditions": list(conditions)}
    return {"metadata": {"generation": 2}, "status": status if phase else None}


def condition(kind: str, truth: str, reason: str, message: str) -> Manifest:
    return {"type": kind, "status": truth, "reason": reason, "message": message}


def check(script: str, run: Manifest) -> tuple[str, str]:
    """Return health and message."""
    lua: Any = lua51.LuaRuntime(unpack_returned_tuples=False)

    def table(node: Any) -> Any:
        if isinstance(node, dict):
            return lua.table_from({k: table(v) for k, v in node.items() if v is not None})
        if isinstance(node, list):
            return lua.table_from([table(each) for each in node])
        return node

    lua.globals()["obj"] = table(run)
    answer = lua.execute(script)
    return answer["status"], answer["message"]


EXPECTED = {
    "Halted": "Degraded",
    "Complete": "Healthy",
    "Failed": "Degraded",
    "Cancelled": "Degraded",
    "Suspended": "Suspended",
    "Restarting": "Progressing",
    "Running": "Healthy",
    "Starting": "Progressing",
    "Queued": "Progressing",
    "Pending": "Progressing",
}


def test_every_phase_has_a_health(script: str) -> None:
    assert EXPECTED.keys() == {phase.value for phase in Phase}
    for phase, health in EXPECTED.items():
        assert check(script, run_of(phase))[0] == health, phase


def test_a_halt_says_why(script: str) -> None:
    halted = condition("Halted", "True", "NonFiniteLoss", "step 120: lm_loss NaN")
    answer = check(script, run_of("Halted", conditions=(halted,)))
    assert answer == ("Degraded", "Halted: NonFiniteLoss: step 120: lm_loss NaN")


@pytest.mark.parametrize(
    ("reason", "health"),
    [
        ("InvalidConfig", "Degraded"),
        ("NameConflict", "Degraded"),
        ("CreateFailed", "Degraded"),
        ("WaitingForPrevious", "Progressing"),
    ],
)
def test_a_run_that_cannot_be_made_says_so(script: str, reason: str, health: str) -> None:
    created = condition("Created", "False", reason, "run.model.numExperts: 0; at least 1")
    answer = check(script, run_of("Pending", conditions=(created,)))
    assert answer == (health, f"Pending: {reason}: run.model.numExperts: 0; at least 1")


def test_a_change_that_the_operator_has_not_seen_is_in_progress(script: str) -> None:
    assert check(script, run_of("Halted", seen=1))[0] == "Progressing"
    assert check(script, run_of(None)) == ("Progressing", "the operator has not seen it yet")


def test_a_running_one_shows_its_step_and_an_alert_without_degrading(script: str) -> None:
    spike = condition("Healthy", "False", "LossSpike", "3.1 over 2.0")
    run = run_of("Running", conditions=(spike,))
    run["status"]["training"] = {"step": 120, "targetSteps": 1000}
    assert check(script, run) == ("Healthy", "step 120 of 1000; LossSpike: 3.1 over 2.0")


def test_the_documents_key_is_the_kinds(repository: Path) -> None:
    text = (repository / "docs" / "install.md").read_text()
    crd = yaml.safe_load((repository / "manifests" / "crd" / "trainingruns.yaml").read_text())
    key = f"resource.customizations.health.{crd['spec']['group']}_{crd['spec']['names']['kind']}"
    assert key in text
