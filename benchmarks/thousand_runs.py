"""Can one operator keep a thousand runs: what does it cost, and how soon is a NaN seen?

Runs the operator, as its own service account, against a real control plane whose hosts are KWOK's
(`fake_hosts`), and optionally `kopf_skeleton` against the same runs. After the ramp-up, for some
minutes, a run diverges now and then; measured are the seconds from its page's first NaN to the
deletion of its first pod. Needs the programs of tests/cluster (built at the first start), 8 GB of
memory, and root for nothing.

    python benchmarks/thousand_runs.py                        about 12 minutes on two cores
    python benchmarks/thousand_runs.py --runs 50 --wide 1     for development
    python benchmarks/thousand_runs.py --kopf FOLDER          a folder with kopf (pip --target)

Prints the table's row; the JSON goes to --output.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import fake_hosts
from diverging_runs import HOSTS, NAMESPACE, SCRAPE_SECONDS, WIDE_HOSTS, Bench
from observe import histogram_quantiles, row, series
from provenance import provenance

from lingcluster import operator_process
from lingcluster.build import Builder
from lingcluster.client import wait_for
from lingcluster.loopback import LoopbackBlock
from lingcluster.modules import ETCD, JOBSET, KUBERNETES, KUEUE, KWOK
from lingcluster.operator_process import OperatorAddresses, OperatorProcess
from lingcluster.processes import Process, Session

RAMP_UP_SECONDS = 900
CONTROL_PLANE = (ETCD, KUBERNETES, JOBSET, KUEUE)
_KOPF_USER = "admin"  # who writes nothing else while it is measured


def measure_operator(bench: Bench) -> dict[str, Any]:
    """Start the operator, let it start all runs, and measure it."""
    plane = bench.plane
    access = fake_hosts.REPOSITORY / "manifests" / "operator"
    operator_process.install_access(plane.kubectl, access)
    metrics, probes = plane.block.free_ports(2)
    operator = OperatorProcess(
        kubeconfig=plane.service_account_kubeconfig(
            operator_process.NAMESPACE, operator_process.SERVICE_ACCOUNT, expiration_seconds=86400
        ),
        namespaces=[],
        addresses=OperatorAddresses(f"{plane.address}:{metrics}", f"{plane.address}:{probes}"),
        log=plane.directory / "operator.log",
        session=plane.session,
        arguments=("--log-level=warning",),
    )
    operator.wait_until_ready()
    began = time.monotonic()
    bench.create()
    created = time.monotonic() - began

    def running() -> bool:
        phases = series(_page(operator), "ling_run_phase", phase="Running")
        return len(phases) == len(bench.names)

    while not running():  # a page of a thousand runs is not free
        assert time.monotonic() - began < RAMP_UP_SECONDS, "not all runs came up"
        time.sleep(1)
    ramp_up = time.monotonic() - began
    print(f"created in {created:.0f} s, all running after {ramp_up:.0f} s", flush=True)
    time.sleep(bench.settle_seconds)
    before = _page(operator)
    result = bench.measure(operator, user=operator_process.USER)
    after = _page(operator)
    wait, work = "ling_operator_queue_wait_seconds", "ling_operator_reconcile_seconds"
    result |= {
        "ramp_up_seconds": round(ramp_up),
        "passes_per_second": round(
            (sum(series(after, f"{work}_count")) - sum(series(before, f"{work}_count")))
            / result["seconds"],
            1,
        ),
        "reconcile_seconds": histogram_quantiles(before, after, work),
        "queue_wait_seconds": histogram_quantiles(before, after, wait),
    }
    operator.stop()
    return result


def _page(operator: OperatorProcess) -> str:
    """Return its own metrics; it may be too busy for them at once."""
    return wait_for("the operator's page", operator.metrics, timeout=120)


def measure_kopf(bench: Bench, folder: Path) -> dict[str, Any]:
    """Measure the skeleton on the runs that are left, their JobSets running already."""
    plane = bench.plane
    script = Path(__file__).with_name("kopf_skeleton.py")
    kubeconfig = plane.identity(_KOPF_USER).write_kubeconfig(plane.directory / "kopf.kubeconfig")
    kopf = Process(
        "kopf",
        [sys.executable, "-m", "kopf", "run", "--quiet", f"--namespace={NAMESPACE}", str(script)],
        log=plane.directory / "kopf.log",
        session=plane.session,
        environment={
            **os.environ,
            "PYTHONPATH": f"{folder}{os.pathsep}{script.parent}",
            "KUBECONFIG": str(kubeconfig),
        },
    )
    time.sleep(60 + bench.settle_seconds)  # it has annotated and taken up all runs by then
    assert kopf.returncode is None, kopf.tail()
    result = bench.measure(kopf, user=_KOPF_USER)
    kopf.stop()
    return result


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000, help=f"runs of {HOSTS} hosts")
    parser.add_argument("--wide", type=int, default=20, help=f"runs of {WIDE_HOSTS} hosts")
    parser.add_argument("--settle", type=float, default=60, help="seconds after the ramp-up")
    parser.add_argument("--seconds", type=float, default=200, help="that the load is looked at")
    parser.add_argument("--halts", type=int, default=100, help="runs that diverge meanwhile")
    parser.add_argument("--kopf", type=Path, help="a folder with kopf: measure it too")
    parser.add_argument("--output", type=Path, help="the JSON's file")
    parser.add_argument("--directory", type=Path, help="for logs, new and kept; default: none")
    return parser.parse_args()


def measure_all(options: argparse.Namespace, plane: fake_hosts.BusyPlane) -> dict[str, Any]:
    """Start everything, measure, and return the operators' results."""
    names = [f"run-{i}" for i in range(options.runs)] + [f"wide-{i}" for i in range(options.wide)]
    crds = fake_hosts.REPOSITORY / "manifests" / "crd"
    plane.start(crds=sorted(crds.glob("*.yaml")))
    plane.client.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    fake_hosts.start_pages(plane)
    fake_hosts.start_hosts(plane, pods=_pods(options))
    bench = Bench(plane, names, options.settle, options.seconds, options.halts)
    found = {"load_average_before": os.getloadavg()[0], "ling-operator": measure_operator(bench)}
    if options.kopf:
        found["kopf"] = measure_kopf(bench, options.kopf)
    return {**found, "load_average": os.getloadavg()[0]}


