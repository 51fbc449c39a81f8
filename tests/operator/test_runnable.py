"""What cannot run is refused before there is a JobSet, with the field and the remedy."""

from typing import Any

import pytest

from ling_operator.jobset import build_jobset
from ling_operator.runnable import RUN_CONFIG_LIMIT, require_runnable
from ling_trainer.schema import ConfigError


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"cpu": None}, "spec: set exactly one of tpu, cpu and watch"),
        ({"tpu": {"accelerator": "v5p-8"}}, "spec: set exactly one of tpu, cpu and watch"),
        ({"watch": {"jobSet": "x"}}, "spec: set exactly one of tpu, cpu and watch"),
        ({"image": None}, "spec.image is not set; name the trainer's container image"),
        ({"run": None}, "spec.run is empty; name a preset"),
        (
            {"run": {"preset": "ling2_tinny"}},
            "spec.run: preset='ling2_tinny' is not known; choose one of ling2_tiny",
        ),
        (
            {"run": {"preset": "ling2_tiny", "stepz": 3}},
            "spec.run: stepz is not a setting; did you mean steps?",
        ),
        (
            {"run": {**{"preset": "ling2_tiny"}, "trainerStops": False}},
            "spec.run: ",
        ),
        (
            {"cpu": None, "tpu": {"accelerator": "v6e-4", "slices": 2}},
            "several slices need a topology of more than one host",
        ),
        ({"cpu": None, "tpu": {"accelerator": "v9"}}, "spec.tpu.accelerator='v9' is not known"),
        (
            {"template": {"env": [{"name": "LING_ATTEMPT", "value": "1"}]}},
            "spec.template.env sets LING_ATTEMPT, which the operator sets; remove it",
        ),
        (
            {"template": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}},
            "spec.template.labels sets kueue.x-k8s.io/queue-name",
        ),
        (
            {"template": {"annotations": {"ling.primatrix.io/metrics-port": "1"}}},
            "spec.template.annotations sets ling.primatrix.io/metrics-port",
        ),
        ({"template": {"resources": {"limits": "4"}}}, "spec.template.resources.limits"),
        ({"template": {"sidecars": [{"name": "jax-tpu"}]}}, "the name jax-tpu is taken"),
        (
            {
                "cpu": None,
                "tpu": {"accelerator": "tpu7x-8", "parallelContainers": 2},
                "template": {"sidecars": [{"name": "jax-tpu-2"}]},
            },
            "the name jax-tpu-2 is taken",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_field_and_remedy(
    scene: Any, spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        require_runnable(scene.run(**spec))
    assert message in str(refused.value)


def test_health_settings_have_one_place(scene: Any) -> None:
    for key in ({"health": {"trainer_stops": False}}, {"trainerStops": False}):
        with pytest.raises(ConfigError, match=r"use spec\.health\.trainerStops"):
            require_runnable(scene.run(run=scene.settings | key))


def test_a_port_that_nobody_could_scrape_is_refused(scene: Any) -> None:
    with pytest.raises(ConfigError, match="metricsPort=0"):
        require_runnable(scene.run(run=scene.settings | {"metrics": {"metricsPort": 0}}))


@pytest.mark.parametrize(
    ("port", "tpu", "why"),
    [
        (8476, {"accelerator": "v6e-1"}, "8476 is the coordination service's"),
        (8475, {"accelerator": "tpu7x-8", "parallelContainers": 2}, "8476 is the"),
        (65535, {"accelerator": "tpu7x-8", "parallelContainers": 2}, "2 containers reach beyond"),
    ],
)
def test_a_port_that_somebody_else_has_is_refused(
    scene: Any, port: int, tpu: dict[str, Any], why: str
) -> None:
    settings = scene.settings | {"metrics": {"metricsPort": port}}
    with pytest.raises(ConfigError, match=rf"metricsPort={port}: {why}"):
        require_runnable(scene.run(run=settings, cpu=None, tpu=tpu))


def test_settings_that_no_environment_variable_can_hold_are_refused(scene: Any) -> None:
    run = scene.settings | {"baseOutputDirectory": "x" * RUN_CONFIG_LIMIT}
    with pytest.raises(ConfigError, match=r"bytes as JSON, at most 102400 fit"):
        require_runnable(scene.run(run=run))


@pytest.mark.parametrize("name", ["Ling", "1st", "a.b", "a-", "n" * 44])
def test_a_name_that_is_no_host_name_is_refused(scene: Any, name: str) -> None:
    run = scene.run()
    metadata = run.metadata.model_copy(update={"name": name})
    with pytest.raises(ConfigError, match=r"metadata\.name"):
        require_runnable(run.model_copy(update={"metadata": metadata}))


def test_every_problem_is_told_at_once(scene: Any) -> None:
    spec = {"cpu": None, "run": {"preset": "x"}, "template": {"env": [{"name": "POD_IP"}]}}
    with pytest.raises(ConfigError) as refused:
        require_runnable(scene.run(image=None, **spec))
    assert len(str(refused.value).splitlines()) == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("image", "trainer:1"),
        ("command", ["a"]),
        ("args", ["a"]),
        ("run", {"preset": "ling2_tiny"}),
        ("queue", "team"),
        ("restarts", 0),
        ("template", {"hostNetwork": True}),
        ("health", {"haltMode": "Fail"}),
    ],
)
def test_what_belongs_to_a_watched_jobsets_launcher_is_refused(
    scene: Any, field: str, value: Any
) -> None:
    watching = {"watch": {"jobSet": "x"}, "image": None, "cpu": None, "run": None}
    require_runnable(scene.run(**watching))
    with pytest.raises(ConfigError, match=rf"^spec\.{field}"):
        require_runnable(scene.run(**watching | {field: value}))


def test_no_jobset_is_made_of_a_run_that_watches_one(scene: Any) -> None:
    run = scene.run(watch={"jobSet": "x"}, image=None, cpu=None, run=None)
    with pytest.raises(ConfigError, match="none is made"):
        build_jobset(run, attempt=1, restore_before_step=None)
