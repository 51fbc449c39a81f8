"""What holds in every history of a small cluster, whatever goes wrong in it."""

import itertools
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ling_operator.api import Phase
from ling_operator.plan import (
    Observed,
)
from simulated_cluster import Cluster, WatchedCluster

TOUCHY = {"zeroLoss": {"consecutiveSteps": 1}}
EXIT_CODES = [0, 1, 2, 3, 42, 90, 134, 137, 143]


WATCHING = {"watch": {"jobSet": "ling2"}, "image": None, "cpu": None, "run": None}
OPERATIONS = st.one_of(
    st.just(("pass",)),
    st.just(("pass",)),
    st.just(("advance",)),
    st.just(("advance",)),
    st.tuples(st.just("page"), st.sampled_from(["good", "nan", "zero loss"])),
    st.tuples(st.just("page that is seen"), st.sampled_from(["good", "nan", "zero loss"])),
    st.tuples(st.just("exit"), st.integers(0, 1), st.sampled_from(EXIT_CODES)),
    st.just(("raise attempt",)),
    st.just(("lower attempt",)),
    st.tuples(st.just("suspend"), st.booleans()),
    st.just(("delete jobset",)),
    st.just(("delete jobset, leave its pods",)),
    st.just(("un-suspend jobset",)),
    st.just(("launch",)),
    st.tuples(st.just("jobset ends"), st.sampled_from(["Failed", "Completed"])),
    st.just(("pass, but the act fails",)),
    st.just(("pass on old news",)),
    st.tuples(st.just("wait"), st.integers(1, 120)),
)


def play(cluster: Cluster, operation: tuple[Any, ...], old: Observed) -> None:
    jobset = cluster.jobset
    match operation:
        case ("pass",):
            cluster.run_pass(cluster.observe())
        case ("pass, but the act fails",):
            cluster.run_pass(cluster.observe(), act=False)
        case ("pass on old news",):
            cluster.run_pass(old)
        case ("advance",):
            cluster.advance()
        case ("page", kind):
            cluster.page(kind)
        case ("page that is seen", kind):
            cluster.advance()
            cluster.page(kind)
            cluster.run_pass(cluster.observe())
        case ("exit", index, code):
            cluster.exit(index, code)
        case ("raise attempt",):
            cluster.spec(attempt=cluster.run.spec.attempt + 1)
        case ("lower attempt",):
            cluster.spec(attempt=max(cluster.run.spec.attempt - 1, 1))
        case ("suspend", wanted):
            cluster.spec(suspend=wanted)
        case ("delete jobset",) if jobset is not None:
            cluster.jobset = replace(jobset, deleting=True)
        case ("delete jobset, leave its pods",):
            cluster.jobset = None
        case ("un-suspend jobset",) if jobset is not None:
            cluster.jobset = replace(jobset, suspended=False)
        case ("launch",) if isinstance(cluster, WatchedCluster):
            cluster.launch()
        case ("jobset ends", how) if jobset is not None:
            cluster.jobset = replace(jobset, terminal=how)
        case ("wait", seconds):
            cluster.seconds += seconds
        case _:
            pass


@pytest.mark.parametrize("kind", ["own", "own, Fail", "watched"])
@given(st.lists(OPERATIONS, max_size=40), st.booleans())
@settings(max_examples=200, deadline=None)
def test_no_history_breaks_a_promise(
    scene: Any, kind: str, operations: list[tuple[Any, ...]], running: bool
) -> None:
    cluster = make(scene, kind)
    if running:
        cluster.start()
    old = cluster.observe()
    for i, operation in enumerate(operations):
        if i % 4 == 0:
            old = cluster.observe()
        play(cluster, operation, old)


def make(scene: Any, kind: str) -> Cluster:
    """Return a cluster for a run of our own, by either haltMode, or for one that watches."""
    if kind == "watched":
        watched = WatchedCluster(scene, scene.run(health=TOUCHY, **WATCHING))
        watched.launch()
        return watched
    mode = {"haltMode": "Fail"} if kind == "own, Fail" else {}
    return Cluster(scene, scene.run(health=TOUCHY | mode))


@pytest.mark.parametrize("kind", ["own", "own, Fail", "watched"])
@given(st.lists(OPERATIONS, max_size=30), st.booleans())
@settings(max_examples=100, deadline=None)
def test_left_alone_it_comes_to_rest_where_the_spec_asks(
    scene: Any, kind: str, operations: list[tuple[Any, ...]], suspend: bool
) -> None:
    cluster = make(scene, kind)
    if kind == "watched":
        cluster.start()  # most of what can go wrong, goes wrong with pods
    for operation in operations:
        play(cluster, operation, cluster.observe())
    if isinstance(cluster, WatchedCluster):
        cluster.run_pass(cluster.observe())  # what is not seen yet would halt the next attempt
        cluster.relaunch()
    cluster.spec(attempt=cluster.run.status.attempt + 1, suspend=suspend)
    for _ in range(12):
        cluster.run_pass(cluster.observe())
        cluster.advance()
    cluster.run_pass(cluster.observe())
    assert cluster.run.status.phase == (Phase.SUSPENDED if suspend else Phase.RUNNING)
    assert any(pod.live for pod in cluster.pods) is not suspend
    assert cluster.run_pass(cluster.observe()) is None
    assert cluster.history[-1].actions == ()


@given(st.lists(st.sampled_from(["good", "none"]), max_size=20))
@settings(max_examples=50, deadline=None)
def test_missing_pages_are_never_evidence(scene: Any, pages: list[str]) -> None:
    cluster = Cluster(scene, scene.run())
    for page in pages:
        cluster.advance()
        if page == "good":
            cluster.page("good")
        cluster.seconds += 20
        cluster.run_pass(cluster.observe())
        assert cluster.run.status.phase in {Phase.PENDING, Phase.STARTING, Phase.RUNNING}
        healthy = [c for c in cluster.run.status.conditions if c.type == "Healthy"]
        assert all(c.status != "False" for c in healthy)


@given(st.floats(0, 300))
@settings(max_examples=50, deadline=None)
def test_a_halt_that_is_undone_is_redone_at_most_once_a_minute(scene: Any, pause: float) -> None:
    cluster = Cluster(scene, scene.run())
    for _ in range(4):
        cluster.run_pass(cluster.observe())
        cluster.advance()
    cluster.page("nan")
    cluster.run_pass(cluster.observe())
    cluster.run_pass(cluster.observe())
    assert cluster.run.status.phase == Phase.HALTED
    acts: list[timedelta] = []
    for _ in range(20):
        cluster.seconds += pause
        assert cluster.jobset is not None
        cluster.jobset = replace(cluster.jobset, suspended=False)
        count = len(cluster.history)
        cluster.run_pass(cluster.observe())
        if any(plan.actions for plan in cluster.history[count:]):
            acts.append(timedelta(seconds=cluster.seconds))
    gaps = [b - a for a, b in itertools.pairwise(acts)]
    assert acts
    assert all(gap >= timedelta(seconds=60) for gap in gaps)
