"""JobSet of an attempt, shaped as XPK shapes it. Every default is written out. Pure."""

import hashlib
import json
from typing import Any

from ling_operator.api import (
    API_VERSION,
    KIND,
    TEMPLATE_HASH_ANNOTATION,
    TrainingRun,
    TrainingRunSpec,
    dump,
)
from ling_operator.name_budget import REPLICATED_JOB
from ling_operator.pod_status import FINAL_EXIT_CODES, RESTART_EXIT_CODES
from ling_operator.pod_template import (
    EXCLUSIVE_TOPOLOGY,
    annotations_of,
    build_pod_template,
    labels_of,
)
from ling_operator.runnable import (
    num_hosts,
    require_runnable,
    trainer_containers,
)
from ling_operator.workload import QUEUE_LABEL
from ling_trainer.schema import ConfigError

type Manifest = dict[str, Any]

NODE_POOL_LABEL = "cloud.google.com/gke-nodepool"


def build_jobset(run: TrainingRun, *, attempt: int, restore_before_step: int | None) -> Manifest:
    """Build the JobSet of an attempt.

    Args:
      run: the object; its status is not read.
      attempt: number of the attempt.
      restore_before_step: the trainer restores a checkpoint before this step; None: the newest.

    Raises:
      ConfigError: the spec cannot be run, or runs nothing; one line for each problem.
    """
    require_runnable(run)
    if run.spec.watch is not None:
        raise ConfigError("spec.watch names a JobSet that somebody else launches; none is made")
    name, template = run.metadata.name, run.spec.template
    annotations = annotations_of(run) | {TEMPLATE_HASH_ANNOTATION: template_hash(run.spec)}
    # A slice to a node pool; nodes that are grouped by another label, or by none, have it said.
    if run.spec.tpu is not None and EXCLUSIVE_TOPOLOGY not in template.annotations:
        annotations[EXCLUSIVE_TOPOLOGY] = NODE_POOL_LABEL
    spec: Manifest = {
        # Kueue un-suspends it once admitted. Without Kueue it waits: it must not jump the queue.
        "suspend": run.spec.queue is not None,
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "startupPolicy": {"startupPolicyOrder": "AnyOrder"},
        "successPolicy": {"operator": "All"},
        "failurePolicy": _failure_policy(run.spec.restarts),
        "replicatedJobs": [_replicated_job(run, attempt, restore_before_step)],
    }
    if template.ttl_seconds_after_finished is not None:
        spec["ttlSecondsAfterFinished"] = template.ttl_seconds_after_finished
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            "namespace": run.metadata.namespace,
            "labels": labels_of(run, attempt) | _queue_label(run.spec),
            "annotations": annotations,
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": name,
                    "uid": run.metadata.uid,
                    "controller": True,
                }
            ],
        },
        "spec": spec,
    }


def _queue_label(spec: TrainingRunSpec) -> dict[str, str]:
    return {QUEUE_LABEL: spec.queue} if spec.queue is not None else {}


def template_hash(spec: TrainingRunSpec) -> str:
    """Hash what an attempt runs, as the user wrote it; suspend, attempt and health are not in."""
    fixed = dump(spec)
    for key in ("suspend", "attempt", "health"):
        del fixed[key]
    canonical = json.dumps(fixed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _failure_policy(restarts: int) -> Manifest:
    codes = "|".join(map(str, RESTART_EXIT_CODES))
    return {
        "maxRestarts": restarts,
        "restartStrategy": "Recreate",
        "rules": [
            {
                "name": "restartable",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [f"exit code ({codes}) "],
            },
            {
                "name": "final",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
            },
        ],
    }


def _replicated_job(run: TrainingRun, attempt: int, restore_before_step: int | None) -> Manifest:
    spec = run.spec
    slices = spec.tpu.slices if spec.tpu is not None else 1
    hosts = num_hosts(spec) // slices
    return {
        "name": REPLICATED_JOB,
        "groupName": "default",
        "replicas": slices,
        "template": {
            "metadata": {"labels": labels_of(run, attempt)},
            "spec": {
                "parallelism": hosts,
                "completions": hosts,
                "completionMode": "Indexed",
                "backoffLimit": 0,
                "podReplacementPolicy": "Failed",
                "podFailurePolicy": {
                    "rules": [
                        {
                            "action": "Ignore",
                            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                        },
                        *_fail_job(spec, FINAL_EXIT_CODES),
                        *_fail_job(spec, RESTART_EXIT_CODES),
                    ]
                },
                "template": build_pod_template(run, attempt, restore_before_step),
            },
        },
    }


def _fail_job(spec: TrainingRunSpec, codes: tuple[int, ...]) -> list[Manifest]:
    """Return a rule for each trainer container: one without a name would count sidecars too."""
    return [
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": name, "operator": "In", "values": list(codes)},
        }
        for name in trainer_containers(spec)
    ]
