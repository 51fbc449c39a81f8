"""Faults of the API server and of the way to it: silence, restarts, lost history, no CRDs."""

from __future__ import annotations

import asyncio
import re
import time
from asyncio import create_task, gather, sleep, timeout, to_thread
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ling_operator.connection import discover
from ling_operator.reflector import Reflector
from ling_operator.rest import RestClient
from lingcluster import jobset_controller, kueue_controller, operator_process
from lingcluster.api_proxy import ApiProxy, Exchange, Moment
from lingcluster.build import Programs
from lingcluster.client import Manifest, load_manifests, wait_for
from lingcluster.control_plane import ControlPlane
from lingcluster.fault_table import FaultTable
from lingcluster.loopback import LoopbackBlock
from lingcluster.operator_process import OperatorProcess, StartOperator
from lingcluster.processes import Session
from lingcluster.training_runs import TrainingRuns, shown_step
from lingcluster.workloads import SHELL_IMAGE

LONGEST_BLINDNESS = 90.0
FUTURE = 1_000_000_000


def series(operator: OperatorProcess, name: str, **labels: str) -> float | None:
    """Return one of the operator's own series, None where it is absent."""
    words = ",".join(f'{key}="{value}"' for key, value in labels.items())
    pattern = rf"^{re.escape(f'{name}{{{words}}}' if words else name)} (\S+)$"
    found = re.search(pattern, operator.metrics(), re.MULTILINE)
    return float(found[1]) if found else None


@pytest.mark.slow
def test_behind_a_dead_connection_a_nan_halts_and_edits_are_seen_within_90_seconds(
    runs: TrainingRuns,
    start_operator: StartOperator,
    operator_proxy: ApiProxy,
    scripted_run: Callable[..., Manifest],
    faults: FaultTable,
    tmp_path: Path,
) -> None:
    kubeconfig = operator_proxy.identity.write_kubeconfig(tmp_path / "proxied.kubeconfig")
    operator = start_operator(kubeconfig=kubeconfig)
    nan = tmp_path / "nan"
    run = scripted_run("sick", env={"NAN_FILE": str(nan)})
    run["spec"]["health"]["trainerStops"] = False
    runs.apply(run)
    runs.wait_step("sick", 1)
    operator_proxy.swallow()
    silent = time.monotonic()
    nan.touch()
    runs.wait_phase("sick", "Halted")
    halted = time.monotonic() - silent
    runs.wait_no_live_pod("sick")
    nan.unlink()
    runs.edit("sick", attempt=2)
    runs.wait("sick", "attempt 2", lambda run: run["status"]["attempt"] == 2)
    blind = time.monotonic() - silent
    assert runs.wait_phase("sick", "Running")["status"]["attempt"] == 2
    assert halted < 45, "a request that is not answered is given up after 30 s"
    assert blind < LONGEST_BLINDNESS
    assert operator.returncode is None
    faults.record(
        "every connection to the API server falls silent without closing, then a NaN",
        f"Halted after {halted:.1f} s, edits seen after {blind:.1f} s",
        "requests in flight are given up after 30 s, watches after 75 s; no restart",
    )


def test_a_watch_from_a_version_that_never_was_is_left_and_the_kind_listed_anew(
    runs: TrainingRuns,
    operator_proxy: ApiProxy,
    scripted_run: Callable[..., Manifest],
    tmp_path: Path,
) -> None:
    """As after an etcd that was restored from a backup; the operator's own cache, with 3 s."""
    futures: list[Exchange] = []

    def from_the_future(exchange: Exchange, moment: Moment) -> None:
        if exchange.watches and moment == "before" and not futures:
            futures.append(exchange)
            exchange.query["resourceVersion"] = str(FUTURE)

    async def follow() -> Reflector[Manifest]:
        connection = discover(str(operator_proxy.identity.write_kubeconfig(tmp_path / "config")))
        async with RestClient(connection, read_idle_seconds=3.0) as client, timeout(60):
            cache = Reflector(
                client,
                runs.collection,
                kind="trainingruns",
                namespace=runs.namespace,
                view=lambda item: item,
                on_change=lambda _: None,
            )
            task = create_task(cache.run())
            while not futures:
                await sleep(0.05)
            await to_thread(runs.apply, scripted_run("later", suspend=True))
            while (runs.namespace, "later") not in cache.objects:
                await sleep(0.05)
            task.cancel()
            await gather(task, return_exceptions=True)
        return cache

    operator_proxy.gate = from_the_future
    cache = asyncio.run(follow())
    assert cache.relists >= 2, "no event brought it"


