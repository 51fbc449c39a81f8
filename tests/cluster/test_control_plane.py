"""The control plane and the process kubelet behave as a cluster does where tests rely on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lingcluster.audit import AuditLog
from lingcluster.client import ApiError, KubeClient, Manifest, find_condition, wait_for
from lingcluster.control_plane import ControlPlane
from lingcluster.kubelet import ProcessKubelet
from lingcluster.workloads import JOBSETS, container, from_field, jobset, pod

# Names the peers until the machine knows them, as a cluster's DNS does with a delay.
FIND_PEERS = """
for i in 0 1; do
  for _ in $(seq 300); do getent hosts run-w-0-$i.run && break; sleep 0.1; done
done
until [ -e {seen} ]; do sleep 0.1; done
"""
# Process 1 of a container ignores a signal without a handler, so these set one.
ENDS_ON_SIGTERM = """
trap 'echo got SIGTERM; exit 143' TERM
echo ready
while true; do sleep 0.1; done
"""


class Cluster:
    """What the tests below say about one namespace."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self.client = client
        self.jobsets = f"{JOBSETS}/namespaces/{namespace}/jobsets"
        self.core = f"/api/v1/namespaces/{namespace}"
        self.batch = f"/apis/batch/v1/namespaces/{namespace}"

    def create(self, manifest: Manifest) -> None:
        collection = self.jobsets if manifest["kind"] == "JobSet" else f"{self.core}/pods"
        self.client.create(collection, manifest)

    def pods(self) -> list[Manifest]:
        return self.client.items(f"{self.core}/pods")

    def pod(self, name: str) -> Manifest:
        return self.client.get(f"{self.core}/pods/{name}")

    def wait_for_phase(self, phase: str, *, count: int = 1) -> list[Manifest]:
        def look() -> list[Manifest]:
            found = [each for each in self.pods() if each["status"]["phase"] == phase]
            return found if len(found) == count else []

        return wait_for(f"{count} pods {phase}", look, describe=self.describe)

    def wait_for_end(self, name: str) -> Manifest:
        def look() -> Manifest | None:
            manifest = self.client.get(f"{self.jobsets}/{name}")
            return manifest if manifest.get("status", {}).get("terminalState") else None

        return wait_for(f"JobSet {name} to end", look, describe=self.describe)

    def describe(self) -> list[tuple[str, object]]:
        return [(each["metadata"]["name"], each["status"]) for each in self.pods()]

    def leftovers(self) -> list[str]:
        """Return what exists of JobSets, Jobs, pods and Services."""
        collections = (
            self.jobsets,
            f"{self.batch}/jobs",
            f"{self.core}/pods",
            f"{self.core}/services",
        )
        return [
            f"{collection.rpartition('/')[2]}/{each['metadata']['name']}"
            for collection in collections
            for each in self.client.items(collection)
        ]


@pytest.fixture
def cluster(control_plane: ControlPlane, namespace: str) -> Cluster:
    return Cluster(control_plane.client, namespace)


def terminated(manifest: Manifest) -> Manifest:
    return manifest["status"]["containerStatuses"][0]["state"]["terminated"]


