"""A pod as a local process: environment, signals, exit code, last words."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ling_operator import tethered
from ling_operator.api import ATTEMPT_LABEL, METRICS_PORT_ANNOTATION, RUN_LABEL
from ling_operator.bounded_text import clip
from ling_operator.views import (
    COMPLETION_INDEX_LABEL,
    JOB_INDEX_LABEL,
    MESSAGE_BYTES,
    PodView,
    parse_termination,
)
from ling_trainer.schema import ConfigError

type Manifest = Mapping[str, Any]

LOOPBACK = "127.0.0.1"
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_LABEL_PATH = re.compile(r"metadata\.labels\['(.+)'\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What every local pod shares.

    Attributes:
      environment: variables that pods inherit; the pod's own win.
      logs: directory of their output.
      lock: descriptor that they keep open.
      drop_variables: of the pod's own environment, not set here.
    """

    environment: Mapping[str, str]
    logs: Path
    lock: int
    drop_variables: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a pod of a JobSet's restart runs.

    Attributes:
      job: name of the replicated Job.
      index: process number.
      restart: the JobSet's restarts so far.
      port_offset: added to the metrics port, so that runs on one address do not collide.
      coordinator: address of jax.distributed's service.
    """

    job: str
    job_set_uid: str
    index: int
    restart: int
    port_offset: int
    coordinator: str


@dataclass(slots=True, kw_only=True)
class LocalPod:
    """One trainer process, running or ended."""

    name: str
    run: str
    attempt: int
    placement: Placement
    metrics_port: int
    grace_seconds: float
    log: Path
    termination_log: Path
    process: subprocess.Popen[bytes] | None = None
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    exit_code: int | None = None
    asked_to_stop: float | None = None

    @property
    def live(self) -> bool:
        """Tell whether the process may still be writing."""
        return self.exit_code is None

    def poll(self) -> None:
        """Notice the end of the process; kill it when its grace is over."""
        if self.process is None or not self.live:
            return
        code = self.process.poll()
        if code is not None:
            self.exit_code = code if code >= 0 else 128 - code
            return
        asked = self.asked_to_stop
        if asked is not None and time.monotonic() - asked > self.grace_seconds:
            self.kill()

    def stop(self) -> None:
        """Send SIGTERM, once."""
        if self.live and self.asked_to_stop is None and self.process is not None:
            self.asked_to_stop = time.monotonic()
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process and all its children."""
        if self.live and self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def view(self) -> PodView:
        """Show the pod as a cluster would."""
        ended = {None: "Running", 0: "Succeeded"}.get(self.exit_code, "Failed")
        return PodView(
            name=self.name,
            uid=self.uid,
            job_set=self.run,
            job_set_uid=self.placement.job_set_uid,
            attempt=self.attempt,
            job_index=0,
            completion_index=self.placement.index,
            restart_attempt=self.placement.restart,
            ip=LOOPBACK,
            host=socket.gethostname(),
            host_network=False,
            metrics_port=self.metrics_port,
            phase=ended,
            ready=self.live,
            exit_code=self.exit_code,
            termination=None if self.live else parse_termination(self.last_words()),
            deleting=self.asked_to_stop is not None,
            message="" if self.live else clip(self.last_words(), MESSAGE_BYTES),
        )

    def last_words(self) -> str:
        """Read the termination message; empty without one."""
        try:
            return self.termination_log.read_text("utf-8", "replace")[:4096]
        except OSError:
            return ""


def place_pod(template: Manifest, placement: Placement, machine: Machine) -> LocalPod:
    """Say which pod of a template stands where, without starting it."""
    labels = template["metadata"]["labels"]
    base_port = int(template["metadata"]["annotations"][METRICS_PORT_ANNOTATION])
    index = placement.index
    stem = f"attempt-{labels[ATTEMPT_LABEL]}-restart-{placement.restart}-process-{index}"
    return LocalPod(
        name=f"{labels[RUN_LABEL]}-{placement.job}-0-{index}",
        run=labels[RUN_LABEL],
        attempt=int(labels[ATTEMPT_LABEL]),
        placement=placement,
        metrics_port=base_port + placement.port_offset + index,
        grace_seconds=float(template["spec"]["terminationGracePeriodSeconds"]),
        log=machine.logs / f"{stem}.log",
        termination_log=machine.logs / f"{stem}.termination",
    )


def start_pod(pod: LocalPod, template: Manifest, machine: Machine) -> None:
    """Start a pod's trainer as a process in a session of its own.

    The image, volumes, resources and other containers mean nothing here and are ignored.

    Raises:
      ConfigError: a variable's source exists only in a cluster.
    """
    container: Manifest = template["spec"]["containers"][0]
    own = _pod_environment(container, template["metadata"]["labels"], pod)
    own = {k: v for k, v in own.items() if k not in machine.drop_variables}
    command = [_expand(part, own) for part in (*container["command"], *container.get("args", ()))]
    if command[0] in {"python", "python3"}:
        command[0] = sys.executable
    # By path and isolated: the wrapper starts in 20 ms, wherever this package was imported from.
    tether = [sys.executable, "-I", "-S", tethered.__file__, str(os.getpid())]
    pod.termination_log.unlink(missing_ok=True)
    with pod.log.open("ab") as log:
        pod.process = subprocess.Popen(  # noqa: S603 - the user's own command, on purpose
            [*tether, *command],
            env={"PYTHONUNBUFFERED": "1", **machine.environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(machine.lock,),
        )


def free_port_offset(base: int, count: int) -> int:
    """Return the smallest offset at which `count` ports from `base` on are free."""
    for offset in range(0, 65536 - base - count, count):
        if all(_is_free(base + offset + i) for i in range(count)):
            return offset
    msg = f"no {count} free ports in a row from {base} on; set metrics.metrics_port lower"
    raise ConfigError(msg)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _pod_environment(
    container: Manifest, labels: Mapping[str, str], pod: LocalPod
) -> dict[str, str]:
    """Resolve a container's environment as a kubelet does, then give it this machine's values."""
    index = pod.placement.index
    labels = {**labels, JOB_INDEX_LABEL: "0", COMPLETION_INDEX_LABEL: str(index)}
    fields = {
        "metadata.name": pod.name,
        "metadata.uid": pod.uid,
        "status.podIP": LOOPBACK,
        "spec.nodeName": socket.gethostname(),
    }
    result: dict[str, str] = {}
    for variable in container.get("env", ()):
        name, value = variable["name"], variable.get("value", "")
        if "valueFrom" in variable:
            path = str(variable["valueFrom"].get("fieldRef", {}).get("fieldPath", ""))
            label = _LABEL_PATH.fullmatch(path)
            found = labels.get(label[1]) if label else fields.get(path)
            if found is None:
                msg = (
                    f"spec.template.env: {name} is taken from {variable['valueFrom']}, which "
                    "exists only in a cluster; give it a value for a local run"
                )
                raise ConfigError(msg)
            result[name] = found
        else:
            result[name] = _expand(str(value), result)
    if "LING_COORDINATOR_ADDRESS" in result:
        result["LING_COORDINATOR_ADDRESS"] = pod.placement.coordinator
    result["LING_TERMINATION_LOG"] = str(pod.termination_log)
    result["LING_CONTAINER_INDEX"] = str(pod.placement.port_offset + index)
    return result


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """Expand $(NAME) as Kubernetes does; $$ is a dollar, an unknown name stays as it is."""

    def replacement(match: re.Match[str]) -> str:
        name = match[1]
        return "$" if name is None else variables.get(name, match[0])

    return _REFERENCE.sub(replacement, text)
