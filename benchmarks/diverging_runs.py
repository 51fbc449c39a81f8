"""Many runs of which now and then one diverges, and what they cost the process that keeps them."""

from __future__ import annotations

import concurrent.futures
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import fake_hosts
from observe import Usage, quantile

from lingcluster.client import KubeClient, Manifest, wait_for
from lingcluster.processes import Process
from lingcluster.watch import Recording

NAMESPACE = "bench"
RUNS = f"/apis/ling.primatrix.io/v1alpha1/namespaces/{NAMESPACE}/trainingruns"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
HOSTS, WIDE_HOSTS = 4, 64
SCRAPE_SECONDS = 5
_WRITES = frozenset({"create", "update", "patch", "delete"})


def run_manifest(name: str, hosts: int) -> Manifest:
    """Return a TrainingRun whose pods' metrics the pages' server has."""
    config = {
        "preset": "ling2_tiny",
        "datasetType": "synthetic",
        "baseOutputDirectory": "/nowhere",
        "steps": 1_000_000,
        "metrics": {"metricsPort": fake_hosts.METRICS_PORT},
    }
    return {
        "apiVersion": "ling.primatrix.io/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": name},
        "spec": {
            "image": "fake",
            "cpu": {"processes": hosts},
            "run": config,
            "health": {"scrapeIntervalSeconds": SCRAPE_SECONDS},
        },
    }


@dataclass(frozen=True)
class Bench:
    """The control plane, the load, and how long to look."""

    plane: fake_hosts.BusyPlane
    names: list[str]
    settle_seconds: float
    seconds: float
    halts: int

    def create(self) -> None:
        """Create all runs, from eight connections."""
        clients = threading.local()

        def create(run: Manifest) -> None:
            if not hasattr(clients, "mine"):
                clients.mine = KubeClient(self.plane.identity("admin"))
            clients.mine.create(RUNS, run)

        wide = [name for name in self.names if name.startswith("wide")]
        runs = [run_manifest(n, WIDE_HOSTS if n in wide else HOSTS) for n in self.names]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(create, runs))

    def diverge(self) -> list[float]:
        """Let runs diverge one after another; return each one's seconds to the first deletion."""
        pause = self.seconds / self.halts
        victims = random.Random(0).sample(self._addresses(), self.halts)
        began: dict[str, float] = {}
        with Recording(self.plane.identity("admin"), PODS) as pods:
            for name, address in victims:
                began[name] = time.time()
                fake_hosts.ask(address, "/diverge")
                time.sleep(pause)
            wait_for(
                "the pods of the last run that diverged to be deleted",
                lambda: len(_deletions(pods, set(began))) == len(began),
                timeout=120,
                describe=lambda: began.keys() - _deletions(pods, set(began)).keys(),
            )
        for _, address in victims:
            fake_hosts.ask(address, "/heal")  # the address may be given to another pod
        ended = _deletions(pods, set(began))
        return [ended[name] - began[name] for name in began]

    def _addresses(self) -> list[tuple[str, str]]:
        """Return name and address of process 0 of each run that runs."""
        selector = "batch.kubernetes.io/job-completion-index=0"
        pods = self.plane.client.items(PODS, labelSelector=selector)
        return sorted(
            (pod["metadata"]["labels"]["ling.primatrix.io/run"], pod["status"]["podIP"])
            for pod in pods
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        )

    def measure(self, process: Process, *, user: str) -> dict[str, Any]:
        """Look at a process that keeps the runs while some diverge."""
        audit, before, began = self.plane.audit_log.mark(), Usage.of(process.pid), time.monotonic()
        latencies = self.diverge()
        after, seconds = Usage.of(process.pid), time.monotonic() - began
        writes = [each for each in audit.records(user=user) if each.verb in _WRITES]
        refused = sum(each.code >= 400 for each in writes)
        return {
            "seconds": round(seconds),
            "cpu_cores": round((after.cpu_seconds - before.cpu_seconds) / seconds, 3),
            "rss_mb": round(after.rss_mb),
            "rss_peak_mb": round(after.rss_peak_mb),
            "api_writes_per_second": round(len(writes) / seconds, 1),
            "api_writes_refused": refused,
            "nan_to_deleting_seconds": {
                "samples": len(latencies),
                "p50": round(quantile(latencies, 0.5), 2),
                "p99": round(quantile(latencies, 0.99), 2),
                "max": round(max(latencies), 2),
            },
        }


def _deletions(pods: Recording, runs: set[str]) -> dict[str, float]:
    """Return when the first pod of each run was seen with its deletion begun."""
    found: dict[str, float] = {}
    for change in list(pods.changes):
        metadata = change.object["metadata"]
        name = metadata["labels"]["ling.primatrix.io/run"]
        if name in runs and "deletionTimestamp" in metadata:
            found.setdefault(name, change.time)
    return found
