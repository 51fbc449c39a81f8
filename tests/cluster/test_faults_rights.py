"""An operator that loses a right while it runs names it, lives, and goes on when it is back."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lingcluster.apart import Apart, SideBySide
from lingcluster.api_proxy import Exchange, Moment
from lingcluster.client import Identity, Manifest, wait_for
from lingcluster.control_plane import ControlPlane
from lingcluster.fault_table import FaultTable
from lingcluster.kueue_controller import make_queue
from lingcluster.operator_process import OperatorProcess
from lingcluster.rights import RBAC, Right, cluster_role, limited, rights, without
from lingcluster.sample_runs import shell_run
from lingcluster.story import Story

AT_ONCE = 6


@dataclass
class Loss:
    """An operator that loses one right while it runs, and what it makes of it."""

    control_plane: ControlPlane
    place: Apart
    role: Manifest
    right: Right
    nan: Path

    def story(self) -> tuple[float, str]:
        """Lose the right, get it back; return the seconds until it was named, and by what."""
        _, resource, verb = self.right
        runs, operator = self.place.runs, self.place.start()
        operator.wait_until_ready()
        queue = {}
        if (resource, verb) == ("workloads", "patch"):
            make_queue(runs.client, runs.namespace, "team", pods=2)
            queue = {"queue": "team"}
        runs.apply(self._run("steady", **queue))
        runs.wait_phase("steady", "Running")
        told = wait_for("its event", lambda: self._told("PodsRunning"))
        self._grant(without(self.role, self.right), allowed=False)
        started = time.monotonic()
        self._need(resource, verb)
        words = f'cannot {verb} resource "{resource}"'
        where = self._named(operator, resource, verb, words)
        seconds = time.monotonic() - started
        assert operator.returncode is None
        self._grant(self.role["rules"], allowed=True)
        self._recovered(operator, resource, verb, told)
        log = self.place.log.read_text()
        assert log.count('"event": "started"') == 1
        assert "Traceback" not in log
        assert operator.stop(grace=30) == 0
        return seconds, where

    def _run(self, name: str, **spec: Any) -> Manifest:
        script = f"trap 'exit 143' TERM; while [ ! -e {self.nan} ]; do sleep 0.2 & wait $!; done"
        health = {"scrapeIntervalSeconds": 1, "metricsMissing": {"action": "Ignore"}}
        return shell_run(name, f"{script}; exit 90", health=health, **spec)

    def _grant(self, rules: list[Manifest], *, allowed: bool) -> None:
        """Change the role; return when the API server goes by it."""
        client, name = self.control_plane.client, f"limited-{self.place.namespace}"
        client.patch(f"{RBAC}/clusterroles/{name}", {"rules": rules})
        group, resource, verb = self.right
        plural, _, sub = resource.partition("/")
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{self.place.namespace}:{name}",
                "resourceAttributes": {
                    "namespace": self.place.namespace,
                    "group": group,
                    "resource": plural,
                    "subresource": sub,
                    "verb": verb,
                },
            },
        }
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        wait_for(
            f"{self.right} to be {allowed}",
            lambda: client.create(path, review)["status"]["allowed"] == allowed,
        )

    def _need(self, resource: str, verb: str) -> None:
        """Do what makes the operator use the right."""
        runs = self.place.runs
        match resource, verb:
            case _, "list":
                self.place.proxy.gate = forgotten(resource)
                self.place.proxy.end_watches(resource)
            case _, "watch":
                self.place.proxy.end_watches(resource)
            case ("trainingruns/status", _) | (_, "patch"):
                runs.edit("steady", suspend=True)
            case ("jobsets", "create"):
                runs.apply(self._run("later"))
            case ("jobsets", "delete") | ("events", "create"):
                runs.edit("steady", attempt=2)
            case ("pods/log", "get"):
                self.nan.touch()
            case _:
                pytest.fail(f"nothing here needs {self.right}; say what does, and what then shows")

    def _named(self, operator: OperatorProcess, resource: str, verb: str, words: str) -> str:
        """Wait until the missing right is named; return where."""
        runs = self.place.runs
        match resource, verb:
            case _, "list" | "watch":
                wait_for("its readiness", lambda: operator.unready(words))
                message = runs.wait_condition("steady", "Permitted", "False", "Refused")["message"]
                assert words in message
                return "/readyz and Permitted"
            case "trainingruns/status", _:
                wait_for("its log", lambda: "cannot update resource" in self.place.log.read_text())
                assert runs.status("steady")["phase"] == "Running"
                return "the log"
            case "jobsets", "create":
                condition = runs.wait_condition("later", "Created", "False", "CreateFailed")
                assert words in condition["message"]
                assert runs.status("steady")["phase"] == "Running"
                return "Created"
            case "pods/log", _:
                run = runs.wait("steady", "its evidence", evidence_of)
                assert run["status"]["phase"] == "Halted"
                assert "grant get on pods/log" in evidence_of(run)["logProblem"]
                return "attempts[].evidence"
        message = runs.wait_condition("steady", "Permitted", "False", "Refused")["message"]
        assert words in message
        return "Permitted"

    def _recovered(
        self, operator: OperatorProcess, resource: str, verb: str, told: list[Manifest]
    ) -> None:
        """Wait until all is as if the right had never been missing."""
        runs = self.place.runs
        match resource, verb:
            case _, "list" | "watch":
                wait_for("its readiness", operator.is_ready)
                runs.wait_condition("steady", "Permitted", "True", "Accepted")
            case ("trainingruns/status", _) | (_, "patch"):
                runs.wait_phase("steady", "Suspended")
                runs.wait_no_live_pod("steady")
            case "jobsets", "create":
                runs.wait_phase("later", "Running")
            case ("jobsets", "delete") | ("events", "create"):
                again = "the second attempt"
                runs.wait("steady", again, lambda run: run["status"]["attempt"] == 2)
                runs.wait_phase("steady", "Running")
                wait_for("its events", lambda: len(self._told("PodsRunning")) > len(told))
        assert runs.status("steady").get("restarts", 0) == 0

    def _told(self, reason: str) -> list[Manifest]:
        return [each for each in self.place.runs.events("steady") if each["reason"] == reason]


def evidence_of(run: Manifest) -> Manifest:
    """Return the evidence of a run's newest attempt, empty before there is any."""
    attempts = run.get("status", {}).get("attempts") or [{}]
    return attempts[-1].get("evidence") or {}


