"""What a trainer's process is told: its peers, its run and attempt, its settings."""

import json
from typing import Any

import pytest

from jobset_parts import build, environment, job, pod, trainer, trainers
from ling_trainer.settings import resolve


def test_cpu_processes_find_each_other_by_the_environment(scene: Any) -> None:
    env = environment(build(scene, cpu={"processes": 2}))
    assert env["LING_COORDINATOR_ADDRESS"] == "ling2-slice-job-0-0.ling2:8476"
    assert env["LING_NUM_PROCESSES"] == env["LING_HOSTS_PER_SLICE"] == "2"
    path = env["LING_SLICE_INDEX"]["fieldRef"]["fieldPath"]
    assert path == "metadata.labels['jobset.sigs.k8s.io/job-index']"
    path = env["LING_HOST_INDEX"]["fieldRef"]["fieldPath"]
    assert path == "metadata.labels['batch.kubernetes.io/job-completion-index']"
    assert env["JAX_PLATFORMS"] == "cpu"
    assert "LING_COORDINATOR_ADDRESS" not in environment(build(scene, cpu={"processes": 1}))


def test_tpu_hosts_find_each_other_too_and_gkes_own_variables_are_left_to_gke(scene: Any) -> None:
    env = environment(build(scene, cpu=None, tpu={"accelerator": "v5p-32", "slices": 3}))
    assert env["LING_COORDINATOR_ADDRESS"] == "ling2-slice-job-0-0.ling2:8476"
    assert (env["LING_NUM_PROCESSES"], env["LING_HOSTS_PER_SLICE"]) == ("12", "4")
    assert env["LING_SLICE_INDEX"]["fieldRef"]["fieldPath"].endswith("/job-index']")
    assert not [n for n in env if n.startswith(("TPU_", "MEGASCALE_", "JAX_", "LING_CONTAINER"))]
    alone = environment(build(scene, cpu=None, tpu={"accelerator": "v6e-4"}))
    assert "LING_COORDINATOR_ADDRESS" not in alone


def test_two_containers_of_a_host_share_its_chips_and_have_a_port_a_rule_and_a_process_each(
    scene: Any,
) -> None:
    """As xpk workload create --use-parallel-containers has them."""
    tpu = {"accelerator": "tpu7x-16", "parallelContainers": 2, "slices": 3}
    sidecar = {"name": "logs", "image": "logs:1"}
    template = {"hostNetwork": True, "sidecars": [sidecar]}
    jobset = build(scene, cpu=None, tpu=tpu, template=template)
    first, second = trainers(jobset)
    assert (first["name"], second["name"]) == ("jax-tpu-1", "jax-tpu-2")
    assert pod(jobset)["containers"][2] == sidecar
    assert [c["resources"]["limits"]["google.com/tpu"] for c in (first, second)] == [2, 2]
    assert [c["ports"][0]["containerPort"] for c in (first, second)] == [9464, 9465]
    assert {c["ports"][0]["name"] for c in (first, second)} == {"metrics"}
    annotations = job(jobset)["template"]["metadata"]["annotations"]
    assert annotations["ling.primatrix.io/metrics-port"] == "9464"
    for index in (0, 1):
        env = environment(jobset, index)
        assert env["LING_CONTAINER_INDEX"] == str(index)
        assert (env["LING_CONTAINERS_PER_HOST"], env["LING_HOSTS_PER_SLICE"]) == ("2", "2")
        assert env["LING_NUM_PROCESSES"] == "12"
    rules = [r["onExitCodes"] for r in job(jobset)["podFailurePolicy"]["rules"][1:]]
    assert [(r["containerName"], 90 in r["values"]) for r in rules] == [
        ("jax-tpu-1", True),
        ("jax-tpu-2", True),
        ("jax-tpu-1", False),
        ("jax-tpu-2", False),
    ]


def test_every_process_knows_its_run_attempt_and_pod(scene: Any) -> None:
    env = environment(build(scene, attempt=3))
    assert env["LING_RUN"] == "ling2"
    assert env["LING_RUN_NAMESPACE"] == "team"
    assert env["LING_ATTEMPT"] == "3"
    assert env["POD_UID"]["fieldRef"]["fieldPath"] == "metadata.uid"
    assert env["POD_IP"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert "LING_RESTORE_BEFORE_STEP" not in env
    assert environment(build(scene, restore=50))["LING_RESTORE_BEFORE_STEP"] == "50"


def test_the_trainer_gets_the_users_settings_the_objects_name_and_the_health_rules(
    scene: Any,
) -> None:
    health = {"trainerStops": False, "nonFinite": {"consecutiveSteps": 3}}
    env = environment(build(scene, health=health))
    given = json.loads(env["LING_RUN_CONFIG"])
    assert given["preset"] == "ling2_tiny"
    assert "model" not in given  # the preset's figures are the image's
    config = resolve(given)
    assert config.run_name == "ling2"
    assert config.health.trainer_stops is False
    assert config.health.non_finite_consecutive_steps == 3
    named = environment(build(scene, run=scene.settings | {"runName": "mine"}))
    assert resolve(json.loads(named["LING_RUN_CONFIG"])).run_name == "mine"


@pytest.mark.parametrize("action", ["Alert", "Ignore"])
def test_a_trainer_does_not_stop_itself_where_the_policy_is_not_to_halt(
    scene: Any, action: str
) -> None:
    env = environment(build(scene, health={"nonFinite": {"action": action}}))
    assert resolve(json.loads(env["LING_RUN_CONFIG"])).health.trainer_stops is False


def test_kubernetes_does_not_expand_what_looks_like_a_variable_in_the_settings(scene: Any) -> None:
    run = scene.settings | {"baseOutputDirectory": "runs/$(POD_IP)"}
    assert "runs/$$(POD_IP)" in environment(build(scene, run=run))["LING_RUN_CONFIG"]


def test_the_entry_point_is_the_trainer_unless_the_user_has_one(scene: Any) -> None:
    assert trainer(build(scene))["command"] == ["python3", "-m", "ling_trainer"]
    own = trainer(build(scene, command=["train"], args=["--x"], run=None))
    assert (own["command"], own["args"]) == (["train"], ["--x"])
    assert "LING_RUN_CONFIG" not in {v["name"] for v in own["env"]}


def test_a_users_variable_comes_after_ours_and_replaces_a_free_one(scene: Any) -> None:
    env = [{"name": "JAX_PLATFORMS", "value": "tpu"}, {"name": "ADDRESS", "value": "$(POD_IP)"}]
    names = [v["name"] for v in trainer(build(scene, template={"env": env}))["env"]]
    assert names.count("JAX_PLATFORMS") == 1
    assert names.index("POD_IP") < names.index("ADDRESS")
