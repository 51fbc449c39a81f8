"""Loopback addresses and ports that belong to one test session alone.

All of 127.0.0.0/8 is local on Linux. A session leases one /16 of it, so that two sessions, or a
session and whatever else listens on 127.0.0.1, never meet on a port.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from pathlib import Path

_FIRST_BLOCK, _LAST_BLOCK = 16, 250
_POD_COUNT = 120 * 250


class LoopbackBlock:
    """A leased 127.N.0.0/16. The lease ends with `release` or with the process.

    Layout: .0.1 the control plane, .1.k node k, .16 and up the pods' public addresses, .136 and
    up the addresses their processes bind.

    Raises:
      RuntimeError: all blocks are leased.
    """

    def __init__(self) -> None:
        for number in range(_FIRST_BLOCK, _LAST_BLOCK + 1):
            lock = _try_lock(Path(tempfile.gettempdir()) / f"ling-tpu-loopback-{number}.lock")
            if lock is not None:
                self._lock: int | None = lock
                self.prefix = f"127.{number}"
                self._given: set[int] = set()
                return
        msg = f"all loopback blocks 127.{_FIRST_BLOCK} to 127.{_LAST_BLOCK} are leased"
        raise RuntimeError(msg)

    @property
    def control_plane(self) -> str:
        """The address of the control plane's programs."""
        return f"{self.prefix}.0.1"

    def node(self, index: int) -> str:
        """Return node `index`'s address, 0 <= index < 250."""
        return f"{self.prefix}.1.{index + 1}"

    def pod(self, index: int) -> str:
        """Return the address pod `index` has in the API."""
        return self._pod(index, first=16)

    def pod_process(self, index: int) -> str:
        """Return the address the processes of pod `index` bind."""
        return self._pod(index, first=136)

    def _pod(self, index: int, *, first: int) -> str:
        if not 0 <= index < _POD_COUNT:
            raise ValueError(f"pod index {index} is outside [0, {_POD_COUNT}); end the session")
        return f"{self.prefix}.{first + index // 250}.{index % 250 + 1}"

    def free_ports(self, count: int) -> list[int]:
        """Return ports that are free on the control plane's address, and were never given before.

        Some are bound much later: Kueue's, by the first test that needs it.
        """
        ports: list[int] = []
        with contextlib.ExitStack() as stack:
            while len(ports) < count:
                probe = stack.enter_context(socket.socket())
                probe.bind((self.control_plane, 0))
                port: int = probe.getsockname()[1]
                if port not in self._given:
                    ports.append(port)
        self._given.update(ports)
        return ports

    def release(self) -> None:
        """End the lease."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> LoopbackBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _try_lock(path: Path) -> int | None:
    # The lock file stays: removing it would let two sessions lock two files of one name.
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:  # another user's
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
