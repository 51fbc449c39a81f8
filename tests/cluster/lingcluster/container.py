"""Run one container's process: its own pid, mount, host name and IPC space, as a runtime would.

    python container.py < spec.json

The program is process 1 of its pid namespace. So a signal that it does not handle is ignored,
SIGKILL apart, and when it ends the kernel kills whatever it had started. It has a private
/etc/hosts, /dev, /dev/shm and termination message file; files and network are the machine's own.
Without root a user namespace gives the rights that this needs.

On standard output, one JSON object a line: {"pid": N} as the machine counts it, or
{"error": text} when the program could not be started; {"exit": code} at the end (128 + n for
signal n). The program's output goes to standard error. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import stat
import sys
from pathlib import Path
from typing import Any, NoReturn, TypedDict

_PR_SET_PDEATHSIG = 1
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_DEVICES = ("full", "null", "random", "tty", "urandom", "zero")
_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}


class Mount(TypedDict):
    """A file or folder `source` of the machine, seen by the container at `target`."""

    source: str
    target: str


class ContainerSpec(TypedDict):
    """What to run.

    Keys:
      argv, environment, working_directory: the program.
      hostname: None keeps the machine's.
      device_directory: an empty folder, the container's /dev is made on it.
      mounts: in order; a target that is missing is made (reported as {"made": path}).
    """

    argv: list[str]
    environment: dict[str, str]
    working_directory: str
    hostname: str | None
    device_directory: str
    mounts: list[Mount]


def main() -> int:
    """Run the container that standard input describes; return 0, or 1 if it did not start."""
    spec: ContainerSpec = json.load(sys.stdin)
    try:
        _enter_namespaces()
        if spec["hostname"]:
            socket.sethostname(spec["hostname"])
        _make_devices(Path(spec["device_directory"]))
        for mount in spec["mounts"]:
            _bind(mount["source"], mount["target"])
        pid = _start(spec)
    except OSError as error:
        _report({"error": str(error)})
        return 1
    _report({"pid": pid})
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    _report({"exit": code if code >= 0 else 128 - code})
    return 0


def _report(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _enter_namespaces() -> None:
    user, group = os.geteuid(), os.getegid()
    spaces = os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWUTS | os.CLONE_NEWIPC
    if user == 0:
        os.unshare(spaces)
    else:
        os.unshare(os.CLONE_NEWUSER | spaces)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    # Whatever is mounted from here on stays here.
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)


def _make_devices(directory: Path) -> None:
    _mount("tmpfs", str(directory), "tmpfs", 0, "mode=755")
    for name in _DEVICES:
        (directory / name).touch()
        _mount(f"/dev/{name}", str(directory / name), None, _MS_BIND)
    for name, target in _LINKS.items():
        (directory / name).symlink_to(target)
    (directory / "shm").mkdir()
    _mount("tmpfs", str(directory / "shm"), "tmpfs", 0, "mode=1777")
    _mount(str(directory), "/dev", None, _MS_BIND | _MS_REC)


def _bind(source: str, target: str) -> None:
    if not os.path.exists(target):
        _make_mount_point(Path(target), folder=stat.S_ISDIR(os.stat(source).st_mode))
    _mount(source, target, None, _MS_BIND | _MS_REC)


def _make_mount_point(target: Path, *, folder: bool) -> None:
    missing = [path for path in (target, *target.parents) if not path.exists()]
    (target if folder else target.parent).mkdir(parents=True, exist_ok=True)
    if not folder:
        target.touch()
    if not target.is_relative_to("/dev"):  # that one is private and goes by itself
        for path in reversed(missing):
            _report({"made": str(path)})


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    def encoded(text: str | None) -> bytes | None:
        return text.encode() if text is not None else None

    if _libc().mount(encoded(source), target.encode(), encoded(kind), flags, data.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")


def _start(spec: ContainerSpec) -> int:
    # exec closes the writing end; what can be read before that is why it failed.
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _become(spec, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        reason = pipe.read()
    if reason:
        os.waitpid(pid, 0)
        raise OSError(reason)
    return pid


def _become(spec: ContainerSpec, failure_pipe: int) -> NoReturn:
    try:
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        _mount("proc", "/proc", "proc", 0)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(2, 1)
        os.chdir(spec["working_directory"])
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(spec["argv"][0], spec["argv"], spec["environment"])
    except BaseException as error:  # nothing may return into the parent's code
        with contextlib.suppress(OSError):
            os.write(failure_pipe, f"{spec['argv'][0]}: {error}".encode())
    finally:
        os._exit(127)


if __name__ == "__main__":
    sys.exit(main())
