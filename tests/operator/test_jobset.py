"""The JobSet of an attempt: XPK's shape, the exit codes' meaning, the trainer's environment."""

import itertools
import json
import re
from typing import Any

import pytest

from ling_operator.jobset import build_jobset, template_hash
from ling_operator.name_budget import name_budget
from ling_operator.runnable import RUN_CONFIG_LIMIT, require_runnable
from ling_trainer.schema import ConfigError
from ling_trainer.settings import resolve

PLACES: list[dict[str, Any]] = [
    {"cpu": {"processes": 1}},
    {"cpu": {"processes": 3}},
    {"cpu": None, "tpu": {"accelerator": "v6e-1"}},
    {"cpu": None, "tpu": {"accelerator": "v4-64"}},
    {"cpu": None, "tpu": {"accelerator": "tpu-v5-lite-podslice", "topology": "4x4"}},
    {"cpu": None, "tpu": {"accelerator": "v5p-128", "slices": 3}},
    {"cpu": None, "tpu": {"accelerator": "tpu7x", "topology": "2x2x2"}},
    {"cpu": None, "tpu": {"accelerator": "tpu7x-16", "parallelContainers": 2, "slices": 2}},
]
TEMPLATES: list[dict[str, Any]] = [
    {},
    {
        "hostNetwork": True,
        "privileged": True,
        "terminationGracePeriodSeconds": 600,
        "env": [{"name": "LING_ALLOW_FAULT_INJECTION", "value": "1"}],
        "labels": {"team": "ling"},
        "annotations": {"gke-gcsfuse/volumes": "true"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "nodeSelector": {"pool": "a"},
        "volumes": [{"name": "data", "emptyDir": {}}],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "resources": {"requests": {"cpu": "4"}, "limits": {"memory": "8Gi"}},
        "serviceAccountName": "trainer",
        "imagePullSecrets": [{"name": "pull"}],
        "priorityClassName": "high",
        "initContainers": [{"name": "fetch", "image": "fetch:1"}],
        "sidecars": [{"name": "logs", "image": "logs:1"}],
        "ttlSecondsAfterFinished": 60,
    },
]
MATRIX = list(itertools.product(PLACES, TEMPLATES))


def build(scene: Any, attempt: int = 1, restore: int | None = None, **spec: Any) -> dict[str, Any]:
    return build_jobset(scene.run(**spec), attempt=attempt, restore_before_step=restore)


def job(jobset: dict[str, Any]) -> dict[str, Any]:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]


def pod(jobset: dict[str, Any]) -> dict[str, Any]:
    return job(jobset)["template"]["spec"]


def trainers(jobset: dict[str, Any]) -> list[dict[str, Any]]:
    return [c for c in pod(jobset)["containers"] if c["name"].startswith("jax-tpu")]


def trainer(jobset: dict[str, Any]) -> dict[str, Any]:
    return trainers(jobset)[0]


def environment(jobset: dict[str, Any], container: int = 0) -> dict[str, Any]:
    variables = trainers(jobset)[container]["env"]
    return {v["name"]: v.get("value", v.get("valueFrom")) for v in variables}


@pytest.mark.parametrize(("place", "template"), MATRIX)
def test_every_jobset_is_shaped_as_xpk_shapes_it(
    scene: Any, place: dict[str, Any], template: dict[str, Any]
) -> None:
    jobset = build(scene, **place, template=template)
    assert jobset["metadata"]["name"] == "ling2"
    (replicated,) = jobset["spec"]["replicatedJobs"]  # GKE's JobSet metrics know only one
    assert replicated["name"] == "slice-job"
    assert replicated["replicas"] == (place.get("tpu") or {}).get("slices", 1)
    assert job(jobset)["parallelism"] == job(jobset)["completions"]
    assert job(jobset)["completionMode"] == "Indexed"
    assert job(jobset)["backoffLimit"] == 0
    assert trainer(jobset)["name"] in {"jax-tpu", "jax-tpu-1"}
    assert pod(jobset)["restartPolicy"] == "Never"
    assert "coordinator" not in jobset["spec"]  # it would leave 24 characters for the name
    for labelled in (
        jobset["metadata"],
        replicated["template"]["metadata"],
        job(jobset)["template"]["metadata"],
    ):
        assert labelled["labels"]["xpk.google.com/workload"] == "ling2"
        assert labelled["labels"]["ling.primatrix.io/run"] == "ling2"
        assert labelled["labels"]["ling.primatrix.io/attempt"] == "1"
    if place.get("tpu"):
        chips = [c["resources"]["limits"]["google.com/tpu"] for c in trainers(jobset)]
        assert chips in ([1], [4], [2, 2])
        assert {"key": "google.com/tpu", "operator": "Exists"} in pod(jobset)["tolerations"]
        assert "cloud.google.com/gke-tpu-topology" in pod(jobset)["nodeSelector"]
        topology = jobset["metadata"]["annotations"]
        assert topology["alpha.jobset.sigs.k8s.io/exclusive-topology"].endswith("gke-nodepool")


@pytest.mark.parametrize(("place", "template"), MATRIX)
def test_every_default_that_a_webhook_would_fill_in_is_written_out(
    scene: Any, place: dict[str, Any], template: dict[str, Any]
) -> None:
    spec = build(scene, **place, template=template)["spec"]
    assert spec["suspend"] is False
    assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    assert spec["successPolicy"] == {"operator": "All"}
    assert spec["failurePolicy"]["restartStrategy"] == "Recreate"
    assert all(rule["name"] for rule in spec["failurePolicy"]["rules"])
    assert spec["replicatedJobs"][0]["groupName"] == "default"


