"""Two replicas of the operator: one acts; a dead, leaving or frozen leader is replaced."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lingcluster import operator_process
from lingcluster.api_proxy import ApiProxy, Exchange, Moment
from lingcluster.audit import AuditLog, AuditRecord
from lingcluster.client import KubeClient, Manifest, wait_for
from lingcluster.control_plane import ControlPlane
from lingcluster.fault_table import FaultTable
from lingcluster.operator_process import OperatorProcess, StartOperator
from lingcluster.training_runs import TrainingRuns

LEASES = "/apis/coordination.k8s.io/v1/namespaces/ling-system/leases"
ELECT = ("--leader-elect", "--leader-election-namespace=ling-system")
LONGEST_FAILOVER = 15.0
FROZEN_SECONDS = 20.0


@pytest.fixture
def leases(control_plane: ControlPlane, start_operator: StartOperator) -> Iterator[KubeClient]:
    """The administrator's client; no Lease is there before, and none is left."""
    del start_operator  # its manifests make the namespace
    yield control_plane.client
    control_plane.client.delete(f"{LEASES}/ling-operator")


def holder(client: KubeClient) -> str:
    lease = client.find(f"{LEASES}/ling-operator")
    return "" if lease is None else lease["spec"].get("holderIdentity", "")


def leads(operator: OperatorProcess) -> bool:
    return "ling_operator_leading 1.0" in operator.metrics()


def writes(record: AuditRecord) -> bool:
    return record.verb not in {"get", "list", "watch"}


def is_halt(record: AuditRecord) -> bool:
    return (record.resource, record.verb) == ("jobsets", "patch")


def pair(
    start: StartOperator, kubeconfig: Path | None = None
) -> tuple[OperatorProcess, OperatorProcess]:
    """Start a leader, which may have a kubeconfig of its own, and a standby."""
    first = start(kubeconfig=kubeconfig, arguments=ELECT)
    wait_for("the first to lead", lambda: leads(first))
    second = start(arguments=ELECT)
    assert not leads(second)
    return first, second


def test_a_killed_leader_is_replaced_in_time_and_the_halt_it_missed_is_made(
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    leases: KubeClient,
    faults: FaultTable,
    tmp_path: Path,
) -> None:
    first, second = pair(start_operator)
    nan = tmp_path / "nan"
    run = scripted_run("missed", env={"NAN_FILE": str(nan)})
    run["spec"]["health"]["trainerStops"] = False
    runs.apply(run)
    runs.wait_phase("missed", "Running")
    assert "ling_run_phase{" not in second.metrics(), "a standby tells nothing of runs"
    before = holder(leases)
    first.kill()
    died = time.monotonic()
    nan.touch()
    wait_for("the standby to lead", lambda: leads(second), timeout=2 * LONGEST_FAILOVER)
    seconds = time.monotonic() - died
    assert seconds < LONGEST_FAILOVER
    assert holder(leases) != before
    runs.wait_phase("missed", "Halted")
    faults.record(
        "leader killed with SIGKILL",
        f"{seconds:.1f} s to the next leader",
        "the standby halts the run that diverged meanwhile",
    )


def test_a_leader_that_is_told_to_stop_hands_over_at_once(
    start_operator: StartOperator, leases: KubeClient
) -> None:
    first, second = pair(start_operator)
    assert first.stop(grace=30) == 0
    told = time.monotonic()
    wait_for("the standby to lead", lambda: leads(second))
    assert time.monotonic() - told < LONGEST_FAILOVER / 2
    assert holder(leases) != ""


def test_a_frozen_leader_writes_nothing_when_it_thaws(
    runs: TrainingRuns,
    start_operator: StartOperator,
    operator_proxy: ApiProxy,
    scripted_run: Callable[..., Manifest],
    leases: KubeClient,
    audit_log: AuditLog,
    tmp_path: Path,
) -> None:
    kubeconfig = operator_proxy.identity.write_kubeconfig(tmp_path / "proxied.kubeconfig")
    first, second = pair(start_operator, kubeconfig)
    old = holder(leases)
    nan = tmp_path / "nan"
    run = scripted_run("frozen", env={"NAN_FILE": str(nan)})
    run["spec"]["health"]["trainerStops"] = False
    runs.apply(run)
    runs.wait_phase("frozen", "Running")
    first.signal(signal.SIGSTOP)
    try:
        nan.touch()
        runs.wait_phase("frozen", "Halted")
        runs.wait_no_live_pod("frozen")
        runs.wait("frozen", "the end of its halt", lambda run: run["status"]["stop"]["confirmed"])
        thawed = time.time()
    finally:
        first.signal(signal.SIGCONT)
    assert first.wait(timeout=30) == 1, "it ends, and starts anew as a standby"
    assert holder(leases) not in {"", old}
    assert leads(second)
    sent = [each for each in operator_proxy.writes() if each.started > thawed]
    assert {each.resource for each in sent} <= {"leases"}
    halts = [each for each in audit_log.records(user=operator_process.USER) if is_halt(each)]
    assert {each.code for each in halts} == {200}


