"""The pods of an attempt: container, environment, resources, selectors. Pure."""

from collections.abc import Mapping
from typing import Any

from ling_operator.api import ATTEMPT_LABEL, METRICS_PORT_ANNOTATION, RUN_LABEL, TrainingRun
from ling_operator.name_budget import REPLICATED_JOB
from ling_operator.runnable import (
    XPK_LABEL,
    metrics_port,
    num_hosts,
    run_config_json,
    trainer_containers,
)
from ling_operator.tpu import SliceShape, slice_shape

type Manifest = dict[str, Any]

COORDINATOR_PORT = 8476
EXCLUSIVE_TOPOLOGY = "alpha.jobset.sigs.k8s.io/exclusive-topology"
DEFAULT_COMMAND = ("python3", "-m", "ling_trainer")

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - not a file of ours
_JOB_INDEX = "metadata.labels['jobset.sigs.k8s.io/job-index']"
_COMPLETION_INDEX = "metadata.labels['batch.kubernetes.io/job-completion-index']"


def build_pod_template(
    run: TrainingRun, attempt: int, restore_before_step: int | None
) -> Manifest:
    """Build the pod template of an attempt; the spec must be runnable."""
    template = run.spec.template
    shape = slice_shape(run.spec.tpu) if run.spec.tpu is not None else None
    users = any(mount.get("mountPath") == _SHARED_MEMORY for mount in template.volume_mounts)
    needs_memory = shape is not None and not users
    spec: Manifest = {
        "restartPolicy": "Never",
        "schedulerName": "default-scheduler",
        "hostNetwork": template.host_network,
        "dnsPolicy": "ClusterFirstWithHostNet" if template.host_network else "ClusterFirst",
        "terminationGracePeriodSeconds": template.termination_grace_period_seconds,
        "nodeSelector": (shape.node_selector if shape else {}) | template.node_selector,
        "tolerations": [
            *([{"key": "google.com/tpu", "operator": "Exists"}] if shape else []),
            *template.tolerations,
        ],
        "containers": [
            *(
                _container(run, attempt, restore_before_step, index, needs_memory=needs_memory)
                for index in range(len(trainer_containers(run.spec)))
            ),
            *template.sidecars,
        ],
        "volumes": [
            *([{"name": "dshm", "emptyDir": {"medium": "Memory"}}] if needs_memory else []),
            *template.volumes,
        ],
    }
    optional: Manifest = {
        "serviceAccountName": template.service_account_name,
        "priorityClassName": template.priority_class_name,
        "imagePullSecrets": list(template.image_pull_secrets),
        "initContainers": list(template.init_containers),
    }
    spec |= {key: value for key, value in optional.items() if value}
    return {
        "metadata": {"labels": labels_of(run, attempt), "annotations": annotations_of(run)},
        "spec": spec,
    }


def _container(
    run: TrainingRun,
    attempt: int,
    restore_before_step: int | None,
    index: int,
    *,
    needs_memory: bool,
) -> Manifest:
    """Build one trainer container; several of a pod share its chips and take a port each."""
    spec, template = run.spec, run.spec.template
    shape = slice_shape(spec.tpu) if spec.tpu is not None else None
    shared_memory = [{"name": "dshm", "mountPath": _SHARED_MEMORY}] if needs_memory else []
    container: Manifest = {
        "name": trainer_containers(spec)[index],
        "image": spec.image,
        "command": list(spec.command or DEFAULT_COMMAND),
        "args": list(spec.args),
        "env": _environment(run, attempt, restore_before_step, index),
        "resources": _resources(template.resources, shape),
        "volumeMounts": [*shared_memory, *template.volume_mounts],
        "securityContext": {"privileged": template.privileged},
        # Prometheus finds it by its name. On the host network it is the node's port too: then the
        # scheduler keeps other trainers off, whose metrics would be read as this run's.
        "ports": [
            {"name": "metrics", "containerPort": metrics_port(run) + index, "protocol": "TCP"}
        ],
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
    }
    if template.image_pull_policy is not None:
        container["imagePullPolicy"] = template.image_pull_policy
    return container


def _resources(resources: Mapping[str, Any], shape: SliceShape | None) -> Manifest:
    if shape is None:
        return dict(resources)
    chips = {"google.com/tpu": shape.chips_per_host // shape.containers}
    return {**resources, "limits": {**resources.get("limits", {}), **chips}}


def _environment(
    run: TrainingRun, attempt: int, restore_before_step: int | None, container: int
) -> list[Manifest]:
    spec, name = run.spec, run.metadata.name
    containers, slices = len(trainer_containers(spec)), spec.tpu.slices if spec.tpu else 1
    processes = num_hosts(spec) * containers
    values = {
        "LING_RUN": name,
        "LING_RUN_NAMESPACE": run.metadata.namespace,
        "LING_ATTEMPT": str(attempt),
    }
    fields = {"POD_UID": "metadata.uid", "POD_IP": "status.podIP"}
    if spec.run:
        values["LING_RUN_CONFIG"] = run_config_json(run)
    if restore_before_step is not None:
        values["LING_RESTORE_BEFORE_STEP"] = str(restore_before_step)
    if spec.cpu is not None:
        values["JAX_PLATFORMS"] = "cpu"
    if processes > 1:
        # On TPUs too: nobody else says it where the cluster is not GKE, whose own variables
        # (TPU_*, MEGASCALE_*), of the same places, are left to GKE.
        address = f"{name}-{REPLICATED_JOB}-0-0.{name}:{COORDINATOR_PORT}"
        values["LING_COORDINATOR_ADDRESS"] = address
        values["LING_NUM_PROCESSES"] = str(processes)
        values["LING_HOSTS_PER_SLICE"] = str(num_hosts(spec) // slices)
        fields |= {"LING_SLICE_INDEX": _JOB_INDEX, "LING_HOST_INDEX": _COMPLETION_INDEX}
    if containers > 1:
        values["LING_CONTAINERS_PER_HOST"] = str(containers)
        values["LING_CONTAINER_INDEX"] = str(container)
    users = {str(variable.get("name")) for variable in spec.template.env}
    return [
        *({"name": n, "value": value} for n, value in values.items() if n not in users),
        *({"name": n, "valueFrom": {"fieldRef": {"fieldPath": p}}} for n, p in fields.items()),
        *spec.template.env,
    ]


def labels_of(run: TrainingRun, attempt: int) -> dict[str, str]:
    """Return the labels of everything that belongs to an attempt."""
    name = run.metadata.name
    own = {RUN_LABEL: name, ATTEMPT_LABEL: str(attempt), XPK_LABEL: name}
    return run.spec.template.labels | own


def annotations_of(run: TrainingRun) -> dict[str, str]:
    """Return the annotations of a run's JobSet and pods.

    An exclusive-topology of "" is how a user asks for none. JobSet's webhook goes by its being
    there, on the pod too, and would make an affinity of it that the API server refuses.
    """
    users = dict(run.spec.template.annotations)
    if users.get(EXCLUSIVE_TOPOLOGY) == "":
        del users[EXCLUSIVE_TOPOLOGY]
    return users | {METRICS_PORT_ANNOTATION: str(metrics_port(run))}
