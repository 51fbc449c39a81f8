"""Pods with two trainer containers: what their ends mean, and where each is read."""

from typing import Any

import pytest

from ling_operator.caches import Caches
from ling_operator.run_view import RunView
from ling_operator.views import PodView, is_trainer, view_pod

LABELS = {
    "jobset.sigs.k8s.io/jobset-name": "ling2",
    "jobset.sigs.k8s.io/jobset-uid": "js-1",
    "ling.primatrix.io/run": "ling2",
}


def raw_pod(*codes: int | None, index: int = 0) -> dict[str, Any]:
    """Return a pod whose trainer containers ended with these codes; None still runs."""
    states = [
        {"running": {}} if code is None else {"terminated": {"exitCode": code, "message": f"{n}"}}
        for n, code in enumerate(codes)
    ]
    names = [f"jax-tpu-{n + 1}" for n in range(len(codes))] if len(codes) > 1 else ["jax-tpu"]
    names.append("gke-gcsfuse-sidecar")
    states.append({"terminated": {"exitCode": 7}})
    return {
        "metadata": {
            "name": f"ling2-slice-job-0-{index}-abcde",
            "namespace": "team",
            "uid": f"pod-{index}",
            "resourceVersion": "1",
            "labels": LABELS | {"batch.kubernetes.io/job-completion-index": str(index)},
            "annotations": {"ling.primatrix.io/metrics-port": "9464"},
        },
        "spec": {"containers": [{"name": name} for name in names], "nodeName": f"node-{index}"},
        "status": {
            "phase": "Running",
            "podIP": f"10.0.0.{index}",
            "containerStatuses": [
                {"name": name, "state": state} for name, state in zip(names, states, strict=True)
            ],
        },
    }


@pytest.mark.parametrize(
    ("codes", "exit_code", "why"),
    [
        ((None, None), None, "both run"),
        ((0, None), None, "the other may still fail"),
        ((0, 0), 0, "both ended well"),
        ((None, 90), 90, "divergence counts at once, whatever the other hangs in"),
        ((90, 134), 90, "the other died of the collective that broke"),
        ((134, 90), 90, "in either order"),
        ((42, 3), 3, "a data error is what no restart helps"),
        ((1, 134), 1, "a crash is the cause, 134 what it did to the other"),
        ((143, 1), 1, "in either order"),
        ((0, 143), 143, "a SIGTERM that came late is no success"),
        ((90,), 90, "one container, as usual"),
    ],
)
def test_of_two_ends_the_gravest_is_the_pods(
    codes: tuple[int | None, ...], exit_code: int | None, why: str
) -> None:
    assert view_pod(raw_pod(*codes)).exit_code == exit_code, why


def test_the_pod_is_ready_when_all_its_trainers_run() -> None:
    assert view_pod(raw_pod(None, None)).ready
    assert not view_pod(raw_pod(None, 0)).ready
    assert view_pod(raw_pod(None)).ready


def test_containers_are_counted_without_side_containers_and_the_first_is_named() -> None:
    two, one = view_pod(raw_pod(None, None)), view_pod(raw_pod(None))
    assert (two.containers, two.container) == (2, "jax-tpu-1")
    assert (one.containers, one.container) == (1, "jax-tpu")
    assert not is_trainer("jax-tpu-logs")


def caches_with(scene: Any, *pods: PodView) -> Caches:
    caches = Caches(client=None, namespaces=[], wake=lambda key: None)  # type: ignore[arg-type]
    for reflector in caches.reflectors:
        reflector.synced.set()
    caches.runs.each[None]._objects["team", "ling2"] = RunView(scene.running(), None)
    caches._pods["team", "ling2"] = {pod.uid: pod for pod in pods}
    return caches


def test_every_container_of_every_host_has_its_heartbeat_read_at_a_port_of_its_own(
    scene: Any,
) -> None:
    pods = [view_pod(raw_pod(None, None, index=index)) for index in (0, 1)]
    caches = caches_with(scene, *pods)
    jobs = caches.heartbeat_jobs(("team", "ling2"), 60.0)
    asked = [(j.host, j.container, j.target.ip, j.target.port, j.target.pod_uid) for j in jobs]
    assert asked == [
        ("node-0", 0, "10.0.0.0", 9464, "pod-0"),
        ("node-0", 1, "10.0.0.0", 9465, "pod-0"),
        ("node-1", 0, "10.0.0.1", 9464, "pod-1"),
        ("node-1", 1, "10.0.0.1", 9465, "pod-1"),
    ]
    job = caches.scrape_job(("team", "ling2"))
    assert job is not None
    assert (job.target.port, job.target.pod_uid) == (9464, "pod-0")


def test_one_process_has_no_other_to_be_compared_with(scene: Any) -> None:
    caches = caches_with(scene, view_pod(raw_pod(None)))
    assert caches.heartbeat_jobs(("team", "ling2"), 60.0) == ()


def test_nothing_is_read_of_a_run_before_all_of_its_namespace_is_listed(scene: Any) -> None:
    caches = caches_with(scene, *(view_pod(raw_pod(None, index=index)) for index in (0, 1)))
    assert caches.scrape_job(("team", "ling2")) is not None
    assert len(caches.heartbeat_jobs(("team", "ling2"), 60.0)) == 2
    caches.workloads.each[None].synced.clear()
    assert caches.scrape_job(("team", "ling2")) is None
    assert caches.heartbeat_jobs(("team", "ling2"), 60.0) == ()