def test_an_api_server_that_restarts_without_its_history_harms_no_run(
    control_plane: ControlPlane,
    runs: TrainingRuns,
    start_operator: StartOperator,
    operator_proxy: ApiProxy,
    scripted_run: Callable[..., Manifest],
    faults: FaultTable,
    namespace: str,
    tmp_path: Path,
) -> None:
    kubeconfig = operator_proxy.identity.write_kubeconfig(tmp_path / "proxied.kubeconfig")
    operator = start_operator(kubeconfig=kubeconfig)
    nan = tmp_path / "nan"
    run = scripted_run("going", env={"NAN_FILE": str(nan)})
    run["spec"]["health"]["trainerStops"] = False
    runs.apply(run)
    runs.apply(scripted_run("gone", suspend=True))
    runs.wait_phase("gone", "Suspended")
    before = runs.wait_step("going", 1)
    pods = runs.live_pods("going")
    gone = {"run": "gone", "run_namespace": namespace}
    assert series(operator, "ling_run_halted", **gone) == 0

    operator_proxy.refuse(True)
    runs.delete("gone")
    runs.apply(scripted_run("new", suspend=True))
    control_plane.kill_api_server()
    control_plane.start_api_server()
    control_plane.compact_etcd()
    operator_proxy.refuse(False)
    back = time.monotonic()
    runs.wait_phase("new", "Suspended")
    wait_for(
        "the deleted run to be noticed",
        lambda: series(operator, "ling_run_halted", **gone) is None,
    )
    seen = time.monotonic() - back
    assert {error["code"] for error in operator_proxy.watch_errors} == {410}
    assert runs.live_pods("going") == pods
    run = runs.wait("going", "a later step", lambda run: shown_step(run) > before)
    assert run["status"]["restarts"] == 0
    nan.touch()
    assert runs.wait_phase("going", "Halted")["status"]["halt"]["reason"] == "NonFiniteLoss"
    runs.wait_no_live_pod("going")
    assert operator.returncode is None
    faults.record(
        "API server killed and started again, etcd compacted meanwhile (410), one run deleted",
        f"{seen:.1f} s until the operator knows",
        "the run in progress keeps its pods, and a NaN afterwards halts it",
    )


def compacting(plane: ControlPlane) -> Callable[[Exchange, Moment], None]:
    """Make pages of one object, and compact etcd before the second page of the first list.

    The API server answers from its cache then, or with 410: both have to end in a whole list.
    """
    expired: list[str] = []

    def gate(exchange: Exchange, moment: Moment) -> None:
        if exchange.resource != "trainingruns" or exchange.method != "GET" or exchange.watches:
            return
        if moment == "before":
            exchange.query["limit"] = "1"
            if "continue" in exchange.query and not expired:
                expired.append(exchange.query["continue"])
                plane.client.create("/api/v1/namespaces/default/events", _EVENT)
                plane.compact_etcd()

    return gate


_EVENT: Manifest = {
    "metadata": {"generateName": "later."},
    "involvedObject": {"kind": "Namespace", "name": "default", "namespace": "default"},
    "reason": "Later",
}


