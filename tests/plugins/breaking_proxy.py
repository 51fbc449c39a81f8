"""A proxy before a server of gs:// objects that breaks what passes it."""

import http.client
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

type Fault = Literal["503", "429", "reset", "truncate", "stall", "drip", "403"]


@dataclass
class Proxy:
    """Hands requests on to the server, or does what `plan` says instead.

    Attributes:
      upstream: port of the server.
      plan: asked with the number of each download and its path; a fault, or None.
      bodies: bytes of each download that was handed on whole, by path.
    """

    upstream: int
    plan: Callable[[int, str], Fault | None] = lambda _number, _path: None
    downloads: int = 0
    bodies: list[tuple[str, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    closing: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def fault(self, path: str) -> Fault | None:
        with self.lock:
            number, self.downloads = self.downloads, self.downloads + 1
        return self.plan(number, path)

    def fetched(self, suffix: str) -> int:
        with self.lock:
            return sum(size for path, size in self.bodies if path.split("?")[0].endswith(suffix))


def handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

        def do_GET(self) -> None:
            upstream = http.client.HTTPConnection("127.0.0.1", proxy.upstream, timeout=30)
            headers = {k: v for k, v in self.headers.items() if k.lower() != "host"}
            upstream.request("GET", self.path, headers=headers)
            answer = upstream.getresponse()
            body = answer.read()
            upstream.close()
            fault = proxy.fault(self.path) if "alt=media" in self.path else None
            if fault in {"503", "429", "403"}:
                self.send_error(int(fault))
                return
            if fault == "reset":
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response(answer.status)
            for key, value in answer.getheaders():
                if key.lower() not in {"content-length", "transfer-encoding", "date", "server"}:
                    self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.send_body(body, fault)

        def send_body(self, body: bytes, fault: Fault | None) -> None:
            if fault is None:
                if "alt=media" in self.path:
                    with proxy.lock:
                        proxy.bodies.append((self.path, len(body)))
                self.wfile.write(body)
                return
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if fault == "stall":
                proxy.closing.wait(60)
            elif fault == "drip":
                for i in range(len(body) // 2, len(body) - 1):
                    if proxy.closing.wait(0.05):
                        break
                    try:
                        self.wfile.write(body[i : i + 1])
                        self.wfile.flush()
                    except OSError:
                        break
            self.close_connection = True

    return Handler


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gave up is what the tests are about."""
