"""The operator under test: its own process, its own service account, only its own rights."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lingcluster.client import Kubectl
from lingcluster.processes import Process, Session

NAMESPACE = "ling-system"
SERVICE_ACCOUNT = "ling-operator"
USER = f"system:serviceaccount:{NAMESPACE}:{SERVICE_ACCOUNT}"
_READY_TIMEOUT = 30.0


def install_access(kubectl: Kubectl, manifests: Path) -> None:
    """Apply the operator's namespace, service account and roles as a user does.

    Args:
      kubectl: an administrator's.
      manifests: the folder manifests/operator.
    """
    for name in ("namespace.yaml", "rbac.yaml"):
        kubectl("apply", "--server-side", "-f", str(manifests / name))


@dataclass(frozen=True)
class OperatorAddresses:
    """Where one operator process listens."""

    metrics: str
    probes: str


class OperatorProcess(Process):
    """`python -m ling_operator.app` with a kubeconfig.

    Args:
      kubeconfig: whom it acts as.
      namespaces: those it watches; none for all.
      addresses: where it listens.
      log: file for its JSON lines.
      session: owner of the process.
      arguments: further flags.
      program: what Python runs: a module, or a file that changes the operator first.
    """

    def __init__(
        self,
        *,
        kubeconfig: Path,
        namespaces: Sequence[str],
        addresses: OperatorAddresses,
        log: Path,
        session: Session,
        arguments: Sequence[str] = (),
        program: Sequence[str | Path] = ("-m", "ling_operator.app"),
    ) -> None:
        self.addresses = addresses
        only = [f"--namespace={each}" for each in namespaces]
        super().__init__(
            "ling-operator",
            [
                sys.executable,
                *program,
                f"--kubeconfig={kubeconfig}",
                f"--metrics-bind-address={addresses.metrics}",
                f"--health-probe-bind-address={addresses.probes}",
                *only,
                *arguments,
            ],
            log=log,
            session=session,
        )

    def wait_until_ready(self) -> None:
        """Return once its caches are filled.

        Raises:
          NotReadyError: it ended, or was not ready in time.
        """
        self.wait_ready(self.is_ready, timeout=_READY_TIMEOUT)

    def is_ready(self) -> bool:
        """Ask /readyz.

        Raises:
          OSError: nobody listens there.
        """
        try:
            with urllib.request.urlopen(
                f"http://{self.addresses.probes}/readyz", timeout=5
            ) as answer:
                return answer.status == 200
        except urllib.error.HTTPError as error:
            error.close()
            return False

    def unready(self, words: str) -> str | None:
        """Return what /readyz says if it is not ready and these words are among it."""
        try:
            with urllib.request.urlopen(f"http://{self.addresses.probes}/readyz", timeout=5):
                return None
        except urllib.error.HTTPError as error:
            said = error.read().decode()
            error.close()
            return said if words in said else None

    def metrics(self) -> str:
        """Return the page of its own metrics."""
        with urllib.request.urlopen(
            f"http://{self.addresses.metrics}/metrics", timeout=5
        ) as answer:
            return answer.read().decode()


class StartOperator(Protocol):
    """Starts an operator that watches the test's namespace, and waits until it is ready."""

    def __call__(
        self,
        *,
        kubeconfig: Path | None = None,
        namespaces: Sequence[str] = (),
        arguments: Sequence[str] = (),
        wait: bool = True,
    ) -> OperatorProcess:
        """Start one more.

        Args:
          kubeconfig: None is the operator's own service account.
          namespaces: to watch in place of the test's.
          arguments: further flags.
          wait: until it is ready.
        """
        ...
