"""One container of a built image, run by runc as a kubelet would run it: read-only, unprivileged.

Its program is process 1 of its own pid, mount, host name and IPC namespaces, the user is the
image's, the root filesystem is read-only and no capability is left. The network is the machine's.
"""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lingcluster.image_build import BuiltImage
from lingcluster.processes import Process, Session

_STATE = "/run/ling-tpu-runc"
_HOSTNAME = "container"
_NAMESPACES = ("pid", "mount", "uts", "ipc")


@dataclass(frozen=True)
class Start:
    """How a container starts.

    Attributes:
      arguments: after the image's entrypoint.
      entrypoint: instead of the image's.
      environment: beside the image's.
      mounts: path in the container -> path on this machine, writable.
    """

    arguments: Sequence[str] = ()
    entrypoint: Sequence[str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    mounts: Mapping[str, Path] = field(default_factory=dict[str, Path])


class RuncContainer(Process):
    """A running container.

    Args:
      image: what it is made of.
      root: the image's root filesystem.
      start: how it starts.
      folder: for its configuration and its output; empty.
      session: owner of the processes.
    """

    def __init__(
        self, image: BuiltImage, root: Path, start: Start, *, folder: Path, session: Session
    ) -> None:
        self.id = f"ling-{secrets.token_hex(6)}"
        folder.mkdir(parents=True, exist_ok=True)
        # A kubelet writes one too: collectives look their own host up.
        hosts = folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost {_HOSTNAME}\n")
        config = _configuration(image, root, start, session)
        config["mounts"].append(_bind("/etc/hosts", hosts))
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        super().__init__(
            self.id,
            ["runc", "--root", _STATE, "run", "--bundle", folder, self.id],
            log=folder / "output",
            session=session,
        )

    def output(self) -> str:
        """Return what it has printed."""
        return self.log.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the container's process 1."""
        self._runc("kill", self.id, number.name.removeprefix("SIG"))

    def remove(self) -> None:
        """Kill it and forget it; one that has ended already is no error."""
        self._runc("delete", "--force", self.id)
        self.kill()

    def _runc(self, *arguments: str) -> None:
        subprocess.run(["runc", "--root", _STATE, *arguments], capture_output=True, check=False)


def _configuration(
    image: BuiltImage, root: Path, start: Start, session: Session
) -> dict[str, Any]:
    user, group = (int(number) for number in image.config["User"].split(":"))
    entrypoint = image.config["Entrypoint"] if start.entrypoint is None else start.entrypoint
    environment = {**start.environment, **session.environment()}
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": user, "gid": group},
            "args": [*entrypoint, *start.arguments],
            "env": [*image.config["Env"], *(f"{k}={v}" for k, v in environment.items())],
            "cwd": image.config.get("WorkingDir") or "/",
            "noNewPrivileges": True,
        },
        "root": {"path": str(root), "readonly": True},
        "hostname": _HOSTNAME,
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            _temporary("/dev", "mode=755"),
            _temporary("/dev/shm", "mode=1777"),
            *(_bind(target, source) for target, source in start.mounts.items()),
        ],
        "linux": {
            "namespaces": [{"type": name} for name in _NAMESPACES],
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list"],
            "readonlyPaths": ["/proc/sys", "/proc/sysrq-trigger"],
        },
    }


def _temporary(path: str, mode: str) -> dict[str, Any]:
    options = ["nosuid", "noexec", mode]
    return {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": options}


def _bind(target: str, source: Path) -> dict[str, Any]:
    options = ["rbind", "rw"]
    return {"destination": target, "type": "bind", "source": str(source), "options": options}
