"""From a rule to what people see: conditions, events, halts, and the next attempt."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ling_operator.plan import CreateJobSet, Plan, SetSuspend
from ling_operator.progress import heartbeat_targets
from ling_operator.verdict import Heartbeat
from story import Story


class Watched(Story):
    """A run whose page is read every 10 s; one step takes 10 s."""

    def __init__(self, scene: Any, **health: Any) -> None:
        super().__init__(scene, health=health)
        self.events: dict[str, str] = {}
        self.step = 0

    def see(self, seconds: float, **world: Any) -> Plan:
        plan = super().see(seconds, **world)
        self.events |= {event.name(self.run): event.reason for event in plan.events}
        return plan

    def steps(self, count: int, **series: Any) -> Plan:
        plan = None
        for _ in range(count):
            self.step += 1
            seconds = 10.0 * self.step
            time = self.scene.at(seconds)
            page = {"last_step_time": time, "heartbeat": time, **series}
            sample = self.scene.sample(self.step, seconds, **page)
            plan = self.see(seconds, sample=sample)
        assert plan is not None
        return plan

    def told(self, reason: str) -> int:
        return list(self.events.values()).count(reason)


def test_an_alert_is_a_condition_and_one_event_and_the_run_goes_on(scene: Any) -> None:
    run = Watched(scene)
    run.steps(20)
    assert run.condition("Healthy") == ("True", "Healthy")
    run.steps(2, lm_loss=8.0)
    assert run.condition("Healthy") == ("True", "Healthy")
    for _ in range(20):
        assert run.steps(1, lm_loss=8.0).actions == ()
        assert run.condition("Healthy") == ("False", "LossSpike")
    assert (run.status.phase, run.told("LossSpike")) == ("Running", 1)
    (alert,) = run.status.health.alerts
    assert (alert.reason, alert.step, alert.since) == ("LossSpike", 21, scene.at(230))


def test_each_row_of_steps_that_are_not_finite_is_an_alert_of_its_own(scene: Any) -> None:
    run = Watched(scene, nonFinite={"action": "Alert", "consecutiveSteps": 2})
    run.steps(20)
    told = 0
    for row in (1, 2, 1, 3):  # one step is fewer than consecutiveSteps
        before = sum(count for _, count in run.world["sample"].nonfinite_steps)
        longest = max(run.world["sample"].consecutive_max, row)
        run.step += row - 1  # a page is read after the last of them
        counts = ((("nan", "NonFiniteLoss"), before + row),)
        after = {"nonfinite_steps": counts, "consecutive_max": longest}
        bad = {"is_nan": True, "lm_loss": float("nan"), "last_finite_step": run.step + 1 - row}
        assert run.steps(1, **after, **bad).actions == ()
        told += row > 1
        assert run.told("NonFiniteLoss") == told
        assert run.condition("Healthy") == (
            ("False", "NonFiniteLoss") if row > 1 else ("True", "Healthy")
        )
        run.steps(40, **after)
        assert run.condition("Healthy") == ("True", "Healthy")


def test_a_loss_that_hovers_at_the_threshold_is_told_once(scene: Any) -> None:
    run = Watched(scene)
    run.steps(20)
    for _ in range(10):
        run.steps(3, lm_loss=8.0)
        run.steps(3)
        assert run.condition("Healthy") == ("False", "LossSpike")
    assert run.told("LossSpike") == 1
    run.steps(30)
    assert run.condition("Healthy") == ("True", "Healthy")
    run.steps(3, lm_loss=8.0)
    assert run.told("LossSpike") == 2


def test_a_second_alert_is_told_even_hours_after_the_first_began(scene: Any) -> None:
    run = Watched(scene)
    run.steps(20, raw_grad_norm=1.0)
    run.steps(400, lm_loss=8.0, raw_grad_norm=1.0)
    assert 400 * 10 > 50 * 60
    run.steps(3, lm_loss=8.0, raw_grad_norm=100.0)
    assert (run.told("LossSpike"), run.told("GradNormSpike")) == (1, 1)
    assert run.condition("Healthy") == ("False", "LossSpike")


def test_an_alert_that_takes_over_from_another_is_told_once(scene: Any) -> None:
    run = Watched(scene)
    run.steps(20, raw_grad_norm=1.0)
    run.steps(3, lm_loss=8.0, raw_grad_norm=1.0)
    run.steps(6, raw_grad_norm=100.0)
    assert run.condition("Healthy") == ("False", "GradNormSpike")
    assert (run.told("LossSpike"), run.told("GradNormSpike")) == (1, 1)


def test_a_halt_for_a_spike_makes_the_next_attempt_restore_before_it(scene: Any) -> None:
    run = Watched(scene, lossSpike={"action": "Halt"})
    run.steps(20)
    plan = run.steps(3, lm_loss=8.0)
    assert plan.actions == (SetSuspend("js-1", True, "LossSpike"),)
    halt = run.status.halt
    assert halt is not None
    assert (halt.reason, halt.step, halt.value) == ("LossSpike", 21, "8")
    assert halt.host == "node-0"
    assert halt.restore_before_step == 20
    assert run.told("LossSpike") == 1
    run.see(240, jobset=scene.jobset(suspended=True), pods=())
    run.edit(attempt=2)
    (create,) = run.see(250, jobset=None).actions
    assert isinstance(create, CreateJobSet)
    job = create.manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    env = {v["name"]: v.get("value") for v in job["template"]["spec"]["containers"][0]["env"]}
    assert env["LING_RESTORE_BEFORE_STEP"] == "20"


@pytest.mark.parametrize("action", ["Alert", "Ignore"])
def test_a_run_halted_for_a_spike_stays_halted_whatever_the_loss_and_the_policy_do(
    scene: Any, action: str
) -> None:
    run = Watched(scene, lossSpike={"action": "Halt"})
    run.steps(20)
    run.steps(3, lm_loss=8.0)
    before = run.status.halt
    run.edit(health={"lossSpike": {"action": action}})
    run.steps(5)
    assert (run.status.phase, run.status.halt) == ("Halted", before)


def test_a_loss_of_0_halts_by_default(scene: Any) -> None:
    run = Watched(scene)
    run.steps(20)
    run.steps(9, loss=0.0, lm_loss=0.0)
    assert run.status.phase == "Running"
    run.steps(1, loss=0.0, lm_loss=0.0)
    assert (run.status.phase, run.condition("Halted")) == ("Halted", ("True", "ZeroLoss"))


def test_a_stall_is_said_by_progressing_too_and_halts_only_if_asked_to(scene: Any) -> None:
    for action, phase in (("Alert", "Running"), ("Halt", "Halted")):
        run = Watched(scene, stall={"action": action})
        run.steps(20)
        last = run.world["sample"]
        run.see(900, sample=replace(last, time=scene.at(900)))
        assert run.condition("Progressing") == ("False", "Stalled")
        assert run.condition("Healthy") == ("False", "Stalled")
        assert run.status.phase == phase
        assert run.told("Stalled") == 1
        halt = run.status.halt
        assert halt is None or halt.restore_before_step is None


def test_a_host_that_is_behind_is_named_in_the_condition(scene: Any) -> None:
    run = Watched(scene)
    run.steps(30)
    times = {"pod-0": 299, "pod-1": 20, "of-an-old-attempt": 1, "dead": 2}
    beats = tuple(
        Heartbeat(host=f"node-{i}", pod_uid=uid, read_time=scene.at(300), time=scene.at(t))
        for i, (uid, t) in enumerate(times.items())
    )
    dead = scene.pod(1, uid="dead", phase="Failed")
    run.see(301, heartbeats=beats, pods=(*scene.pods(), dead))
    assert run.condition("Healthy") == ("False", "StragglerHost")
    (alert,) = run.status.health.alerts
    assert "node-1 is 279 s behind" in alert.message


@pytest.mark.parametrize(
    ("action", "phase", "condition"),
    [
        ("Alert", "Running", ("False", "MetricsMissing")),
        ("Ignore", "Running", ("Unknown", "MetricsMissing")),
        ("Halt", "Halted", ("False", "MetricsMissing")),
    ],
)
def test_missing_metrics_do_what_their_rule_says(
    scene: Any, action: str, phase: str, condition: tuple[str, str]
) -> None:
    run = Watched(scene, metricsMissing={"action": action, "floorSeconds": 100})
    run.steps(3)
    run.see(30 + 100)
    assert run.condition("MetricsAvailable") == ("True", "Scraped")
    run.see(30 + 101)
    assert (run.status.phase, run.condition("MetricsAvailable")) == (phase, condition)
    assert run.told("MetricsMissing") == int(action != "Ignore")
    if phase == "Halted":
        assert run.status.halt is not None
        assert run.status.halt.restore_before_step is None


def test_metrics_that_are_read_rarely_are_missed_after_three_intervals(scene: Any) -> None:
    run = Watched(scene, scrapeIntervalSeconds=60)
    run.steps(3)
    run.see(30 + 180)
    assert run.condition("MetricsAvailable") == ("True", "Scraped")
    run.see(30 + 181)
    assert run.condition("MetricsAvailable") == ("False", "MetricsMissing")


def test_rules_without_their_series_are_named_where_metrics_are_said_to_be_read(
    scene: Any,
) -> None:
    run = Watched(scene)
    run.steps(3, num_zeros=None, total_weights=None)
    (condition,) = [c for c in run.status.conditions if c.type == "MetricsAvailable"]
    assert (condition.status, condition.reason) == ("True", "MetricsMissing")
    assert condition.message.endswith(
        "Rules without their series: numZeros (ling_learning_num_zeros), "
        "totalWeights (ling_learning_total_weights)."
    )
    assert (run.status.phase, run.told("MetricsMissing")) == ("Running", 0)
    halting = Watched(scene, metricsMissing={"action": "Halt"})
    halting.steps(3, num_zeros=None)
    assert halting.status.phase == "Running", "a page was read"


def test_a_row_that_grows_is_written_at_once_and_an_alert_that_lasts_is_not(scene: Any) -> None:
    run = Watched(scene)
    run.steps(20)

    def read(seconds: float, step: int) -> bool:
        before = run.status
        sample = scene.sample(step, seconds, lm_loss=8.0, last_step_time=scene.at(seconds))
        run.see(seconds, sample=sample)
        return run.status != before

    assert [read(201 + i, 21 + i) for i in range(5)] == [True, True, True, False, False]
    assert run.status.health.loss.row == 3


def test_every_host_of_the_newest_restart_is_asked_for_its_heartbeat(scene: Any) -> None:
    run = Watched(scene)
    run.steps(1)
    new = scene.pods(restart_attempt=1)
    old = scene.pod(1, uid="old", phase="Failed")
    assert heartbeat_targets(run.run, (old, *new)) == new
    pending = scene.pod(1, restart_attempt=1, phase="Pending", ip=None)
    assert heartbeat_targets(run.run, (new[0], pending)) == (new[0],)
    run.steps(1, is_nan=True)
    assert run.status.phase == "Halted"
    assert heartbeat_targets(run.run, new) == ()


def test_an_alert_ends_five_minutes_after_it_last_held(scene: Any) -> None:
    run = Watched(scene)
    run.steps(20)
    run.steps(3, lm_loss=8.0)
    held = timedelta(seconds=10 * run.step)
    run.steps(29)
    assert run.condition("Healthy") == ("False", "LossSpike")
    run.steps(1)
    assert run.condition("Healthy") == ("True", "Healthy")
    assert timedelta(seconds=10 * run.step) - held == timedelta(minutes=5)
