"""The least that kopf needs for the operator's loop: submit, scrape, write status, halt on NaN.

Only to be measured beside the operator (`thousand_runs.py --kopf`). It has the product's JobSet,
parser of pages and rhythm of writes, and nothing else of it: no health rules but one NaN, no
conditions, restarts, attempts, queues, events or leader election.

    pip install --target FOLDER kopf==1.45.2
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import kopf  # pyright: ignore[reportMissingImports]
from fake_hosts import METRICS_PORT

from ling_operator.api import TrainingRun
from ling_operator.connection import discover
from ling_operator.jobset import build_jobset
from ling_operator.rest import ApiError, RestClient
from ling_operator.scrape import ScrapeSession, ScrapeTarget, scrape
from ling_operator.verdict import HealthSample

GROUP = "ling.primatrix.io"
RUN_LABEL = f"{GROUP}/run"
INTERVAL_SECONDS = 5.0
STATUS_SECONDS = 10.0
_JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets"

type Body = Mapping[str, Any]
type Index = dict[tuple[str, str], tuple[str, str]]


@kopf.on.startup()
async def open_connections(settings: Any, memo: Any, **_: Any) -> None:
    """Open one pool for the API server and one for the pods, as the operator has."""
    settings.posting.enabled = False
    memo.client = await RestClient(discover(None)).__aenter__()
    memo.session = await ScrapeSession().__aenter__()


@kopf.index(
    "pods", labels={RUN_LABEL: kopf.PRESENT, "batch.kubernetes.io/job-completion-index": "0"}
)
async def processes(labels: Body, status: Body, meta: Body, namespace: str, **_: Any) -> Index:
    """Keep address and uid of each run's process 0."""
    if status.get("phase") != "Running" or meta.get("deletionTimestamp"):
        return {}
    return {(namespace, labels[RUN_LABEL]): (status["podIP"], meta["uid"])}


@kopf.on.create(GROUP, "trainingruns")
@kopf.on.resume(GROUP, "trainingruns")
async def submit(body: Body, namespace: str, memo: Any, **_: Any) -> None:
    """Create the run's JobSet unless it exists."""
    run = TrainingRun.parse(json.loads(json.dumps(dict(body))))
    manifest = build_jobset(run, attempt=1, restore_before_step=None)
    try:
        await memo.client.post(_JOBSETS.format(namespace), manifest)
    except ApiError as error:
        if not error.is_conflict:
            raise


@kopf.timer(GROUP, "trainingruns", interval=INTERVAL_SECONDS)
async def watch_health(
    name: str, namespace: str, memo: Any, patch: Any, processes: Any, **_: Any
) -> None:
    """Read process 0's page every five seconds; write what it says every ten; halt on NaN."""
    for ip, uid in processes.get((namespace, name), ()):
        target = ScrapeTarget(ip=ip, port=METRICS_PORT, pod_uid=uid, host_network=False)
        sample = await scrape(memo.session, target)
        if not isinstance(sample, HealthSample):
            continue
        if sample.is_nan:
            jobset = f"{_JOBSETS.format(namespace)}/{name}"
            await memo.client.merge_patch(jobset, {"spec": {"suspend": True}})
        if sample.is_nan or time.monotonic() - memo.get("written", 0) >= STATUS_SECONDS:
            patch.status["training"] = {"step": sample.step, "loss": f"{sample.loss:.4f}"}
            memo.written = time.monotonic()
