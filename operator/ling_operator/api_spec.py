"""spec of a TrainingRun: what a user asks for."""

from typing import Annotated, Any, Literal

from pydantic import Field

from ling_operator.api_names import Count, Fragment
from ling_operator.health_policy import HealthPolicy
from ling_trainer.schema import Schema


class TpuSlice(Schema):
    """TPU slices, all of one shape."""

    accelerator: Annotated[str, Field(min_length=1, max_length=63)]
    """GKE's label value (tpu-v5p-slice) or XPK's type, which names the size (v5p-32)."""
    topology: Annotated[str, Field(pattern=r"^[0-9]+x[0-9]+(x[0-9]+)?$", max_length=15)] | None = (
        None
    )
    """Chips along each axis, such as 2x4 or 2x2x4. A type like v5p-32 needs none."""
    slices: Annotated[int, Field(ge=1, le=1024)] = 1
    """Slices joined over the data-centre network."""
    parallel_containers: Annotated[int, Field(ge=1, le=2)] = 1
    """Trainer containers a host, which share its chips; 2 is for tpu7x: a process a core."""


class CpuHosts(Schema):
    """Processes on CPU hosts: tests, drills and small models."""

    processes: Annotated[int, Field(ge=1, le=1024)] = 1
    """Trainer processes, each a pod of its own."""


class WatchedJobSet(Schema):
    """A JobSet that somebody else launched, such as xpk workload create."""

    job_set: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
    """Name of the JobSet, in the namespace of this object. It may be launched later."""
    metrics_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of process 0's metrics; null reads the pod's annotation ling.primatrix.io/metrics-port,
    and takes 9464 without one."""


class PodTemplate(Schema):
    """What the pods have besides the trainer. Lists and objects are Kubernetes' own."""

    env: tuple[Fragment, ...] = ()
    """Environment variables of the trainer's container."""
    resources: Fragment = Field(default_factory=dict[str, Any])
    """Requests and limits; google.com/tpu is set by the operator."""
    volumes: tuple[Fragment, ...] = ()
    volume_mounts: tuple[Fragment, ...] = ()
    """Mounts of the trainer's container."""
    service_account_name: str | None = None
    host_network: bool = False
    """Share the node's network; one trainer a node then, since its metrics port is the node's."""
    privileged: bool = False
    termination_grace_period_seconds: Annotated[int, Field(ge=1)] = 300
    """Seconds from SIGTERM to SIGKILL; must outlast a checkpoint."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    image_pull_secrets: tuple[Fragment, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict[str, str])
    """Labels of the JobSet and its pods."""
    annotations: dict[str, str] = Field(default_factory=dict[str, str])
    """Annotations of the JobSet and its pods."""
    tolerations: tuple[Fragment, ...] = ()
    priority_class_name: str | None = None
    node_selector: dict[str, str] = Field(default_factory=dict[str, str])
    init_containers: tuple[Fragment, ...] = ()
    sidecars: tuple[Fragment, ...] = ()
    """Containers beside the trainer's. While one of them runs, its pod does not end, whatever its
    trainer does: one that does not end by itself belongs into initContainers, with restartPolicy:
    Always."""
    ttl_seconds_after_finished: Count | None = None
    """Seconds after its end when the JobSet is deleted; null keeps it."""


class TrainingRunSpec(Schema):
    """What the user asks for. Fixed when an attempt starts, but for suspend and health."""

    suspend: bool = False
    """Pause: pods checkpoint and leave; false goes on from there."""
    attempt: Annotated[int, Field(ge=1, le=2**53 - 1)] = 1
    """Raise it to start again, from the last good checkpoint, after a halt, failure or edit."""
    image: Annotated[str, Field(min_length=1)] | None = None
    """Container image of the trainer. Required with tpu and cpu, refused with watch."""
    command: tuple[str, ...] = ()
    """Entry point, exec form; empty is `python3 -m ling_trainer`."""
    args: tuple[str, ...] = ()
    """Arguments of the entry point; key=value overrides for ling_trainer."""
    tpu: TpuSlice | None = None
    """Run on TPU slices. Exactly one of tpu, cpu and watch."""
    cpu: CpuHosts | None = None
    """Run on CPU hosts. Exactly one of tpu, cpu and watch."""
    watch: WatchedJobSet | None = None
    """Run nothing; watch a JobSet that somebody else launched, halt it where health says so, and
    never create or delete it. Exactly one of tpu, cpu and watch; image, command, args, run,
    queue, restarts and template belong to the JobSet then, and are refused here."""
    run: Fragment = Field(default_factory=dict[str, Any])
    """Settings of the trainer: a preset and what differs from it."""
    queue: (
        Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)] | None
    ) = None
    """Kueue's LocalQueue in the object's namespace that admits the run; null starts it at once."""
    restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """Crashes survived; a lost peer or a preempted host is restarted without being counted."""
    health: HealthPolicy = HealthPolicy()
    template: PodTemplate = PodTemplate()
