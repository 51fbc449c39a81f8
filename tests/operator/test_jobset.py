"""The JobSet of an attempt: XPK's shape, what its exit codes mean, and its hash."""

import itertools
import re
from typing import Any

import pytest

from jobset_parts import build, job, pod, trainer, trainers
from ling_operator.jobset import template_hash
from ling_operator.name_budget import name_budget

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
