"""Mean time to recover, and when a run will be done."""

from datetime import timedelta
from typing import Any

from ling_operator.api import Mttr, TrainingRun


class Life:
    """A run whose passes are a few seconds apart."""

    def __init__(self, scene: Any, **spec: Any) -> None:
        self.scene, self.seconds = scene, 0.0
        self.run: TrainingRun = scene.running(**spec)
        self.world: dict[str, Any] = {"jobset": scene.jobset(), "pods": scene.pods()}

    def look(self, seconds: float, **world: Any) -> TrainingRun:
        self.seconds += seconds
        self.world |= world
        now = self.scene.at(self.seconds)
        observed = self.scene.observed(self.run, **(self.world | {"now": now}))
        self.run = self.scene.after(self.run, self.scene.reconcile(observed))
        return self.run

    def page(self, seconds: float, step: int, uid: str = "pod-0", **page: Any) -> TrainingRun:
        when = self.seconds + seconds
        time = self.scene.at(when)
        page = {"pod_uid": uid, "page_pod_uid": uid, "last_step_time": time, **page}
        return self.look(seconds, sample=self.scene.sample(step, when, **page))

    def restart(self, seconds: float, count: int = 1) -> TrainingRun:
        new = {"restart_attempt": count}
        pods = tuple(self.scene.pod(i, uid=f"r{count}-{i}", **new) for i in range(2))
        return self.look(seconds, jobset=self.scene.jobset(restarts=count), pods=pods)

    @property
    def mttr(self) -> Mttr:
        return self.run.status.mttr


def test_an_outage_lasts_from_the_failure_seen_to_the_next_finished_step(scene: Any) -> None:
    life = Life(scene)
    life.page(1, 50)
    life.look(9, pods=(scene.pod(0), scene.exited(42, 1)))
    assert life.run.status.phase == "Restarting"
    assert life.mttr.down_since == scene.at(10)
    life.page(1, 51)  # the process that is to go shows a step it finished before
    assert life.mttr.recoveries == 0
    life.restart(5)
    life.page(10, 50, "r1-0", last_step_time=None, loss=None, lm_loss=None)  # restored: no step
    assert life.mttr.recoveries == 0
    life.page(14, 51, "r1-0")
    assert life.mttr == Mttr(recoveries=1, total_seconds=30, mean_seconds=30, last_seconds=30)


def test_restarts_before_a_step_are_one_outage_and_the_mean_is_over_outages(scene: Any) -> None:
    life = Life(scene)
    life.page(1, 50)
    life.restart(9, 1)
    life.restart(10, 2)
    life.page(20, 51, "r2-0")
    assert (life.mttr.recoveries, life.mttr.last_seconds) == (1, 30)
    life.restart(10, 3)
    life.page(10, 52, "r3-0")
    assert (life.mttr.recoveries, life.mttr.last_seconds, life.mttr.mean_seconds) == (2, 10, 20)


def test_a_halt_counts_until_the_next_attempt_finishes_a_step(scene: Any) -> None:
    life = Life(scene)
    life.look(5, pods=(scene.exited(90, 0), scene.exited(90, 1)))
    assert life.run.status.phase == "Halted"
    life.run = life.run.model_copy(
        update={"spec": life.run.spec.model_copy(update={"attempt": 2})}
    )
    life.look(3595, jobset=None, pods=())
    new = {"job_set_uid": "js-2", "attempt": 2}
    pods = tuple(scene.pod(i, uid=f"a2-{i}", **new) for i in range(2))
    life.look(60, jobset=scene.jobset(uid="js-2", attempt=2), pods=pods)
    life.page(40, 10, "a2-0")
    assert life.mttr.last_seconds == 3595 + 60 + 40


def test_a_wait_in_the_queue_belongs_to_the_outage_that_it_is_in(scene: Any) -> None:
    life = Life(scene, queue="team")
    life.look(5, pods=(scene.exited(90, 0), scene.exited(90, 1)))
    life.run = life.run.model_copy(
        update={"spec": life.run.spec.model_copy(update={"attempt": 2})}
    )
    life.look(10, jobset=None, pods=())
    life.look(10, jobset=scene.jobset(uid="js-2", attempt=2, suspended=True))
    assert life.run.status.phase == "Queued"
    assert life.mttr.down_since == scene.at(5)


def test_a_run_that_steps_again_is_up_though_a_pod_is_late(scene: Any) -> None:
    life = Life(scene)
    life.page(1, 50)
    life.restart(9)
    late = scene.pod(1, uid="r1-1", restart_attempt=1, phase="Pending", ready=False, ip=None)
    life.look(1, pods=(life.world["pods"][0], late))
    assert life.run.status.phase == "Restarting"
    life.page(10, 51, "r1-0")
    life.page(10, 61, "r1-0")
    assert (life.mttr.recoveries, life.mttr.down_since) == (1, None)


def test_a_pause_is_no_outage_and_ends_one(scene: Any) -> None:
    life = Life(scene)
    life.page(1, 50)
    life.restart(9)
    assert life.mttr.down_since is not None
    life.run = life.run.model_copy(
        update={"spec": life.run.spec.model_copy(update={"suspend": True})}
    )
    life.look(5)
    assert life.mttr == Mttr()


def test_a_healthy_run_has_none(scene: Any) -> None:
    life = Life(scene)
    for step in range(1, 9):
        life.page(5, step)
    assert life.mttr == Mttr()


def test_completion_is_estimated_from_the_median_step_and_only_while_running(scene: Any) -> None:
    life = Life(scene)
    life.page(0, 10)
    assert life.run.status.training.estimated_completion_time is None, "no step was timed"
    life.page(10, 15)
    life.page(10, 20)
    expected = scene.at(20 + 2 * 180)
    assert life.run.status.training.estimated_completion_time == expected
    life.page(60, 30)  # a slow page moves the median little
    estimate = life.run.status.training.estimated_completion_time
    assert estimate is not None
    assert abs(estimate - scene.at(80 + 2 * 170)) < timedelta(seconds=1)
    life.look(1, pods=(scene.pod(0), scene.exited(42, 1)))
    assert life.run.status.training.estimated_completion_time is None


def test_every_condition_is_of_the_generation_that_was_judged(scene: Any) -> None:
    life = Life(scene)
    life.look(5, jobset=scene.jobset(terminal="Completed"), pods=())
    metadata = life.run.metadata.model_copy(update={"generation": 7})
    life.run = life.run.model_copy(update={"metadata": metadata})
    run = life.look(5)
    assert {c.observed_generation for c in run.status.conditions} == {7}
    assert run.status.observed_generation == 7
