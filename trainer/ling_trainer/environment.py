"""What a trainer process is told by its environment. No JAX."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ling_trainer.schema import ConfigError

COORDINATOR = "LING_COORDINATOR_ADDRESS"
NUM_PROCESSES = "LING_NUM_PROCESSES"
PROCESS_ID = "LING_PROCESS_ID"
SLICE_INDEX = "LING_SLICE_INDEX"
HOST_INDEX = "LING_HOST_INDEX"
HOSTS_PER_SLICE = "LING_HOSTS_PER_SLICE"
CONTAINER_INDEX = "LING_CONTAINER_INDEX"
CONTAINERS_PER_HOST = "LING_CONTAINERS_PER_HOST"
COORDINATOR_PORT = 8476
"""Where the coordination service listens on a TPU slice, as JAX has it."""
LOCAL_NAMESPACE = "local"
MOUNTS = Path("/proc/self/mountinfo")
_KUBELETS_POD = re.compile(r"/pods/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/")


@dataclass(frozen=True, slots=True)
class Group:
    """The processes of a run.

    Attributes:
      coordinator: host:port of process 0's coordination service.
      num_processes: of the run.
      process_id: of this one, from 0.
    """

    coordinator: str
    num_processes: int
    process_id: int

    @property
    def coordinator_port(self) -> int:
        """The coordination service's port."""
        return int(self.coordinator.rpartition(":")[2])