class FrozenAfterIntent:
    """Stops an operator in the moment between the write that says Halted and the act."""

    def __init__(self) -> None:
        self.operator: OperatorProcess | None = None
        self.frozen = threading.Event()

    def __call__(self, exchange: Exchange, moment: Moment) -> None:
        """Freeze the operator before the answer to its first intent reaches it."""
        intent = (exchange.body or {}).get("status", {}).get("phase") == "Halted"
        if self.operator is None or self.frozen.is_set() or not intent or moment != "after":
            return
        self.operator.signal(signal.SIGSTOP)
        self.frozen.set()


@pytest.mark.slow
def test_a_leader_frozen_between_intent_and_act_leaves_both_halts_to_its_successor(
    runs: TrainingRuns,
    start_operator: StartOperator,
    operator_proxy: ApiProxy,
    scripted_run: Callable[..., Manifest],
    leases: KubeClient,
    audit_log: AuditLog,
    faults: FaultTable,
    tmp_path: Path,
) -> None:
    freezer = FrozenAfterIntent()
    operator_proxy.gate = freezer
    kubeconfig = operator_proxy.identity.write_kubeconfig(tmp_path / "proxied.kubeconfig")
    first = start_operator(kubeconfig=kubeconfig, arguments=ELECT)
    wait_for("the first to lead", lambda: leads(first))
    freezer.operator = first
    second = start_operator(arguments=ELECT)
    names = ("now", "meanwhile")
    nans = {name: tmp_path / f"nan-{name}" for name in names}
    for name in names:
        run = scripted_run(name, env={"NAN_FILE": str(nans[name])})
        run["spec"]["health"]["trainerStops"] = False
        runs.apply(run)
    for name in names:
        runs.wait_phase(name, "Running")
    nans["now"].touch()
    assert freezer.frozen.wait(120)
    frozen = time.monotonic()
    nans["meanwhile"].touch()
    try:
        assert runs.status("now")["phase"] == "Halted", "the intent is there"
        assert not runs.jobset("now")["spec"].get("suspend"), "the act is not"
        assert runs.status("meanwhile").get("phase") != "Halted"
        wait_for("the standby to lead", lambda: leads(second))
        failover = time.monotonic() - frozen
        for name in names:
            runs.wait_phase(name, "Halted")
            runs.wait_no_live_pod(name)
            runs.wait(name, "the end of its halt", lambda run: run["status"]["stop"]["confirmed"])
        time.sleep(max(0.0, FROZEN_SECONDS - (time.monotonic() - frozen)))
        thawed, since_thaw = time.time(), audit_log.mark()
    finally:
        first.signal(signal.SIGCONT)
    assert first.wait(timeout=30) == 1, "it ends, and starts anew as a standby"
    assert failover < LONGEST_FAILOVER
    sent = [each for each in operator_proxy.writes() if each.started > thawed]
    assert [each for each in sent if each.resource != "leases"] == []
    late = [each for each in since_thaw.records(user=operator_process.USER) if writes(each)]
    assert {each.resource for each in late} <= {"leases"}
    mine = audit_log.records(user=operator_process.USER)
    halts = [(each.name, each.code) for each in mine if is_halt(each)]
    assert sorted(halts) == [("meanwhile", 200), ("now", 200)], "one write per action"
    told = Counter(e["reason"] for name in names for e in runs.events(name))
    assert told["NonFiniteLoss"] == 2
    faults.record(
        "leader frozen for 20 s between intent and act, a second run diverges meanwhile",
        f"{failover:.1f} s to the next leader",
        "one write per action in the audit log, none by the thawed one, which ends",
    )
