"""What a container finds when it starts: files, variables, and what remains of it at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lingcluster import pod_spec
from lingcluster.client import Manifest
from lingcluster.container import ContainerSpec
from lingcluster.container_process import POD_VARIABLE, OsProcess
from lingcluster.pod_spec import Image, PodAddresses

_MESSAGE_LIMIT = 4096
_LOG_MESSAGE_LIMIT = 2048


@dataclass
class Timing:
    """How slow the kubelet is, in seconds; a test may change it at any time.

    Attributes:
      start_delay: from being bound to the first process.
      stop_delay: from the last process's end to the status that says so.
      final_delay: from a deleted pod's last status to the removal of its object. A real kubelet
        takes 1 to 2 s, in which controllers see the pod ended and still there.
      restart_backoff: before the first restart of a container; doubles.
    """

    start_delay: float = 0.1
    stop_delay: float = 0.0
    final_delay: float = 0.3
    restart_backoff: float = 1.0


@dataclass(frozen=True)
class Surroundings:
    """What a pod finds on its node.

    Attributes:
      images: container images by name.
      timing: how slow things are.
      base_environment: variables of every container.
      launcher_environment: the launcher's own variables, the session's mark among them.
      patch_status: writes fields of a pod's status; False when the pod is gone.
      remove: deletes a pod's object that has ended.
      started: called with each started process.
    """

    images: Mapping[str, Image]
    timing: Timing
    base_environment: Mapping[str, str]
    launcher_environment: Mapping[str, str]
    patch_status: Callable[[Manifest, Manifest], Awaitable[bool]]
    remove: Callable[[Manifest], Awaitable[None]]
    started: Callable[[Manifest, str, OsProcess], None]


def hosts_file(directory: Path) -> Path:
    """Return the file that the containers of the pod in `directory` see as /etc/hosts."""
    return directory / "hosts"


def log_file(directory: Path, container: Manifest) -> Path:
    """Return the file that takes the container's output."""
    return directory / f"{container['name']}.log"


def hostname(pod: Manifest) -> str:
    """Return the host name inside: on hostNetwork the node's."""
    spec = pod["spec"]
    if spec.get("hostNetwork"):
        return spec["nodeName"]
    return spec.get("hostname") or pod["metadata"]["name"]


def container_spec(
    pod: Manifest,
    container: Manifest,
    node: Surroundings,
    addresses: PodAddresses,
    directory: Path,
) -> ContainerSpec:
    """Make the container's folders and files in the pod's `directory` and say how to run it.

    Raises:
      ImageNotFoundError: there is no such image.
      NotSupportedError: the pod asks for what this kubelet does not do.
    """
    pod_spec.check_supported(pod)
    image = pod_spec.find_image(node.images, container["image"])
    own = pod_spec.environment(pod, container, addresses)
    environment = {
        "HOME": "/root",
        "HOSTNAME": hostname(pod),
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
        POD_VARIABLE: pod["metadata"]["uid"],
        **node.base_environment,
        **image.environment,
        **own,
    }
    work, devices = directory / "work", directory / f"{container['name']}.dev"
    for folder in (work, devices):
        folder.mkdir(exist_ok=True)
    volumes = pod_spec.mounts(pod, container, directory / "volumes")
    for source, _ in volumes:
        source.mkdir(parents=True, exist_ok=True)
    message_file = _message_file(directory, container)
    message_file.write_bytes(b"")
    message_path = container.get("terminationMessagePath", "/dev/termination-log")
    mounts = [
        (hosts_file(directory), Path("/etc/hosts")),
        (message_file, Path(message_path)),
        *volumes,
    ]
    return {
        "argv": pod_spec.arguments(container, image, own),
        "environment": environment,
        "working_directory": container.get("workingDir") or str(work),
        "hostname": hostname(pod),
        "device_directory": str(devices),
        "mounts": [{"source": str(source), "target": str(target)} for source, target in mounts],
    }


def termination_message(container: Manifest, directory: Path, code: int) -> str:
    """Return what the container left in its message file or, where it asks for it, its log."""
    message = _tail(_message_file(directory, container), _MESSAGE_LIMIT)
    policy = container.get("terminationMessagePolicy", "File")
    if not message and code != 0 and policy == "FallbackToLogsOnError":
        message = _tail(log_file(directory, container), _LOG_MESSAGE_LIMIT)
    return message


def _message_file(directory: Path, container: Manifest) -> Path:
    return directory / f"{container['name']}.termination"


def _tail(path: Path, limit: int) -> str:
    return path.read_bytes()[-limit:].decode(errors="replace")
