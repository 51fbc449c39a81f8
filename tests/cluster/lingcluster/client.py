"""A small synchronous Kubernetes client for tests, and the files that identify a client."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

type Manifest = dict[str, Any]

_PATCH_TYPES = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
}
_DEADLINE_SECONDS = 30.0


class ApiError(Exception):
    """The API server's refusal.

    Attributes:
      status: HTTP status.
      reason: the Status object's reason, for example "Forbidden".
    """

    def __init__(self, method: str, path: str, status: int, body: object) -> None:
        answer: Mapping[str, Any] = body if isinstance(body, dict) else {"message": str(body)}
        self.status = status
        self.reason = str(answer.get("reason", ""))
        super().__init__(f"{method} {path}: {status} {self.reason}: {answer.get('message', '')}")


@dataclass(frozen=True)
class Identity:
    """How a client reaches an API server, and as whom.

    Attributes:
      server: https://address:port.
      certificate_authority: PEM file.
      token: bearer token; None is the anonymous user.
    """

    server: str
    certificate_authority: Path
    token: str | None

    def write_kubeconfig(self, path: Path, *, namespace: str = "default") -> Path:
        """Write a kubeconfig (JSON is YAML) readable by its owner alone; return its path."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {
                        "server": self.server,
                        "certificate-authority": str(self.certificate_authority),
                    },
                }
            ],
            "users": [{"name": "test", "user": {"token": self.token} if self.token else {}}],
            "contexts": [
                {
                    "name": "test",
                    "context": {"cluster": "test", "user": "test", "namespace": namespace},
                }
            ],
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(config, indent=1))
        return path


class KubeClient:
    """One API server, one identity, JSON objects as dicts. Safe to use from several threads."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        parts = urllib.parse.urlsplit(identity.server)
        assert parts.hostname is not None
        self._connection = http.client.HTTPSConnection(
            parts.hostname,
            parts.port,
            timeout=_DEADLINE_SECONDS,
            context=ssl.create_default_context(cafile=str(identity.certificate_authority)),
        )
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connection; a later request opens a new one."""
        with self._lock:
            self._connection.close()

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = "application/json",
        query: Mapping[str, str | int | bool] | None = None,
    ) -> Any:
        """Send a request and return the decoded answer (a dict, or text for text).

        Raises:
          ApiError: a status of 400 or more.
          OSError: no answer.
        """
        if query:
            values = {k: str(v).lower() if isinstance(v, bool) else v for k, v in query.items()}
            path = f"{path}?{urllib.parse.urlencode(values)}"
        headers = {"Accept": "application/json", "Content-Type": content_type}
        if self.identity.token:
            headers["Authorization"] = f"Bearer {self.identity.token}"
        payload = None if body is None else json.dumps(body)
        status, text = self._exchange(method, path, payload, headers)
        answer = json.loads(text) if text[:1] in ("{", "[") else text
        if status >= 400:
            raise ApiError(method, path, status, answer)
        return answer

    def _exchange(
        self, method: str, path: str, payload: str | None, headers: dict[str, str]
    ) -> tuple[int, str]:
        with self._lock:
            for attempt in (1, 2):
                try:
                    self._connection.request(method, path, payload, headers)
                    response = self._connection.getresponse()
                    return response.status, response.read().decode()
                except (http.client.RemoteDisconnected, ConnectionError, ssl.SSLEOFError):
                    # A kept-alive connection that the server closed; once, on a new one.
                    self._connection.close()
                    if attempt == 2:
                        raise
                except BaseException:
                    self._connection.close()
                    raise
        raise AssertionError

    def get(self, path: str, **query: str | int | bool) -> Manifest:
        """GET one object or one list."""
        return self.request("GET", path, query=query)

    def find(self, path: str) -> Manifest | None:
        """GET one object, None when there is none."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def items(self, path: str, **query: str | int | bool) -> list[Manifest]:
        """GET a collection's items."""
        return self.get(path, **query)["items"]

    def create(self, path: str, body: Manifest, **query: str | int | bool) -> Manifest:
        """POST `body` to a collection or a subresource."""
        return self.request("POST", path, body, query=query)

    def apply(self, path: str, body: Manifest, *, manager: str = "test") -> Manifest:
        """Server-side apply, taking over every field of `body`."""
        return self.patch(path, body, kind="apply", fieldManager=manager, force=True)

    def patch(
        self, path: str, body: object, *, kind: str = "merge", **query: str | int | bool
    ) -> Manifest:
        """PATCH with `kind` merge, strategic, json or apply."""
        return self.request("PATCH", path, body, content_type=_PATCH_TYPES[kind], query=query)

    def delete(
        self, path: str, *, propagation: str = "Background", grace: int | None = None
    ) -> None:
        """DELETE an object; one that is gone already is no error.

        Args:
          path: the object's.
          propagation: Background, Foreground or Orphan.
          grace: seconds a pod gets to end; None for its own.
        """
        options: Manifest = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": propagation,
        }
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        try:
            self.request("DELETE", path, options)
        except ApiError as error:
            if error.status != 404:
                raise


class Kubectl:
    """The kubectl binary with a fixed kubeconfig."""

    def __init__(self, binary: Path, kubeconfig: Path, *, home: Path) -> None:
        self.binary = binary
        self.kubeconfig = kubeconfig
        # Its discovery cache belongs to this control plane, not to the user's home.
        self._environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(home)}

    def __call__(self, *arguments: str, input: str | None = None) -> str:  # noqa: A002
        """Run kubectl and return its stdout.

        Raises:
          RuntimeError: a non-zero exit; the message holds its stderr.
        """
        done = subprocess.run(
            [self.binary, "--kubeconfig", self.kubeconfig, *arguments],
            input=input,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=self._environment,
        )
        if done.returncode:
            msg = f"kubectl {' '.join(arguments)}: exit {done.returncode}: {done.stderr.strip()}"
            raise RuntimeError(msg)
        return done.stdout


def load_manifests(path: Path) -> list[Manifest]:
    """Return the objects of a YAML file."""
    # libyaml where the wheel has it: JobSet's CRD takes the Python parser a second.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [each for each in yaml.load_all(path.read_text(), Loader=loader) if each]


def find_condition(manifest: Manifest, kind: str) -> Manifest | None:
    """Return the condition of that type from an object's status, None when there is none."""
    conditions = (manifest.get("status") or {}).get("conditions") or []
    return next((each for each in conditions if each["type"] == kind), None)


def has_condition(manifest: Manifest, kind: str) -> bool:
    """Tell whether the condition of that type is True."""
    condition = find_condition(manifest, kind)
    return condition is not None and condition["status"] == "True"


def wait_for[T](
    what: str,
    look: Callable[[], T | None],
    *,
    timeout: float = 30.0,
    describe: Callable[[], object] | None = None,
) -> T:
    """Call `look` until it returns something true, and return that.

    Args:
      what: the sentence's rest in "timed out waiting for ...".
      look: may raise ApiError or OSError, which counts as not yet.
      timeout: seconds.
      describe: called on a time-out; what it returns is printed in the message.

    Raises:
      TimeoutError: nothing true in time.
    """
    deadline = time.monotonic() + timeout
    last: object = None
    while True:
        try:
            if value := look():
                return value
            last = value
        except (ApiError, OSError) as error:
            last = error
        if time.monotonic() >= deadline:
            seen = describe() if describe is not None else last
            raise TimeoutError(f"timed out after {timeout:.0f} s waiting for {what}; last: {seen}")
        time.sleep(0.05)
