"""What a pod's specification means for its processes: arguments, environment, mounts. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lingcluster.client import Manifest

_METADATA_ENTRY = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")
_REFERENCE = re.compile(r"\$(?:\$|\(([-._a-zA-Z][-._a-zA-Z0-9]*)\))")
# Admission adds this volume to every pod; processes on this machine have no use for it.
_SERVICE_ACCOUNT_MOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class NotSupportedError(Exception):
    """The pod asks for something that this kubelet does not do."""


class ImageNotFoundError(Exception):
    """No image of that name: a registry would answer the same."""


@dataclass(frozen=True)
class Image:
    """What a container image stands for on this machine.

    Attributes:
      entrypoint: runs when the container names no command.
      environment: the image's ENV.
    """

    entrypoint: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class PodAddresses:
    """Where a pod is.

    Attributes:
      public: its address in the API.
      process: the address that its processes bind and its peers resolve; equal on hostNetwork.
      node: its node's.
    """

    public: str
    process: str
    node: str


def find_image(images: Mapping[str, Image], name: str) -> Image:
    """Return the image `name`, by its full name or without tag and digest.

    Raises:
      ImageNotFoundError: there is none.
    """
    repository = re.sub(r"(@[^/]*|:[^/:]*)$", "", name.split("@")[0])
    for key in (name, repository):
        if key in images:
            return images[key]
    raise ImageNotFoundError(f'image "{name}" is none of {", ".join(sorted(images))}')


def arguments(container: Manifest, image: Image, environment: Mapping[str, str]) -> list[str]:
    """Return the argument vector: command and args, the image's entrypoint for no command.

    Raises:
      NotSupportedError: neither names a program.
    """
    command = container.get("command") or list(image.entrypoint)
    words = [*command, *container.get("args", [])]
    if not words:
        raise NotSupportedError(f"container {container['name']}: no command and no entrypoint")
    return [expand(word, environment) for word in words]


def environment(pod: Manifest, container: Manifest, addresses: PodAddresses) -> dict[str, str]:
    """Return the variables that the pod sets, $(NAME) expanded by those before it.

    An image's own variables cannot be referred to.

    Raises:
      NotSupportedError: a value comes from a ConfigMap, a Secret or an unknown field.
    """
    if container.get("envFrom"):
        raise NotSupportedError(f"container {container['name']}: envFrom")
    values: dict[str, str] = {}
    for variable in container.get("env", []):
        source = variable.get("valueFrom")
        if source is None:
            values[variable["name"]] = expand(variable.get("value", ""), values)
        elif "fieldRef" in source:
            values[variable["name"]] = field_value(pod, source["fieldRef"]["fieldPath"], addresses)
        else:
            raise NotSupportedError(f"env {variable['name']}: valueFrom {', '.join(source)}")
    return values


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace $(NAME) by its value; an unknown name stays, $$ is a dollar sign."""

    def replacement(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return "$"
        return values.get(name, match[0])

    return _REFERENCE.sub(replacement, text)


def field_value(pod: Manifest, path: str, addresses: PodAddresses) -> str:
    """Return a downward API field; a missing label or annotation is empty.

    Raises:
      NotSupportedError: `path` is no field of the downward API.
    """
    metadata = pod["metadata"]
    if entry := _METADATA_ENTRY.fullmatch(path):
        return (metadata.get(entry[1]) or {}).get(entry[2], "")
    fields = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": pod["spec"].get("nodeName", ""),
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", ""),
        # Its processes bind what they find here.
        "status.podIP": addresses.process,
        "status.hostIP": addresses.node,
    }
    if path not in fields:
        raise NotSupportedError(f"fieldRef {path}")
    return fields[path]


def mounts(pod: Manifest, container: Manifest, volumes_root: Path) -> list[tuple[Path, Path]]:
    """Return (source on the machine, target) of the container's volume mounts.

    An emptyDir is volumes_root/NAME, shared by the pod's containers; a hostPath is itself.

    Raises:
      NotSupportedError: another kind of volume.
    """
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
    found: list[tuple[Path, Path]] = []
    for mount in container.get("volumeMounts", []):
        if mount["mountPath"] == _SERVICE_ACCOUNT_MOUNT:
            continue
        source = _volume_source(volumes[mount["name"]], volumes_root) / mount.get("subPath", "")
        found.append((source, Path(mount["mountPath"])))
    return found


def _volume_source(volume: Mapping[str, Any], volumes_root: Path) -> Path:
    if "emptyDir" in volume:
        return volumes_root / volume["name"]
    if "hostPath" in volume:
        return Path(volume["hostPath"]["path"])
    kinds = ", ".join(key for key in volume if key != "name")
    raise NotSupportedError(f"volume {volume['name']} of kind {kinds}")


def declared_ports(pod: Manifest) -> list[int]:
    """Return the TCP ports that the pod's containers declare."""
    return [
        port["containerPort"]
        for container in pod["spec"]["containers"]
        for port in container.get("ports", [])
        if port.get("protocol", "TCP") == "TCP"
    ]


def check_supported(pod: Manifest) -> None:
    """Refuse what would otherwise be ignored silently.

    Raises:
      NotSupportedError: the pod has such a field.
    """
    spec = pod["spec"]
    if any(each.get("restartPolicy") for each in spec.get("initContainers", [])):
        raise NotSupportedError("initContainers with a restartPolicy")
    for container in _containers(spec):
        if unsupported := {"lifecycle", "readinessProbe", "startupProbe"} & container.keys():
            names = ", ".join(sorted(unsupported))
            raise NotSupportedError(f"container {container['name']}: {names}")


def _containers(spec: Mapping[str, Any]) -> Sequence[Manifest]:
    return [*spec.get("initContainers", []), *spec["containers"]]
