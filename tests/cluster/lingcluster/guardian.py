"""Find and kill every process of one test session, whoever started it and however it ended.

Each process that a session starts carries the session's mark in its environment, and so do
its children, whatever process group or session they moved to. As a script,

    python guardian.py MARK

waits until its parent closes standard input or dies (a SIGKILL included), then kills all that
carry the mark. It exits with 3 when it found something to kill, else with 0. It needs the
standard library only.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

MARK_VARIABLE = "LING_CLUSTER_SESSION"
LEFTOVERS_FOUND = 3


def marked_processes(variable: str, value: str) -> list[int]:
    """Return the ids of live processes whose environment holds `variable=value`."""
    wanted = f"{variable}={value}".encode()
    return [pid for pid in _process_ids() if wanted in _environment(pid).split(b"\0")]


def kill_marked(variable: str, value: str, *, timeout: float = 10.0) -> list[int]:
    """SIGKILL all marked processes until two looks in a row find none; return their ids.

    Two looks, because between fork and exec a child still shows its parent's environment.
    """
    killed: list[int] = []
    deadline = time.monotonic() + timeout
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:
        found = marked_processes(variable, value)
        quiet = 0 if found else quiet + 1
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.append(pid)
        time.sleep(0.05)
    return sorted(set(killed))


def _process_ids() -> list[int]:
    return [
        int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()
    ]


def _environment(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()  # empty for a zombie
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


def _wait_for_the_parent_to_end(parent: int) -> None:
    # The pipe tells at once; the parent's id tells when a forked child keeps the pipe open.
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], 1.0)
        if readable and not os.read(0, 1024):
            return


def main() -> int:
    """Wait, kill, and return the exit code."""
    _wait_for_the_parent_to_end(os.getppid())
    killed = kill_marked(MARK_VARIABLE, sys.argv[1])
    return LEFTOVERS_FOUND if killed else 0


if __name__ == "__main__":
    sys.exit(main())
