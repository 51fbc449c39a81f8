"""The pods' /etc/hosts files: what a cluster's DNS says of pods behind a headless Service.

A pod with `hostname` and `subdomain` is found as HOSTNAME.SUBDOMAIN by the pods of its
namespace from the moment that it has an address until it ends.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HostsEntry:
    """One pod's line, and the file its containers see.

    Attributes:
      hostname: inside; on hostNetwork the node's.
      record: the pod's name in its Service, which is its own on hostNetwork too; "" without one.
    """

    namespace: str
    address: str
    hostname: str
    record: str
    subdomain: str
    file: Path

    def names(self) -> str:
        """Return the names that a pod of the namespace resolves, the full one first."""
        short = f"{self.record}.{self.subdomain}"
        service = f"{short}.{self.namespace}.svc"
        return f"{service}.cluster.local {service} {short}.{self.namespace} {short}"


class HostsFiles:
    """Keeps the file of every live pod up to date, in place: a bind mount follows the inode."""

    def __init__(self) -> None:
        self._entries: dict[str, HostsEntry] = {}

    def add(self, uid: str, entry: HostsEntry) -> None:
        """Write the pod's file and name it in its peers' files."""
        entry.file.touch()
        self._entries[uid] = entry
        self._write(entry.namespace)

    def remove(self, uid: str) -> None:
        """Forget a pod that ended; its peers no longer find it."""
        if (entry := self._entries.pop(uid, None)) is not None:
            self._write(entry.namespace)

    def _write(self, namespace: str) -> None:
        members = [entry for entry in self._entries.values() if entry.namespace == namespace]
        peers = [f"{entry.address} {entry.names()}" for entry in members if entry.record]
        for entry in members:
            own = f"{entry.address} {entry.hostname}"
            _overwrite(entry.file, "\n".join(["127.0.0.1 localhost", own, *peers, ""]))


def _overwrite(path: Path, text: str) -> None:
    # One write, then the cut: a reader never finds the file empty.
    descriptor = os.open(path, os.O_WRONLY)
    try:
        data = text.encode()
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)
