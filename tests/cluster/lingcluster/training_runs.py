"""The TrainingRuns of one namespace, as their users see and edit them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lingcluster.client import KubeClient, Manifest, find_condition, wait_for
from lingcluster.watch import ENDED
from lingcluster.workloads import JOBSETS

GROUP = "/apis/ling.primatrix.io/v1alpha1"
RUN_LABEL = "ling.primatrix.io/run"
ATTEMPT_LABEL = "ling.primatrix.io/attempt"
_FINAL = frozenset({"Halted", "Complete", "Failed", "Cancelled"})
_PATIENCE = 240.0  # a trainer's first start compiles, perhaps on a busy machine


class TrainingRuns:
    """Read and write the runs of a namespace, and what belongs to them, as administrator.

    Args:
      client: the administrator's.
      namespace: the only one.
    """

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self.client = client
        self.namespace = namespace
        self.collection = f"{GROUP}/namespaces/{namespace}/trainingruns"
        self.jobsets = f"{JOBSETS}/namespaces/{namespace}/jobsets"
        self.pods_path = f"/api/v1/namespaces/{namespace}/pods"

    def apply(self, run: Manifest) -> Manifest:
        """Create a run, or change it to what `run` says."""
        path = f"{self.collection}/{run['metadata']['name']}"
        return self.client.apply(path, run)

    def edit(self, name: str, **spec: Any) -> Manifest:
        """Merge fields into a run's spec.

        Raises:
          ApiError: the API server refuses the edit.
        """
        return self.client.patch(f"{self.collection}/{name}", {"spec": spec})

    def delete(self, name: str) -> None:
        """Delete a run as kubectl does, in the background."""
        self.client.delete(f"{self.collection}/{name}")

    def get(self, name: str) -> Manifest:
        """Return a run."""
        return self.client.get(f"{self.collection}/{name}")

    def status(self, name: str) -> Manifest:
        """Return a run's status, empty before the first."""
        return self.get(name).get("status", {})

    def condition(self, name: str, kind: str) -> Manifest | None:
        """Return one condition of a run."""
        return find_condition(self.get(name), kind)

    def jobset(self, name: str) -> Manifest:
        """Return a run's JobSet."""
        return self.client.get(f"{self.jobsets}/{name}")

    def patch_jobset(self, name: str, **spec: Any) -> Manifest:
        """Change a JobSet behind the operator's back."""
        return self.client.patch(f"{self.jobsets}/{name}", {"spec": spec})

    def pods(self, name: str) -> list[Manifest]:
        """Return a run's pods, of every attempt."""
        return self.client.items(self.pods_path, labelSelector=f"{RUN_LABEL}={name}")

    def pod(self, name: str, process: int) -> str:
        """Return the name of a run's newest pod of a process; it must be of one slice."""
        of_process = [
            each["metadata"]
            for each in self.pods(name)
            if each["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]
            == str(process)
        ]
        return max(of_process, key=lambda metadata: metadata["creationTimestamp"])["name"]

    def live_pods(self, name: str) -> list[str]:
        """Return the names of a run's pods that may still have a process."""
        return [pod["metadata"]["name"] for pod in self.pods(name) if is_live(pod)]

    def events(self, name: str) -> list[Manifest]:
        """Return the events about a run."""
        path = f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events"
        return [
            event
            for event in self.client.items(path)
            if (event["regarding"]["kind"], event["regarding"]["name"]) == ("TrainingRun", name)
        ]

    def wait(
        self, name: str, what: str, holds: Callable[[Manifest], object], timeout: float = _PATIENCE
    ) -> Manifest:
        """Wait until `holds` is true of a run; return the run.

        Raises:
          TimeoutError: it never was; the message holds the status and the pods.
        """

        def look() -> Manifest | None:
            run = self.get(name)
            return run if holds(run) else None

        return wait_for(
            f"{name}: {what}", look, timeout=timeout, describe=lambda: self._describe(name)
        )

    def wait_phase(self, name: str, phase: str, timeout: float = _PATIENCE) -> Manifest:
        """Wait until a run is in a phase; return it.

        Raises:
          AssertionError: it has ended otherwise.
          TimeoutError: it never was.
        """

        def reached(run: Manifest) -> bool:
            status = run.get("status", {})
            now, seen = status.get("phase"), status.get("observedGeneration")
            if now in _FINAL and now != phase and seen == run["metadata"]["generation"]:
                # Only a halt may still follow another end: an exit code that was seen late.
                assert phase == "Halted", self._describe(name)
            return now == phase

        return self.wait(name, f"phase {phase}", reached, timeout)

    def wait_step(self, name: str, step: int, timeout: float = _PATIENCE) -> int:
        """Wait until status shows a step or a later one; return it.

        Raises:
          TimeoutError: it never did.
        """
        run = self.wait(name, f"step {step}", lambda run: shown_step(run) >= step, timeout)
        return shown_step(run)

    def wait_condition(self, name: str, kind: str, truth: str, reason: str) -> Manifest:
        """Wait until a condition has a status and a reason; return it.

        Raises:
          TimeoutError: it never had.
        """

        def holds(run: Manifest) -> bool:
            found = find_condition(run, kind) or {}
            return (found.get("status"), found.get("reason")) == (truth, reason)

        run = self.wait(name, f"{kind}={truth} for {reason}", holds)
        condition = find_condition(run, kind)
        assert condition is not None
        return condition

    def wait_no_live_pod(self, name: str) -> None:
        """Wait until no process of a run can be left.

        Raises:
          TimeoutError: one is.
        """
        wait_for(
            f"no live pod of {name}",
            lambda: not self.live_pods(name),
            timeout=_PATIENCE,
            describe=lambda: self._describe(name),
        )

    def _describe(self, name: str) -> str:
        pods = [
            f"{pod['metadata']['name']} {pod['status'].get('phase')}" for pod in self.pods(name)
        ]
        return f"{self.status(name)}; pods: {pods}"


def is_live(pod: Manifest) -> bool:
    """Tell whether a process of a pod may still run."""
    return pod["status"].get("phase") not in ENDED


def shown_step(run: Manifest) -> int:
    """Return the step that `kubectl get trun` shows, 0 before the first."""
    return run.get("status", {}).get("training", {}).get("step", 0)