ALONE = Group(f"127.0.0.1:{COORDINATOR_PORT}", 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Everything that is read from environment variables.

    Attributes:
      group: this process and its peers.
      run: LING_RUN, the TrainingRun's name; "" takes run_name.
      run_namespace: LING_RUN_NAMESPACE; "local" outside of a cluster.
      attempt: LING_ATTEMPT; 0 outside of the operator.
      restore_before_step: LING_RESTORE_BEFORE_STEP: restore a checkpoint before this step.
      pod_uid: POD_UID, else the one in the paths that the kubelet mounted; "" without either.
      pod_ip: POD_IP; process 0's coordination service listens there. "" is all addresses.
      metrics_address: where to serve metrics: pod_ip, else all addresses ("") in a cluster, else
        loopback.
      container_index: LING_CONTAINER_INDEX, added to the metrics port.
      termination_log: LING_TERMINATION_LOG; None takes Kubernetes' own file.
      fault_injection_allowed: LING_ALLOW_FAULT_INJECTION=1.
    """

    group: Group
    run: str
    run_namespace: str
    attempt: int
    restore_before_step: int | None
    pod_uid: str
    pod_ip: str
    metrics_address: str
    container_index: int
    termination_log: Path | None
    fault_injection_allowed: bool


def read_environment(environ: Mapping[str, str], *, mounts: Path = MOUNTS) -> Environment:
    """Read the variables of Environment.

    Args:
      environ: the variables.
      mounts: file of what is mounted, in the kernel's format; it may be missing.

    Raises:
      ConfigError: one is no number, out of range, or missing beside others.
    """
    in_cluster = "KUBERNETES_SERVICE_HOST" in environ
    before, log = environ.get("LING_RESTORE_BEFORE_STEP"), environ.get("LING_TERMINATION_LOG")
    return Environment(
        group=group_of(environ),
        run=environ.get("LING_RUN", ""),
        run_namespace=environ.get("LING_RUN_NAMESPACE") or LOCAL_NAMESPACE,
        attempt=_number(environ, "LING_ATTEMPT") if environ.get("LING_ATTEMPT") else 0,
        restore_before_step=_number(environ, "LING_RESTORE_BEFORE_STEP") if before else None,
        pod_uid=environ.get("POD_UID") or pod_uid_of(mounts),
        pod_ip=environ.get("POD_IP", ""),
        metrics_address=environ.get("POD_IP") or ("" if in_cluster else "127.0.0.1"),
        container_index=(_number(environ, CONTAINER_INDEX) if environ.get(CONTAINER_INDEX) else 0),
        termination_log=Path(log) if log else None,
        fault_injection_allowed=environ.get("LING_ALLOW_FAULT_INJECTION") == "1",
    )


def pod_uid_of(mounts: Path) -> str:
    """Return the pod's uid from the kubelet's mounts, "" outside of a pod.

    /etc/hosts and the termination log are files below /var/lib/kubelet/pods/<uid>/. Launchers
    such as xpk set no variable from the pod's metadata, and on the node's network a page has to
    say whose it is.
    """
    try:
        found = _KUBELETS_POD.search(mounts.read_text("utf-8", "replace"))
    except OSError:
        return ""
    return found.group(1) if found else ""


def installed_version() -> str:
    """Return the version of the installed package; "unknown" for a bare source tree."""
    try:
        return metadata.version("ling-tpu")
    except metadata.PackageNotFoundError:
        return "unknown"


def group_of(environ: Mapping[str, str]) -> Group:
    """Read this process's place among its peers; the first that is there decides.

    1. Our variables: LING_COORDINATOR_ADDRESS, LING_NUM_PROCESSES, and LING_PROCESS_ID or
       LING_SLICE_INDEX * LING_HOSTS_PER_SLICE + LING_HOST_INDEX (JobSet's job index and the Job's
       completion index); with LING_CONTAINERS_PER_HOST that times the containers, plus
       LING_CONTAINER_INDEX.
    2. GKE's for TPU slices: TPU_PROCESS_ADDRESSES or TPU_WORKER_HOSTNAMES, TPU_WORKER_ID, and
       MEGASCALE_* where there are several slices.
    3. Otherwise the process is alone.

    Raises:
      ConfigError: a variable is missing beside others, no number, or out of range.
    """
    if environ.get(COORDINATOR):
        return _own_group(environ)
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES") or ""
    workers = [host.rpartition(":")[0] or host for host in hosts.split(",") if host]
    several = bool(environ.get("MEGASCALE_NUM_SLICES"))
    slices = _number(environ, "MEGASCALE_NUM_SLICES") if several else 1
    if len(workers) * slices <= 1:
        return ALONE
    slice_id = _number(environ, "MEGASCALE_SLICE_ID") if slices > 1 else 0
    first = environ.get("MEGASCALE_COORDINATOR_ADDRESS") or workers[0]
    return Group(
        f"{first.partition(':')[0]}:{COORDINATOR_PORT}",
        len(workers) * slices,
        slice_id * len(workers) + _number(environ, "TPU_WORKER_ID"),
    )


def _own_group(environ: Mapping[str, str]) -> Group:
    coordinator = environ[COORDINATOR]
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{COORDINATOR}={coordinator!r}: write host:port")
    count = _number(environ, NUM_PROCESSES)
    if environ.get(PROCESS_ID):
        process = _number(environ, PROCESS_ID)
    else:
        hosts, at = _number(environ, HOSTS_PER_SLICE), _number(environ, HOST_INDEX)
        if at >= hosts:
            raise ConfigError(f"{HOST_INDEX}={at} must be below {HOSTS_PER_SLICE}={hosts}")
        process = _number(environ, SLICE_INDEX) * hosts + at
        if environ.get(CONTAINERS_PER_HOST):
            process = _of_container(environ, process)
    if process >= count:
        raise ConfigError(
            f"this is process {process}, counted from 0, of {NUM_PROCESSES}={count}; "
            "start as many processes as the variable says"
        )
    return Group(coordinator, count, process)


def _of_container(environ: Mapping[str, str], host: int) -> int:
    """Return the process that a container of the run's so-many-th host is."""
    containers = _number(environ, CONTAINERS_PER_HOST)
    at = _number(environ, CONTAINER_INDEX)
    if at >= containers:
        raise ConfigError(
            f"{CONTAINER_INDEX}={at} must be below {CONTAINERS_PER_HOST}={containers}"
        )
    return host * containers + at


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} must be a whole number, 0 or more")
    return int(text)