def test_a_jobset_of_two_pods_completes_and_its_host_names_resolve(
    cluster: Cluster, kubelet: ProcessKubelet, namespace: str, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    cluster.create(jobset("run", FIND_PEERS.format(seen=seen)))
    running = cluster.wait_for_phase("Running", count=2)
    seen.touch()
    status = cluster.wait_for_end("run")["status"]
    assert status["terminalState"] == "Completed"
    for each in running:
        output = kubelet.log(namespace, each["metadata"]["name"])
        for index in (0, 1):
            assert f"run-w-0-{index}.run.{namespace}.svc.cluster.local" in output
    assert len({each["status"]["podIP"] for each in running}) == 2


def test_exit_code_90_fails_the_jobset_without_a_restart(cluster: Cluster) -> None:
    cluster.create(jobset("run", "exit 90", max_restarts=3, fail_on_final_codes=True))
    status = cluster.wait_for_end("run")["status"]
    assert status["terminalState"] == "Failed"
    assert status.get("restarts", 0) == 0
    failed = find_condition({"status": status}, "Failed")
    assert failed is not None
    assert failed["reason"] == "FailJobSetFailurePolicyAction"


def test_exit_code_42_restarts_the_jobset(cluster: Cluster) -> None:
    attempt = from_field("ATTEMPT", "metadata.labels['jobset.sigs.k8s.io/restart-attempt']")
    main = container('[ "$ATTEMPT" = 0 ] && exit 42; exit 0', environment=[attempt])
    cluster.create(jobset("run", main, max_restarts=3, fail_on_final_codes=True))
    status = cluster.wait_for_end("run")["status"]
    assert (status["terminalState"], status["restarts"]) == ("Completed", 1)


def test_suspend_sends_sigterm_leaves_no_pod_and_can_be_undone(
    cluster: Cluster, kubelet: ProcessKubelet, namespace: str
) -> None:
    # 2 s in which controllers see pods that ended and still exist, as on a real node.
    kubelet.timing.final_delay = 2.0
    cluster.create(jobset("run", ENDS_ON_SIGTERM, max_restarts=0, fail_on_final_codes=True))
    first = cluster.wait_for_phase("Running", count=2)
    kubelet.wait_for_words(namespace, [each["metadata"]["name"] for each in first], "ready")
    path = f"{cluster.jobsets}/run"
    cluster.client.patch(path, {"spec": {"suspend": True}})
    wait_for("no pod", lambda: not cluster.pods(), describe=cluster.describe)
    assert kubelet.live_processes(namespace) == []
    for each in first:
        assert "got SIGTERM" in kubelet.log(namespace, each["metadata"]["name"])
    cluster.client.patch(path, {"spec": {"suspend": False}})
    cluster.wait_for_phase("Running", count=2)
    assert "terminalState" not in cluster.client.get(path)["status"]


def test_the_termination_message_and_the_exit_code_arrive_in_the_status(cluster: Cluster) -> None:
    cluster.create(pod("one", """echo '{"reason": "why"}' > /dev/termination-log; exit 7"""))
    state = terminated(cluster.wait_for_phase("Failed")[0])
    assert (state["exitCode"], state["reason"]) == (7, "Error")
    assert state["message"] == '{"reason": "why"}\n'


def test_disruption_target_survives_the_kubelets_status_patch(
    cluster: Cluster, kubelet: ProcessKubelet, namespace: str
) -> None:
    kubelet.timing.final_delay = 3.0
    cluster.create(pod("one", ENDS_ON_SIGTERM))
    kubelet.wait_for_words(namespace, ["one"], "ready")
    cluster.wait_for_phase("Running")
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "one", "namespace": namespace},
    }
    cluster.client.create(f"{cluster.core}/pods/one/eviction", eviction)
    ended = cluster.wait_for_phase("Failed")[0]
    assert terminated(ended)["exitCode"] == 143
    condition = find_condition(ended, "DisruptionTarget")
    assert condition is not None
    assert condition["status"] == "True"
    wait_for("the pod to go", lambda: not cluster.pods())


def test_rbac_denies_what_a_service_account_was_not_given(
    control_plane: ControlPlane, cluster: Cluster, namespace: str, audit_log: AuditLog
) -> None:
    client = KubeClient(control_plane.service_account(namespace, "default"))
    with pytest.raises(ApiError) as refusal:
        client.get(f"{cluster.core}/pods")
    client.close()
    assert (refusal.value.status, refusal.value.reason) == (403, "Forbidden")
    denied = audit_log.records(user=f"system:serviceaccount:{namespace}:default", code=403)
    assert [(each.verb, each.resource) for each in denied] == [("list", "pods")]


def test_a_kubeconfig_of_a_service_account_works_with_kubectl(
    control_plane: ControlPlane, namespace: str
) -> None:
    path: Path = control_plane.service_account_kubeconfig(namespace, "default")
    answer = control_plane.kubectl("--kubeconfig", str(path), "auth", "whoami", "-o", "json")
    assert f"system:serviceaccount:{namespace}:default" in answer


@pytest.mark.parametrize("propagation", ["Background", "Foreground"])
def test_deleting_a_jobset_removes_jobs_pods_service_and_processes(
    cluster: Cluster, kubelet: ProcessKubelet, namespace: str, propagation: str
) -> None:
    cluster.create(jobset("run", ENDS_ON_SIGTERM))
    cluster.wait_for_phase("Running", count=2)
    assert len(cluster.leftovers()) == 5  # JobSet, Job, two pods, Service
    assert len(kubelet.live_processes(namespace)) >= 2
    cluster.client.delete(f"{cluster.jobsets}/run", propagation=propagation)
    # JobSet's controller may make the Job once more before it knows; that one goes the same way.
    wait_for(
        "all to be gone", lambda: not cluster.leftovers(), timeout=60, describe=cluster.leftovers
    )
    wait_for("no process", lambda: not kubelet.live_processes(namespace))


def test_a_pod_that_asks_for_tpus_lands_on_a_tpu_node_and_others_do_not(cluster: Cluster) -> None:
    resources = {"limits": {"google.com/tpu": "4"}}
    cluster.create(pod("tpu", container("true", resources=resources)))
    cluster.create(pod("cpu", "true"))
    cluster.wait_for_phase("Succeeded", count=2)
    assert cluster.pod("tpu")["spec"]["nodeName"].startswith("v6e-")
    assert cluster.pod("cpu")["spec"]["nodeName"].startswith("cpu-")
