"""What the operator exports of a run: for every rule of spec.health under every action."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ling_operator.run_series import run_series
from ling_operator.run_view import RunView
from ling_operator.verdict import Heartbeat
from story import Story

Labels = tuple[str, ...]


class Watched(Story):
    """A run whose page is read every 10 s; one step takes 10 s."""

    def __init__(self, scene: Any, **health: Any) -> None:
        super().__init__(scene, health={"trainerStops": False, **health})
        self.step = 0

    @property
    def seconds(self) -> float:
        return 10.0 * self.step

    def steps(self, count: int, **series: Any) -> None:
        for _ in range(count):
            self.step += 1
            page = {"last_step_time": self.scene.at(self.seconds), **series}
            self.see(self.seconds, sample=self.scene.sample(self.step, self.seconds, **page))

    def say_the_same(self, seconds: float) -> None:
        """Read a page that shows no new sign of life."""
        page = replace(self.world["sample"], time=self.scene.at(self.seconds + seconds))
        self.see(self.seconds + seconds, sample=page)

    def beat(self, behind: float) -> None:
        """Read every host's heartbeat; the second one's is behind."""
        at = self.scene.at
        beats = tuple(
            Heartbeat(
                host=f"node-{i}", pod_uid=f"pod-{i}", read_time=at(self.seconds), time=at(time)
            )
            for i, time in enumerate((self.seconds, self.seconds - behind))
        )
        self.see(self.seconds + 1, heartbeats=beats)

    def series(self, name: str) -> dict[Labels, float]:
        """Return a family's samples by their labels, those of the run apart."""
        view = RunView(self.run)
        families = run_series({("team", "ling2"): view})
        samples = [sample for family in families for sample in family.samples]
        keys = [(s.name, *sorted(s.labels.items())) for s in samples]
        assert len(set(keys)) == len(keys), "a page with a series twice is refused whole"
        assert all(math.isfinite(s.value) for s in samples)
        for sample in samples:
            run = sample.labels.pop("run"), sample.labels.pop("run_namespace")
            assert run == ("ling2", "team")
        return {tuple(s.labels.values()): s.value for s in samples if s.name == name}


def _nan(run: Watched) -> None:
    run.step += 1
    run.see(run.seconds, sample=run.scene.nan_sample(run.step, run.seconds))


RULES: dict[str, tuple[str, Callable[[Watched], object]]] = {
    "nonFinite": ("NonFiniteLoss", _nan),
    "lossSpike": ("LossSpike", lambda run: run.steps(3, lm_loss=9.0)),
    "gradNormSpike": ("GradNormSpike", lambda run: run.steps(3, raw_grad_norm=1e3)),
    "numZeros": ("ZeroGradients", lambda run: run.steps(5, num_zeros=990.0)),
    "totalWeights": ("LossMaskCollapse", lambda run: run.steps(5, total_weights=450.0)),
    "zeroLoss": ("ZeroLoss", lambda run: run.steps(10, loss=0.0, lm_loss=0.0)),
    "stall": ("Stalled", lambda run: run.say_the_same(700)),
    "straggler": ("StragglerHost", lambda run: run.beat(250)),
    "metricsMissing": ("MetricsMissing", lambda run: run.see(run.seconds + 60)),
}
"""Each rule's reason, and what makes it hold."""


def test_every_rule_is_made_to_hold_here(scene: Any) -> None:
    health = scene.run().spec.health.model_dump(by_alias=True)
    assert RULES.keys() == {name for name, value in health.items() if isinstance(value, dict)}


def _ill(scene: Any, rule: str, action: str) -> Watched:
    """Return a run in which the rule holds, with this action."""
    run = Watched(scene, **{rule: {"action": action}})
    run.steps(30)
    assert run.series("ling_run_alert") == {}
    RULES[rule][1](run)
    return run


@pytest.mark.parametrize("rule", RULES)
def test_alert_is_a_series_of_its_reason(scene: Any, rule: str) -> None:
    run = _ill(scene, rule, "Alert")
    assert run.series("ling_run_alert") == {(RULES[rule][0],): 1.0}
    assert run.series("ling_run_rule_ignored") == {}
    assert run.series("ling_run_halted") == {(): 0.0}


@pytest.mark.parametrize("rule", RULES)
def test_halt_is_told_as_a_halt_alone(scene: Any, rule: str) -> None:
    run = _ill(scene, rule, "Halt")
    assert run.series("ling_run_alert") == {}
    assert run.series("ling_run_halted") == {(): 1.0}
    assert run.series("ling_run_halted_timestamp_seconds").keys() == {(RULES[rule][0],)}


@pytest.mark.parametrize("rule", RULES)
def test_ignore_tells_nothing_but_that_it_is_ignored(scene: Any, rule: str) -> None:
    run = _ill(scene, rule, "Ignore")
    assert run.series("ling_run_alert") == {}
    assert run.series("ling_run_rule_ignored") == {(rule,): 1.0}
    assert run.series("ling_run_halted") == {(): 0.0}


@pytest.mark.parametrize("rule", RULES)
def test_a_run_without_pods_has_no_alert(scene: Any, rule: str) -> None:
    run = _ill(scene, rule, "Alert")
    run.edit(suspend=True)
    run.see(run.seconds + 70, jobset=run.scene.jobset(suspended=True), pods=())
    assert run.series("ling_run_phase") == {("Suspended",): 1.0}
    assert run.series("ling_run_alert") == {}


def test_the_patience_is_that_of_the_rule_stall_while_pages_are_read(scene: Any) -> None:
    stall = {"floorSeconds": 3600, "compileGraceSeconds": 7200, "factor": 1000}
    run = Watched(scene, stall=stall)
    assert run.series("ling_run_stall_patience_seconds") == {}
    run.see(0, sample=scene.sample(0, 0))
    assert run.series("ling_run_stall_patience_seconds") == {(): 7200.0}
    run.steps(1)
    assert run.series("ling_run_stall_patience_seconds") == {(): 3600.0}
    run.steps(30)
    assert run.series("ling_run_stall_patience_seconds") == {(): 10_000.0}
    run.see(run.seconds + 60)
    assert run.condition("MetricsAvailable") == ("False", "MetricsMissing")
    assert run.series("ling_run_stall_patience_seconds") == {}


def test_a_run_that_cannot_be_read_has_no_series() -> None:
    families = run_series({("team", "newer"): RunView(None, "status.phase: not known")})
    assert [sample for family in families for sample in family.samples] == []
