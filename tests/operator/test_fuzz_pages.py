"""10,000 fuzzed pages, through scrape, fold, judge, reconcile and the stored status."""

import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import fuzzed
from ling_operator.api import TrainingRun, TrainingRunStatus, dump
from ling_operator.reconcile import reconcile
from ling_operator.scrape import ScrapeFailure, ScrapeTarget, read_page
from ling_operator.verdict import HealthSample, findings, fold

SENSITIVE = {
    "lossSpike": {"consecutiveSteps": 1},
    "gradNormSpike": {"consecutiveSteps": 1},
    "numZeros": {"consecutiveSteps": 1},
    "totalWeights": {"consecutiveSteps": 1},
    "nonFinite": {"action": "Alert"},
    "zeroLoss": {"action": "Alert"},
}


@pytest.mark.slow
def test_no_page_breaks_the_operator_and_no_nan_reaches_json(scene: Any) -> None:
    print(f"seed {fuzzed.SEED}")
    target = ScrapeTarget(ip="10.0.0.1", port=9464, pod_uid="pod-0", host_network=True)
    start: TrainingRun = scene.running(health=SENSITIVE)
    run, seen = start, Counter[str]()
    for number, page in enumerate(fuzzed.pages()):
        now = scene.at(number * 5.0)
        result = read_page(page.decode("utf-8", "replace"), target, now=now)
        if isinstance(result, ScrapeFailure):
            seen[result.reason] += 1
            json.dumps(result.message)
            continue
        seen["read"] += 1
        sample = replace(result, time=now)
        state = fold(run.status.health, sample, run.spec.health)
        for verdict in findings(state, run.spec.health):
            seen[verdict.reason] += 1
        world = {"jobset": scene.jobset(), "pods": scene.pods()}
        plan = reconcile(scene.observed(run, sample=sample, now=now, **world))
        written = json.dumps(dump(plan.status), allow_nan=False)
        status = TrainingRunStatus.model_validate_json(written, strict=True)
        assert status == plan.status
        run = run.model_copy(update={"status": status})
        if number % 100 == 0:
            run = start  # or the windows would hold nothing but odd values
    print(dict(seen))
    assert seen["read"] > 0.4 * fuzzed.COUNT, seen
    for reason in ("NotMetrics", "OtherPod", "UnknownPod", "NonFiniteLoss", "LossSpike"):
        assert seen[reason] > 5, (reason, seen)


def test_the_pages_hold_what_has_no_place_in_json() -> None:
    target = ScrapeTarget(ip="10.0.0.1", port=9464, pod_uid="pod-0", host_network=False)
    odd = 0
    for page in fuzzed.pages(count=2000):
        sample = read_page(page.decode("utf-8", "replace"), target, now=None)  # type: ignore[arg-type]
        if isinstance(sample, HealthSample):
            numbers = (sample.loss, sample.lm_loss, sample.raw_grad_norm, sample.num_zeros)
            odd += any(n is not None and not math.isfinite(n) for n in numbers)
    assert odd > 100
