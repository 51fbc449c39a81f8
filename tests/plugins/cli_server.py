"""An API server for `ling` that answers as it is told, as a healthy one never does above all."""

import http.server
import json
import threading
import urllib.parse
from collections.abc import Callable
from typing import Any

RUNS = "/apis/ling.primatrix.io/v1alpha1/namespaces/team/trainingruns"
PODS = "/api/v1/namespaces/team/pods"

type Answer = tuple[int, Any]


class Server:
    """Answers each path with what it was told to, in turn; the last answer stays."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Answer | Callable[[Any], None]]] = {}
        self.asked: list[str] = []
        self.sent: list[Any] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.asked.append(self.path)
                path = urllib.parse.urlsplit(self.path).path
                queue = outer.answers.get(path, [(404, "404 page not found")])
                answer = queue.pop(0) if len(queue) > 1 else queue[0]
                if callable(answer):
                    answer(self)
                    return
                status, body = answer
                content = body if isinstance(body, str) else json.dumps(body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(content.encode())))
                self.end_headers()
                self.wfile.write(content.encode())

            def do_PATCH(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.sent.append(json.loads(body))
                self.do_GET()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def say(self, path: str, *answers: Answer | Callable[[Any], None]) -> None:
        self.answers[path] = list(answers)


def run(name: str = "ling2", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "namespace": "team",
            "name": name,
            "uid": name,
            "resourceVersion": "5",
            "creationTimestamp": "2026-11-30T06:00:00Z",
        },
        "spec": {"image": "i", "cpu": {"processes": 1}},
        "status": {"phase": "Running", **status},
    }


def pod(uid: str = "p0", *, phase: str = "Running", restart: int = 0) -> dict[str, Any]:
    state = {"running": {}} if phase == "Running" else {"terminated": {"exitCode": 0}}
    return {
        "metadata": {
            "name": f"ling2-slice-job-0-0-{uid}",
            "uid": uid,
            "labels": {
                "ling.primatrix.io/attempt": "1",
                "jobset.sigs.k8s.io/restart-attempt": str(restart),
            },
        },
        "spec": {"containers": [{"name": "jax-tpu"}]},
        "status": {"phase": phase, "containerStatuses": [{"name": "jax-tpu", "state": state}]},
    }


def refusal(code: int, reason: str, message: str) -> Answer:
    return code, {"kind": "Status", "reason": reason, "message": message}
