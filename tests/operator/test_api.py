"""TrainingRun: what is read, what is refused, what is written back."""

import json
from typing import Any

import pytest
import yaml

from ling_operator.api import (
    Condition,
    Halt,
    Phase,
    TrainingRun,
    TrainingRunStatus,
    dump,
)
from ling_trainer.schema import ConfigError


def test_an_object_gets_the_documented_defaults(scene: Any) -> None:
    spec = TrainingRun.parse(scene.manifest()).spec
    assert (spec.suspend, spec.attempt, spec.restarts) == (False, 1, 3)
    assert spec.health.scrape_interval_seconds == 5
    assert spec.health.trainer_stops is True
    assert spec.health.non_finite.consecutive_steps == 1
    assert spec.health.non_finite.action == "Halt"
    assert spec.template.termination_grace_period_seconds == 300
    assert not spec.template.privileged
    assert not spec.template.host_network
    assert spec.template.ttl_seconds_after_finished is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cpu": {"proceses": 2}}, "spec.cpu.proceses is not a field; did you mean processes?"),
        ({"imag": "x"}, "spec.imag is not a field; did you mean image?"),
        ({"watch": {}}, "spec.watch.jobSet is not set; give it a value"),
        ({"watch": {"jobSet": "Big"}}, "spec.watch.jobSet='Big': "),
        ({"attempt": 0}, "spec.attempt=0: input should be greater than or equal to 1"),
        ({"attempt": "2"}, "spec.attempt='2': input should be a valid integer"),
        ({"suspend": "yes"}, "spec.suspend='yes': input should be a valid boolean"),
        ({"tpu": {"accelerator": "v5p-8", "topology": "2x2"}, "cpu": None}, ""),
        ({"tpu": {"accelerator": "v5p-8", "topology": "big"}}, "spec.tpu.topology='big': "),
        (
            {"health": {"lossSpike": {"window": 5}}},
            "spec.health.lossSpike.window=5: input should be greater than or equal to 10",
        ),
        (
            {"health": {"lossSpikes": {}}},
            "spec.health.lossSpikes is not a field; did you mean lossSpike?",
        ),
        (
            {"health": {"stall": {"action": "Restart"}}},
            "spec.health.stall.action='Restart': input should be 'Halt', 'Alert' or 'Ignore'",
        ),
        ({"run": {"x": float("nan")}}, "NaN and infinities have no place in a TrainingRun"),
    ],
)
def test_a_bad_field_is_refused_by_the_name_it_has_in_the_file(
    scene: Any, change: dict[str, Any], message: str
) -> None:
    manifest = scene.manifest(**change)
    if not message:  # the shape of the value is right; that no such slice exists is seen later
        TrainingRun.parse(manifest)
        return
    with pytest.raises(ConfigError) as refused:
        TrainingRun.parse(manifest)
    assert message in str(refused.value)


def test_yaml_with_a_timestamp_is_read(scene: Any) -> None:
    manifest = scene.manifest()
    manifest["metadata"]["creationTimestamp"] = "2026-11-30T09:00:00Z"
    text = yaml.safe_dump(manifest).replace("'2026-11-30T09:00:00Z'", "2026-11-30T09:00:00Z")
    assert TrainingRun.parse(yaml.safe_load(text)).metadata.name == "ling2"


def test_a_status_of_a_newer_operator_is_read_and_its_halt_is_kept(scene: Any) -> None:
    manifest = scene.manifest()
    manifest["status"] = {
        "attempt": 1,
        "phase": "Halted",
        "halt": {"reason": "LossSpike", "time": "2026-11-30T09:00:00Z", "window": 50},
        "eta": "3h",
    }
    status = TrainingRun.parse(manifest).status
    assert status.phase == Phase.HALTED
    assert status.halt is not None
    assert status.halt.reason == "LossSpike"


def test_a_stored_status_says_absent_instead_of_null_and_uses_kubernetes_spelling(
    scene: Any,
) -> None:
    status = TrainingRunStatus(
        job_set_uid="js-1",
        halt=Halt(reason="NonFiniteLoss", time=scene.now),
        conditions=(
            Condition(type="Halted", status="True", reason="X", last_transition_time=scene.now),
        ),
    )
    stored = dump(status)
    assert stored["jobSetUID"] == "js-1"
    assert stored["conditions"][0]["lastTransitionTime"] == "2026-11-30T09:00:00Z"
    assert "null" not in json.dumps(stored)
    assert "lastFiniteCheckpoint" not in stored
