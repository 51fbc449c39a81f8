"""10,000 fuzzed specs: JobSets that the API server accepts, or a condition that says why not."""

from __future__ import annotations

import queue
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

import fuzzed
from ling_operator.api import ConditionType
from ling_operator.conditions import find
from ling_operator.plan import CreateJobSet, Observed
from ling_operator.reconcile import reconcile
from ling_operator.run_view import RunView, view_run
from lingcluster.client import ApiError, KubeClient
from lingcluster.training_runs import TrainingRuns

AT_ONCE = 8
NOW = datetime(2026, 11, 30, tzinfo=UTC)


def decide(view: RunView, create_error: str | None = None) -> tuple[Any, str, str]:
    """Return the JobSet to create, if any, and reason and message of the condition Created."""
    assert view.run is not None
    observed = Observed(run=view.run, spec_error=view.problem, create_error=create_error, now=NOW)
    plan = reconcile(observed)
    created = find(plan.status.conditions, ConditionType.CREATED)
    jobset = next((a.manifest for a in plan.actions if isinstance(a, CreateJobSet)), None)
    reason, message = (created.reason, created.message) if created is not None else ("", "")
    return jobset, reason, message


@pytest.mark.slow
def test_a_third_of_10000_fuzzed_specs_are_jobsets_and_all_others_have_a_named_condition(
    runs: TrainingRuns,
) -> None:
    print(f"seed {fuzzed.SEED}")
    clients: queue.SimpleQueue[KubeClient] = queue.SimpleQueue()
    for _ in range(AT_ONCE):
        clients.put(KubeClient(runs.client.identity))

    def outcome(manifest: dict[str, Any]) -> str:
        view = view_run(manifest)
        jobset, reason, _ = decide(view)
        if jobset is None:
            return reason
        jobset["metadata"]["namespace"] = runs.namespace
        client = clients.get()
        try:
            client.create(runs.jobsets, jobset, dryRun="All", fieldValidation="Strict")
        except ApiError as error:
            said = str(error)
            _, reason, message = decide(view, create_error=said)
            assert said[:200] in message, "the user is told what the API server said"
            return reason
        finally:
            clients.put(client)
        return "accepted"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        seen = Counter(pool.map(outcome, fuzzed.specs()))
    while not clients.empty():
        clients.get().close()
    print(dict(seen))
    assert seen.total() == fuzzed.COUNT
    assert seen.keys() == {"accepted", "InvalidConfig", "NotStarted", "CreateFailed"}
    assert seen["accepted"] >= 0.3 * fuzzed.COUNT, seen
    assert seen["CreateFailed"] > 100, "the API server knows more than the operator"
