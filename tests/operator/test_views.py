"""Views: what is read from raw objects, and what a broken one does not break."""

import json
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ling_operator import deep_json
from ling_operator.jobset import build_jobset
from ling_operator.run_view import view_run
from ling_operator.views import (
    Termination,
    parse_termination,
    view_jobset,
    view_pod,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def raw_pod(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "ling2-slice-job-1-2-abcde",
            "uid": "pod-uid",
            "labels": {
                "ling.primatrix.io/run": "ling2",
                "ling.primatrix.io/attempt": "3",
                "jobset.sigs.k8s.io/jobset-uid": "js-1",
                "jobset.sigs.k8s.io/job-index": "1",
                "jobset.sigs.k8s.io/restart-attempt": "4",
                "batch.kubernetes.io/job-completion-index": "2",
            },
            "annotations": {"ling.primatrix.io/metrics-port": "9464"},
        },
        "spec": {"nodeName": "node-7", "hostNetwork": True},
        "status": {"phase": "Running", "podIP": "10.0.0.9", **status},
    }


def test_a_running_pod_is_read() -> None:
    state = {"running": {"startedAt": "2026-11-30T09:00:00Z"}}
    pod = view_pod(raw_pod(containerStatuses=[{"name": "jax-tpu", "state": state}]))
    assert (pod.job_index, pod.completion_index, pod.restart_attempt, pod.attempt) == (1, 2, 4, 3)
    assert (pod.ip, pod.host, pod.metrics_port, pod.host_network) == (
        "10.0.0.9",
        "node-7",
        9464,
        True,
    )
    assert pod.ready
    assert pod.live
    assert pod.exit_code is None


def test_the_trainers_end_is_read_and_not_a_side_containers() -> None:
    words = {"reason": "NonFiniteLoss", "step": "12", "lastFiniteStep": "11", "value": "nan"}
    ended = {"terminated": {"exitCode": 90, "message": json.dumps(words)}}
    pod = view_pod(
        raw_pod(
            phase="Failed",
            containerStatuses=[
                {"name": "logs", "state": {"terminated": {"exitCode": 0, "message": "bye"}}},
                {"name": "jax-tpu", "state": ended},
            ],
        ),
        gone=True,
    )
    assert (pod.exit_code, pod.live, pod.gone) == (90, False, True)
    assert pod.termination == Termination(
        reason="NonFiniteLoss", step=12, last_finite_step=11, value="nan"
    )


def test_of_a_foreign_image_any_container_may_be_the_trainer() -> None:
    codes = {"logs": 0, "main": 90, "side": 1}
    statuses = [
        {"name": name, "state": {"terminated": {"exitCode": code}}} for name, code in codes.items()
    ]
    raw = raw_pod(phase="Running", containerStatuses=statuses)
    raw["spec"]["containers"] = [{"name": "main"}, {"name": "logs"}, {"name": "side"}]
    ended = view_pod(raw)
    assert (ended.exit_code, ended.container, ended.containers) == (90, "main", 1)
    statuses[1:] = [{"name": "main", "state": {"running": {}}}, {"name": "side", "state": {}}]
    running = view_pod(raw)
    assert (running.exit_code, running.ready) == (None, True)


def test_process_0_is_of_the_first_job_of_all() -> None:
    raw = raw_pod()
    raw["metadata"]["labels"]["jobset.sigs.k8s.io/job-global-index"] = "3"
    assert view_pod(raw).job_index == 3


def test_a_pod_that_was_only_just_made_is_read() -> None:
    pod = view_pod({"metadata": {"name": "p"}, "spec": {}})
    assert (pod.phase, pod.ip, pod.exit_code, pod.live) == ("Pending", None, None, True)


UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/8 nodes are available: 8 Insufficient google.com/tpu.",
}
PULL = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x:1"'}}


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        ({"conditions": [UNSCHEDULABLE]}, "Unschedulable: 0/8 nodes are available"),
        (
            {"containerStatuses": [{"name": "jax-tpu", "state": PULL}]},
            "ImagePullBackOff: Back-off",
        ),
        (
            {
                "containerStatuses": [
                    {"name": "jax-tpu", "state": {"waiting": {"reason": "PodInitializing"}}}
                ],
                "initContainerStatuses": [{"name": "fetch", "state": PULL}],
            },
            "ImagePullBackOff: Back-off",
        ),
        (
            {
                "initContainerStatuses": [
                    {"name": "fetch", "state": {"terminated": {"exitCode": 7}}}
                ]
            },
            "init container fetch ended with 7",
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: x"},
            "Evicted: The node was low on resource: x",
        ),
        (
            {
                "containerStatuses": [
                    {"name": "jax-tpu", "state": {"waiting": {"reason": "ContainerCreating"}}}
                ]
            },
            "",
        ),
        ({"containerStatuses": [{"name": "jax-tpu", "state": {"running": {}}}]}, ""),
        ({}, ""),
    ],
)
def test_why_a_pod_does_not_run_is_read(status: dict[str, Any], problem: str) -> None:
    read = view_pod(raw_pod(**status)).problem
    assert read.startswith(problem)
    assert bool(read) == bool(problem)