def test_a_list_in_pages_is_whole_though_etcd_is_compacted_between_them(
    control_plane: ControlPlane,
    runs: TrainingRuns,
    start_operator: StartOperator,
    operator_proxy: ApiProxy,
    scripted_run: Callable[..., Manifest],
    tmp_path: Path,
) -> None:
    names = ["one", "three", "two"]
    for name in names:
        runs.apply(scripted_run(name, suspend=True))
    operator_proxy.gate = compacting(control_plane)
    kubeconfig = operator_proxy.identity.write_kubeconfig(tmp_path / "proxied.kubeconfig")
    operator = start_operator(kubeconfig=kubeconfig)
    for name in names:
        runs.wait_phase(name, "Suspended")
    lists = [
        each
        for each in operator_proxy.exchanges
        if each.resource == "trainingruns" and each.method == "GET" and not each.watches
    ]
    answered = [each.status for each in lists if each.status]  # one may be on its way
    assert len(answered) >= len(names)
    assert set(answered) <= {200, 410}
    labels = {"kind": "trainingruns", "watched_namespace": runs.namespace}
    assert series(operator, "ling_operator_watch_objects", **labels) == len(names)


@pytest.fixture
def bare_plane(
    programs: Programs, loopback: LoopbackBlock, cluster_session: Session, tmp_path: Path
) -> Iterator[ControlPlane]:
    """An API server that knows no kind but Kubernetes' own."""
    directory = tmp_path / "bare"
    directory.mkdir()
    plane = ControlPlane(programs, directory, loopback, cluster_session)
    try:
        plane.start_bare()
        yield plane
    finally:
        plane.stop()


def test_kinds_that_are_installed_after_the_operator_are_found_and_named_until_then(
    bare_plane: ControlPlane,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    faults: FaultTable,
    repository: Path,
    tmp_path: Path,
) -> None:
    plane, client = bare_plane, bare_plane.client
    client.create("/api/v1/namespaces", {"metadata": {"name": operator_process.NAMESPACE}})
    operator = start_operator(kubeconfig=plane.kubeconfig, namespaces=["default"])
    log = tmp_path / "operator-0.log"
    for kind in ("trainingruns", "jobsets", "workloads"):
        assert f'"kind": "{kind}", "error": "404' in log.read_text()

    for crd in load_manifests(repository / "manifests" / "crd" / "trainingruns.yaml"):
        plane.install_crd(crd)
    runs = TrainingRuns(client, "default")
    runs.apply(scripted_run("early", queue="team"))
    condition = runs.wait_condition("early", "Created", "False", "CreateFailed")
    assert "is the JobSet controller installed?" in condition["message"]

    installed = time.monotonic()
    for path in jobset_controller.crd_files(plane.programs):
        for crd in load_manifests(path):
            plane.install_crd(crd)
    runs.wait_condition("early", "Created", "True", "JobSetCreated")
    seconds = time.monotonic() - installed
    runs.wait_condition("early", "Admitted", "Unknown", "NoWorkload")

    for crd in kueue_controller.crds(plane):
        if crd["spec"]["names"]["plural"] == "workloads":
            del crd["spec"]["conversion"]  # nobody converts here
            plane.install_crd(crd)
    jobset = runs.jobset("early")["metadata"]
    client.create(
        "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads",
        _workload("early", jobset["uid"]),
    )
    runs.wait_condition("early", "Admitted", "False", "WaitingForQuota")
    assert operator.returncode is None
    assert log.read_text().count('"event": "started"') == 1
    faults.record(
        "kinds of TrainingRun, JobSet and Kueue not installed when the operator starts",
        f"{seconds:.1f} s from JobSet's CRD to the JobSet",
        "CreateFailed and NoWorkload say what is missing; no restart of the operator",
    )


def _workload(jobset: str, uid: str) -> Manifest:
    owner = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "name": jobset,
        "uid": uid,
    }
    template = {
        "spec": {"containers": [{"name": "main", "image": SHELL_IMAGE}], "restartPolicy": "Never"}
    }
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {
            "name": f"jobset-{jobset}",
            "ownerReferences": [owner | {"controller": True}],
        },
        "spec": {
            "queueName": "team",
            "podSets": [{"name": "main", "count": 1, "template": template}],
        },
    }
