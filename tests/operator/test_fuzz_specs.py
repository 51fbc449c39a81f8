"""10,000 fuzzed specs: each gets a JobSet or a condition that names why not; nothing escapes."""

import json
from collections import Counter
from typing import Any

import pytest

import fuzzed
from ling_operator.api import dump
from ling_operator.plan import CreateJobSet
from ling_operator.run_view import view_run

REASONS = {"InvalidConfig", "NotStarted"}


@pytest.mark.slow
def test_every_spec_gets_a_jobset_or_a_named_condition_and_no_exception_escapes(
    scene: Any,
) -> None:
    print(f"seed {fuzzed.SEED}")
    seen: Counter[str] = Counter()
    for manifest in fuzzed.specs():
        view = view_run(manifest)
        observed = scene.observed(view.run, spec_error=view.problem)
        plan = scene.reconcile(observed)
        after = scene.after(view.run, plan)
        json.dumps(dump(plan.status), allow_nan=False)
        (created,) = (c for c in after.status.conditions if c.type == "Created")
        if plan.actions:
            (action,) = plan.actions
            assert isinstance(action, CreateJobSet), manifest
            json.dumps(action.manifest, allow_nan=False)
            seen["JobSet"] += 1
        elif manifest["spec"].get("watch") is not None and created.reason != "InvalidConfig":
            seen["watch"] += 1
        else:
            assert created.status == "False"
            assert created.reason in REASONS, (created, manifest)
            assert created.message.isprintable() or "\n" in created.message
            seen[created.reason] += 1
    print(dict(seen))
    assert seen.total() == fuzzed.COUNT
    assert seen["JobSet"] > 0.35 * fuzzed.COUNT, seen
    assert seen["InvalidConfig"] > 0.2 * fuzzed.COUNT, seen
