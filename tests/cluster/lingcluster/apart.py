"""Operators side by side: each with a namespace, a proxy and, where wanted, rights of its own."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lingcluster import operator_process
from lingcluster.api_proxy import ApiProxy
from lingcluster.client import Identity, KubeClient, wait_for
from lingcluster.control_plane import ControlPlane
from lingcluster.kubelet import ProcessKubelet
from lingcluster.loopback import LoopbackBlock
from lingcluster.operator_process import OperatorAddresses, OperatorProcess
from lingcluster.processes import Session
from lingcluster.training_runs import TrainingRuns


@dataclass(frozen=True)
class Apart:
    """A namespace with nothing in it, and an operator's way to the API server.

    Attributes:
      namespace: its name.
      runs: its runs, by a connection that no other thread uses.
      proxy: between the operator and the API server.
      start: starts an operator and does not wait for it; several may follow one another.
      log: what they say.
    """

    namespace: str
    runs: TrainingRuns
    proxy: ApiProxy
    start: Callable[[], OperatorProcess]
    log: Path


@dataclass
class SideBySide:
    """Makes them, from any thread.

    Args:
      control_plane: with the operator's manifests applied.
      kubelet: whose processes have to be gone at the end.
      loopback: for ports.
      session: owner of the operators.
      directory: for kubeconfigs and logs.
    """

    control_plane: ControlPlane
    kubelet: ProcessKubelet
    loopback: LoopbackBlock
    session: Session
    directory: Path
    _namespaces: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _prefix: str = field(default_factory=lambda: f"apart-{secrets.token_hex(3)}")

    @contextmanager
    def apart(self, identity: Callable[[str], Identity] | None = None) -> Iterator[Apart]:
        """Make one; at the end its operators are stopped and its namespace is being deleted.

        Args:
          identity: makes the operator's, given the namespace; None for that of its manifests.
        """
        plane = self.control_plane
        with self._lock:
            name = f"{self._prefix}-{next(self._numbers)}"
            self._namespaces.append(name)
            api, metrics, probes = self.loopback.free_ports(3)
        plane.client.create("/api/v1/namespaces", {"metadata": {"name": name}})
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        wait_for(f"the service account of {name}", lambda: plane.client.find(account))
        who = identity(name) if identity is not None else self._own_identity()
        with ExitStack() as stack:
            proxy = ApiProxy(who, address=plane.address, port=api, tls=plane.serving)
            stack.enter_context(proxy)
            kubeconfig = proxy.identity.write_kubeconfig(self.directory / f"{name}.kubeconfig")
            client = KubeClient(plane.identity("admin"))
            stack.callback(client.close)
            log = self.directory / f"operator-{name}.log"

            def start() -> OperatorProcess:
                operator = OperatorProcess(
                    kubeconfig=kubeconfig,
                    namespaces=[name],
                    addresses=OperatorAddresses(
                        f"{plane.address}:{metrics}", f"{plane.address}:{probes}"
                    ),
                    log=log,
                    session=self.session,
                )
                stack.callback(operator.stop)
                return operator

            yield Apart(name, TrainingRuns(client, name), proxy, start, log)
        plane.client.delete(f"/api/v1/namespaces/{name}")

    def clear(self) -> None:
        """Return when no namespace has a process left."""
        client = self.control_plane.client
        for name in self._namespaces:
            client.delete(f"/api/v1/namespaces/{name}")
            client.delete(f"/api/v1/namespaces/{name}/pods", grace=0)
        for name in self._namespaces:
            wait_for(
                f"the processes of {name} to end",
                lambda name=name: not self.kubelet.live_processes(name),
            )

    def _own_identity(self) -> Identity:
        return self.control_plane.service_account(
            operator_process.NAMESPACE, operator_process.SERVICE_ACCOUNT
        )