def test_final_codes_fail_restartable_codes_restart_and_disruption_is_no_failure(
    scene: Any,
) -> None:
    jobset = build(scene, restarts=7)
    disruption, final, again = job(jobset)["podFailurePolicy"]["rules"]
    assert disruption["action"] == "Ignore"
    assert disruption["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert final["onExitCodes"]["values"] == [2, 3, 4, 5, 90]
    assert again["onExitCodes"]["values"] == [42, 134, 139, 143]
    assert {rule["onExitCodes"]["containerName"] for rule in (final, again)} == {"jax-tpu"}
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7
    restartable, fail = policy["rules"]
    assert restartable["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert fail["action"] == "FailJobSet"
    (pattern,) = restartable["onJobFailureMessagePatterns"]
    says = "Container jax-tpu for pod ns/p failed with exit code {} matching FailJob rule at index"
    for code in (42, 134, 139, 143):
        assert re.search(pattern, says.format(code))
    for code in (1, 2, 90, 13, 1434, 42000):
        assert not re.search(pattern, says.format(code))


def test_the_object_owns_its_jobset_and_deleting_it_blocks_nothing(scene: Any) -> None:
    (owner,) = build(scene)["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["controller"]) == ("TrainingRun", "ling2", True)
    assert "blockOwnerDeletion" not in owner


def test_nothing_is_privileged_on_the_nodes_network_or_short_of_time_unless_asked(
    scene: Any,
) -> None:
    jobset = build(scene)
    assert trainer(jobset)["securityContext"] == {"privileged": False}
    assert pod(jobset)["hostNetwork"] is False
    assert pod(jobset)["terminationGracePeriodSeconds"] == 300
    assert "ttlSecondsAfterFinished" not in jobset["spec"]
    asked = build(scene, template=TEMPLATES[1])
    assert trainer(asked)["securityContext"] == {"privileged": True}
    assert pod(asked)["hostNetwork"] is True
    assert pod(asked)["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert pod(asked)["terminationGracePeriodSeconds"] == 600
    assert asked["spec"]["ttlSecondsAfterFinished"] == 60


def test_the_metrics_port_is_declared_under_its_name(scene: Any) -> None:
    run = scene.settings | {"metrics": {"metricsPort": 9999}}
    for template in ({}, {"hostNetwork": True}):
        (port,) = trainer(build(scene, run=run, template=template))["ports"]
        assert (port["name"], port["containerPort"]) == ("metrics", 9999)
    annotations = job(build(scene, run=run))["template"]["metadata"]["annotations"]
    assert annotations["ling.primatrix.io/metrics-port"] == "9999"


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


@pytest.mark.parametrize(
    ("annotation", "placement"),
    [(None, "cloud.google.com/gke-nodepool"), ("rack", "rack"), ("", None)],
)
def test_a_slice_has_a_node_pool_to_itself_unless_the_user_says_otherwise(
    scene: Any, annotation: str | None, placement: str | None
) -> None:
    key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    template = {} if annotation is None else {"annotations": {key: annotation}}
    jobset = build(scene, cpu=None, tpu={"accelerator": "v5p-32"}, template=template)
    assert jobset["metadata"]["annotations"].get(key) == placement
    # JobSet's webhook reads the pod's, and takes an empty one for a topology too.
    of_pods = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"]
    assert of_pods["annotations"].get(key) == (annotation or None)


def test_a_users_own_shared_memory_takes_the_place_of_ours(scene: Any) -> None:
    template = {
        "volumes": [{"name": "dshm-2", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}],
        "volumeMounts": [{"name": "dshm-2", "mountPath": "/dev/shm"}],
    }
    tpu = {"accelerator": "v5p-32"}
    jobset = build(scene, cpu=None, tpu=tpu, template=template)
    assert pod(jobset)["volumes"] == template["volumes"]
    assert trainer(jobset)["volumeMounts"] == template["volumeMounts"]
    (volume,) = pod(build(scene, cpu=None, tpu=tpu))["volumes"]
    assert volume["emptyDir"] == {"medium": "Memory"}


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


def test_the_hash_sees_what_an_attempt_runs_and_nothing_else(scene: Any) -> None:
    same = [{}, {"suspend": True}, {"attempt": 9}, {"health": {"scrapeIntervalSeconds": 60}}]
    other = [{"image": "x"}, {"restarts": 9}, {"cpu": {"processes": 3}}, {"args": ["a"]}]
    hashes = [template_hash(scene.run(**spec).spec) for spec in same]
    assert len(set(hashes)) == 1
    assert len({template_hash(scene.run(**spec).spec) for spec in other} | {hashes[0]}) == 5


@pytest.mark.parametrize(
    ("slices", "hosts", "budget"), [(1, 1, 43), (10, 10, 43), (1, 64, 42), (16, 1024, 39)]
)
def test_the_name_budget_is_what_the_pods_names_leave(
    slices: int, hosts: int, budget: int
) -> None:
    assert name_budget(slices=slices, hosts=hosts) == budget
    pod_name = f"{'n' * budget}-slice-job-{slices - 1}-{hosts - 1}-abcde"
    assert len(pod_name) == 63


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