def forgotten(resource: str) -> Callable[[Exchange, Moment], None]:
    """Let the next watch of a resource begin at no version, so that the operator lists again."""
    spoilt: list[Exchange] = []

    def gate(exchange: Exchange, moment: Moment) -> None:
        wanted = exchange.watches and exchange.resource == resource
        if moment == "before" and wanted and not spoilt:
            spoilt.append(exchange)
            exchange.query["resourceVersion"] = "none"

    return gate


@pytest.mark.slow
@pytest.mark.usefixtures("kueue")
def test_each_right_that_is_lost_is_named_the_operator_lives_and_goes_on_when_it_is_back(
    control_plane: ControlPlane,
    side_by_side: SideBySide,
    repository: Path,
    faults: FaultTable,
    story: Story,
    tmp_path: Path,
) -> None:
    role = cluster_role(repository / "manifests" / "operator")

    def lose(right: Right) -> tuple[float, str]:
        def identity(namespace: str) -> Identity:
            return limited(control_plane, namespace, role)

        with side_by_side.apart(identity) as place:
            nan = tmp_path / f"{place.namespace}.nan"
            return Loss(control_plane, place, role, right, nan).story()

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        everything = sorted(rights(role))
        found = dict(zip(everything, pool.map(lose, everything), strict=True))
    for (group, resource, verb), (seconds, where) in found.items():
        story.tell(f"{verb} {resource}.{group or 'core'}: {seconds:.1f} s, named in {where}")
    worst = max(seconds for seconds, _ in found.values())
    faults.record(
        "each right of the operator's role taken away in turn, and given back",
        f"{len(found)} rights, each named within {worst:.1f} s",
        "a condition, /readyz or the log names it; no restart; all goes on when it is back",
    )
