"""What a real node's pods need of this machine's network: a bridge, and one Service's address.

There is no kube-proxy: the Service `kubernetes` is an address of the bridge, and a relay carries
its port to the API server. There is no DNS and no way out.
"""

from __future__ import annotations

import contextlib
import select
import socket
import socketserver
import subprocess
import threading
import urllib.parse
from typing import Any

BRIDGE = "lingtest0"
POD_SUBNET = "10.231.77.0/24"
GATEWAY = "10.231.77.1"
SERVICE_SUBNET = "10.231.78.0/24"
API_SERVER = "10.231.78.1"  # a range's first address is the Service kubernetes'
DNS = "10.231.78.10"  # nobody is there
_PORT = 443


class PodNetwork:
    """The bridge and the relay, between entering and leaving.

    Args:
      server: the API server's URL.
    """

    def __init__(self, server: str) -> None:
        parts = urllib.parse.urlsplit(server)
        assert parts.hostname is not None
        assert parts.port is not None
        self._behind = (parts.hostname, parts.port)
        self._relay: _Relay | None = None

    def __enter__(self) -> PodNetwork:
        remove_bridge()  # of a session that was killed
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("address", "add", f"{GATEWAY}/24", "dev", BRIDGE)
        _ip("address", "add", f"{API_SERVER}/32", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        self._relay = _Relay((API_SERVER, _PORT), self._behind)
        threading.Thread(target=self._relay.serve_forever, name="relay", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._relay is not None:
            self._relay.shutdown()
            self._relay.close_all()
            self._relay.server_close()
        remove_bridge()


def remove_bridge() -> None:
    """Remove the bridge, if it is there."""
    with contextlib.suppress(subprocess.CalledProcessError):
        _ip("link", "delete", BRIDGE)


def cni_configuration() -> dict[str, Any]:
    """Return what connects a pod to the bridge."""
    return {
        "cniVersion": "1.0.0",
        "name": "ling-test",
        "plugins": [
            {
                "type": "bridge",
                "bridge": BRIDGE,
                "isGateway": True,
                "ipMasq": False,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": POD_SUBNET, "gateway": GATEWAY}]],
                    "routes": [{"dst": SERVICE_SUBNET}],
                },
            },
            {"type": "loopback"},
        ],
    }


class _Relay(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: tuple[str, int], behind: tuple[str, int]) -> None:
        self.behind = behind
        self.stopping = threading.Event()
        super().__init__(address, _Connection)

    def close_all(self) -> None:
        """End every open connection."""
        self.stopping.set()


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        """Carry bytes both ways until either side closes."""
        relay = self.server
        assert isinstance(relay, _Relay)
        with contextlib.suppress(OSError), socket.create_connection(relay.behind) as behind:
            other = {self.request: behind, behind: self.request}
            while not relay.stopping.is_set():
                readable, _, _ = select.select(list(other), [], [], 1.0)
                for side in readable:
                    if not (data := side.recv(65536)):
                        return
                    other[side].sendall(data)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
