"""A halted run stays halted, whatever is done to it short of a raised attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from lingcluster.client import ApiError, Manifest, has_condition, wait_for
from lingcluster.kubelet import ProcessKubelet
from lingcluster.operator_process import OperatorProcess, StartOperator
from lingcluster.training_runs import TrainingRuns
from lingcluster.watch import Recording

NAME = "halted"
ATTEMPT = 2


@dataclass
class Scene:
    """A halted run, the operator that halted it, and the pods seen since."""

    runs: TrainingRuns
    operator: OperatorProcess
    pods: Recording

    def new_pods(self) -> list[str]:
        """Return the pods that were made after the halt."""
        self.pods.catch_up()
        names = [c.object["metadata"]["name"] for c in self.pods.changes if c.type == "ADDED"]
        return names[2:]

    def assert_still_halted(self) -> None:
        run = self.runs.get(NAME)
        assert run["status"]["phase"] == "Halted"
        assert has_condition(run, "Halted")
        assert run["status"]["attempt"] == ATTEMPT
        assert self.runs.jobset(NAME)["spec"]["suspend"]
        self.runs.wait_no_live_pod(NAME)

    def wait_observed(self, run: Manifest) -> None:
        """Wait until the operator has seen an edit."""
        generation = run["metadata"]["generation"]
        self.runs.wait(
            NAME,
            f"generation {generation} observed",
            lambda now: now["status"]["observedGeneration"] >= generation,
        )


@pytest.fixture
def scene(
    runs: TrainingRuns, start_operator: StartOperator, scripted_run: Callable[..., Manifest]
) -> Iterator[Scene]:
    """Halted by a scrape, so that its JobSet is only suspended and could go on at any time."""
    operator = start_operator()
    health = {"scrapeIntervalSeconds": 1, "trainerStops": False}
    env = {"NAN_STEP": "10", "STEP_SECONDS": "0.05"}
    with Recording(runs.client.identity, runs.pods_path) as pods:
        runs.apply(scripted_run(NAME, attempt=ATTEMPT, health=health, env=env))
        runs.wait_phase(NAME, "Halted")
        runs.wait_no_live_pod(NAME)
        yield Scene(runs, operator, pods)


def test_edits_of_a_halted_run_are_refused_and_a_lower_attempt_too(scene: Scene) -> None:
    runs = scene.runs
    for edit, words in (
        ({"image": "another:1"}, "spec.image is fixed"),
        ({"run": {"steps": 5}}, "spec.run is fixed"),
        ({"template": {"hostNetwork": True}}, "spec.template is fixed"),
        ({"attempt": ATTEMPT - 1}, "spec.attempt never falls"),
        ({"attempt": ATTEMPT - 1, "image": "another:1"}, "spec.attempt never falls"),
    ):
        with pytest.raises(ApiError, match=words) as refusal:
            runs.edit(NAME, **edit)
        assert refusal.value.status == 422
    scene.wait_observed(runs.edit(NAME, health={"trainerStops": True}))
    scene.assert_still_halted()
    assert scene.new_pods() == []


def test_toggling_suspend_and_restarting_the_operator_leave_a_halted_run_halted(
    scene: Scene, start_operator: StartOperator
) -> None:
    runs = scene.runs
    for suspend in (True, False):
        scene.wait_observed(runs.edit(NAME, suspend=suspend))
        scene.assert_still_halted()
    halt = runs.status(NAME)["halt"]
    scene.operator.stop()
    edited = runs.edit(NAME, health={"scrapeIntervalSeconds": 2})
    start_operator()
    scene.wait_observed(edited)
    scene.assert_still_halted()
    assert runs.status(NAME)["halt"] == halt
    assert scene.new_pods() == []


def test_a_jobset_unsuspended_by_hand_is_suspended_again_and_the_override_is_told(
    scene: Scene, kubelet: ProcessKubelet
) -> None:
    runs = scene.runs
    runs.patch_jobset(NAME, suspend=False)
    event = wait_for(
        "HaltOverridden", lambda: [e for e in runs.events(NAME) if e["reason"] == "HaltOverridden"]
    )
    assert event[0]["type"] == "Warning"
    wait_for("the stop", lambda: runs.jobset(NAME)["spec"]["suspend"])
    runs.wait_no_live_pod(NAME)
    scene.assert_still_halted()
    wait_for("no process", lambda: not kubelet.live_processes(runs.namespace))