def _pods(options: argparse.Namespace) -> int:
    return options.runs * HOSTS + options.wide * WIDE_HOSTS


def main() -> None:
    """Measure, print the JSON and the table's row, write the JSON."""
    options = parse()
    pods = _pods(options)
    programs = Builder(report=print).ensure((*CONTROL_PLANE, KWOK))
    result: dict[str, Any] = {
        "question": f"an operator's cost and latency with runs of {pods} pods",
        **provenance("aiohttp", "pydantic", "prometheus-client"),
        "load": {
            "runs": options.runs,
            "hosts": HOSTS,
            "wide_runs": options.wide,
            "wide_hosts": WIDE_HOSTS,
            "pods": pods,
        },
        "real": "etcd, API server, scheduler, Job controller, JobSet's controller, metrics pages",
        "fake": f"all {pods} pods and their nodes are KWOK's",
        "flags": {name: list(flags) for name, flags in fake_hosts.FLAGS.items()},
        "scrape_interval_seconds": SCRAPE_SECONDS,
    }
    with tempfile.TemporaryDirectory() as own, Session() as session, LoopbackBlock() as block:
        directory = options.directory or Path(own)
        if options.directory:
            directory.mkdir(parents=True)
        plane = fake_hosts.BusyPlane(programs, directory, block, session)
        try:
            result |= measure_all(options, plane)
        finally:
            plane.stop()
    text = json.dumps(result, indent=1)
    print(text, row(result), sep="\n")
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