@pytest.mark.parametrize(
    ("status", "disrupted"),
    [
        ({}, True),
        ({"reason": "Terminated"}, True),
        ({"reason": "Evicted"}, False),  # for the memory or the disk that it used itself
        ({"conditions": [{"type": "DisruptionTarget", "status": "False"}]}, False),
    ],
)
def test_a_pod_that_was_taken_away_is_told_from_one_that_used_up_its_node(
    status: dict[str, Any], disrupted: bool
) -> None:
    taken = {"conditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert view_pod(raw_pod(**(taken | status))).disrupted == disrupted


def test_a_jobset_is_read_back_as_it_was_built(scene: Any) -> None:
    manifest = build_jobset(scene.run(), attempt=7, restore_before_step=None)
    manifest["metadata"]["uid"] = "js-7"
    view = view_jobset(manifest)
    assert (view.name, view.uid, view.attempt) == ("ling2", "js-7", 7)
    assert not view.suspended
    assert view.terminal == ""
    assert view.owner is not None
    assert (view.owner.uid, view.owner.kind) == ("run-uid", "TrainingRun")


def test_a_failed_jobset_says_why(scene: Any) -> None:
    manifest = build_jobset(scene.run(), attempt=1, restore_before_step=None)
    manifest["status"] = {
        "restarts": 3,
        "terminalState": "Failed",
        "conditions": [
            {"type": "Suspended", "status": "False"},
            {"type": "Failed", "status": "True", "reason": "ReachedMaxRestarts", "message": "m"},
        ],
    }
    view = view_jobset(manifest)
    assert (view.terminal, view.failure_reason, view.failure, view.restarts) == (
        "Failed",
        "ReachedMaxRestarts",
        "m",
        3,
    )


@given(st.text() | JSON.map(json.dumps))
@example("[" * 4096)  # as long as a kubelet lets it be, and deeper than a parser goes
@example('{"step":' * 500)
@example('{"step": ' + "9" * 4000 + "}")
@settings(deadline=None)
def test_no_termination_message_breaks_the_reader(text: str) -> None:
    words = parse_termination(text)
    assert words is None or words.step is None or words.step >= 0


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("\x1b[31mnan\x1b[0m", "nan"),
        ("a\x00b", "a\ufffdb"),
        ("\ud800", "\ufffd"),
        ("x" * 999, "x" * 256),
    ],
)
def test_last_words_are_fit_for_an_object_and_a_terminal(said: str, read: str) -> None:
    names = "reason", "value", "signal", "message"
    words = parse_termination(json.dumps(dict.fromkeys(names, said)))
    assert words is not None
    assert [getattr(words, name) for name in names] == [read] * len(names)


def test_a_spec_that_cannot_be_read_still_has_status_pause_and_policy(scene: Any) -> None:
    policy = {"nonFinite": {"action": "Alert"}}
    manifest = scene.manifest(elastic={"min": 1}, suspend=True, health=policy)
    manifest["status"] = {"attempt": 4, "jobSetUID": "js-4", "phase": "Running"}
    view = view_run(manifest)
    assert view.problem is not None
    assert "spec.elastic is not a field" in view.problem
    assert view.run is not None
    assert (view.run.status.job_set_uid, view.run.spec.attempt) == ("js-4", 4)
    assert view.run.spec.suspend is True
    assert view.run.spec.health.non_finite.action == "Alert"


@pytest.mark.parametrize("depth", [300, 3000, 9000])
def test_a_spec_deeper_than_a_parser_goes_is_a_problem_of_its_run_alone(
    scene: Any, depth: int
) -> None:
    text = json.dumps(scene.manifest(run={"deep": "HERE"}))
    text = text.replace('"HERE"', "[" * depth + "]" * depth)
    text = text.replace(
        '"metadata": {', '"metadata": {"managedFields": ' + "[" * depth + "]" * depth + ", "
    )
    raw = deep_json.loads(text.encode())
    view = view_run(cast("dict[str, Any]", raw))
    assert view.run is not None
    assert view.problem is not None
    assert "nested too deeply" in view.problem


def test_a_policy_that_cannot_be_read_is_the_default_one(scene: Any) -> None:
    view = view_run(scene.manifest(health={"nonFinite": {"action": "Explode"}}))
    assert view.problem is not None
    assert view.run is not None
    assert view.run.spec.health.non_finite.action == "Halt"


def test_a_good_object_has_no_error(scene: Any) -> None:
    assert view_run(scene.manifest()).problem is None


def test_of_an_object_without_a_name_nothing_can_be_decided() -> None:
    view = view_run({"metadata": {}, "spec": {"image": "x"}})
    assert view.run is None
    assert "metadata.name" in (view.problem or "")
