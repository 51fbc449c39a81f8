"""A real control plane on loopback: etcd, API server, controller manager, scheduler, JobSet.

Plain processes of one test session. Users are told apart and authorised by RBAC; every answered
request is in the audit log. What differs from a cluster: no fsync, no leader election, no cloud,
no service network (no kube-proxy, no DNS), only the controllers that the tests need, and nodes
come from the process kubelet.
"""

from __future__ import annotations

import concurrent.futures
import json
import secrets
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lingcluster import components, jobset_controller, kueue_controller
from lingcluster.audit import AuditLog
from lingcluster.build import Programs
from lingcluster.certificates import CertificateAuthority
from lingcluster.client import (
    Identity,
    KubeClient,
    Kubectl,
    Manifest,
    has_condition,
    load_manifests,
    wait_for,
)
from lingcluster.loopback import LoopbackBlock
from lingcluster.processes import Process, Session

# User name -> group. The components have the identities, and so the rights, of a real cluster.
_USERS = {
    "admin": "system:masters",
    "process-kubelet": "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
    jobset_controller.USER: "",
    kueue_controller.USER: "",
}


@dataclass(frozen=True)
class Additions:
    """What a control plane has beside what every test needs.

    Attributes:
      users: name -> group.
      controllers: of the controller manager.
      addresses: beside its own at which the API server's certificate is valid.
      api_server_flags: they come last, and so win.
    """

    users: Mapping[str, str] = field(default_factory=dict[str, str])
    controllers: Sequence[str] = ()
    addresses: Sequence[str] = ()
    api_server_flags: Sequence[str] = ()


class ControlPlane:
    """Starts on `start`, ends on `stop`.

    Args:
      programs: the built programs.
      directory: for state, keys, kubeconfigs and logs; empty.
      block: the session's loopback addresses.
      session: owner of the processes.
      additions: None for none.

    Attributes:
      server: the API server's URL.
      client: REST client of the administrator.
      kubectl: kubectl of the administrator.
      kubeconfig: file of the administrator.
      audit_log: every answered request.
    """

    def __init__(
        self,
        programs: Programs,
        directory: Path,
        block: LoopbackBlock,
        session: Session,
        *,
        additions: Additions | None = None,
    ) -> None:
        self.additions = additions or Additions()
        self.programs = programs
        self.directory = directory
        self.session = session
        self.address = block.control_plane
        names = ("etcd", "etcd-peer", "apiserver", "kcm", "scheduler", "jobset-webhook",
                 "jobset-probe", "kueue-webhook", "kueue-probe")  # fmt: skip
        self.ports: dict[str, int] = dict(zip(names, block.free_ports(len(names)), strict=True))
        self.server = f"https://{self.address}:{self.ports['apiserver']}"
        self.authority = CertificateAuthority(directory)
        self.serving = self.authority.serving(
            directory / "serving", address=self.address, others=self.additions.addresses
        )
        self._users = {**_USERS, **self.additions.users}
        self._tokens = {user: secrets.token_hex(16) for user in self._users}
        self.client = KubeClient(self.identity("admin"))
        self.kubeconfig = self.identity("admin").write_kubeconfig(directory / "admin.kubeconfig")
        self.kubectl = Kubectl(programs["kubectl"], self.kubeconfig, home=directory)
        self.audit_log = AuditLog(directory / "audit.log")
        self._running: list[Process] = []
        self._api_server: Process | None = None

    def identity(self, user: str) -> Identity:
        """Return how to connect as one of the fixed users."""
        return Identity(self.server, self.authority.certificate, self._tokens[user])

    def anonymous(self) -> Identity:
        """Return how to connect as nobody."""
        return Identity(self.server, self.authority.certificate, None)

    def service_account(
        self, namespace: str, name: str, *, expiration_seconds: int = 3600
    ) -> Identity:
        """Return how to connect as a service account, by a token of the TokenRequest API.

        Args:
          namespace: the account's.
          name: the account's.
          expiration_seconds: the token's life; the API server wants 600 at least.

        Raises:
          ApiError: there is no such account.
        """
        answer = self.client.create(
            f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token",
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {"expirationSeconds": expiration_seconds},
            },
        )
        return Identity(self.server, self.authority.certificate, answer["status"]["token"])

    def service_account_kubeconfig(
        self, namespace: str, name: str, *, expiration_seconds: int = 3600
    ) -> Path:
        """Write a kubeconfig that has a service account's token and rights; return its path."""
        identity = self.service_account(namespace, name, expiration_seconds=expiration_seconds)
        path = self.directory / f"{namespace}.{name}.{secrets.token_hex(3)}.kubeconfig"
        return identity.write_kubeconfig(path, namespace=namespace)

    def start(self, crds: Sequence[Path] = ()) -> None:
        """Start everything and return when JobSets can be made.

        Args:
          crds: further CustomResourceDefinition files, applied before the controller manager
            starts: its garbage collector looks for new kinds only every 30 s.

        Raises:
          NotReadyError: a program did not come up.
        """
        self.start_bare()
        for path in (*jobset_controller.crd_files(self.programs), *crds):
            for crd in load_manifests(path):
                self.install_crd(crd)
        for crd in kueue_controller.crds(self):
            self.install_crd(crd)
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            starts = (
                components.start_controller_manager,
                components.start_scheduler,
                jobset_controller.start,
            )
            for done in [pool.submit(start, self) for start in starts]:
                done.result()

    def start_bare(self) -> None:
        """Start etcd and the API server alone: no kind but Kubernetes' own, and no controller."""
        components.start_etcd(self)
        self.start_api_server()

    def kill_api_server(self) -> None:
        """Kill the API server as a lost machine does; start_api_server brings it back."""
        assert self._api_server is not None
        self._api_server.kill()
        self._running.remove(self._api_server)

    def start_api_server(self) -> None:
        """Start the API server, the next time on the same port and etcd; return when ready.

        Raises:
          NotReadyError: it did not come up.
        """
        tokens = self.directory / "tokens.csv"
        tokens.touch(mode=0o600)
        tokens.write_text(
            "".join(
                f'{self._tokens[user]},{user},{user},"{group}"\n'
                for user, group in self._users.items()
            )
        )
        self._api_server = components.start_api_server(self, tokens=tokens)

    def compact_etcd(self) -> int:
        """Drop the history of all objects, as the API server does every five minutes.

        Returns: The revision, that is resourceVersion, before which nothing is known any more.
        """
        listed = self.client.get("/api/v1/namespaces", limit=1)
        revision = int(listed["metadata"]["resourceVersion"])
        etcd = f"http://{self.address}:{self.ports['etcd']}/v3/kv/compaction"
        body = json.dumps({"revision": str(revision), "physical": True}).encode()
        with urllib.request.urlopen(etcd, data=body, timeout=10) as answer:
            answer.read()
        return revision

    def webhook_url(self, controller: str) -> str:
        """Return where the API server finds the webhooks of `jobset` or `kueue`."""
        return f"https://{self.address}:{self.ports[f'{controller}-webhook']}"

    def stop(self) -> None:
        """Kill everything, the API server's clients first; no state is worth an orderly end."""
        for process in reversed(self._running):
            process.kill()
        self._running.clear()
        self.client.close()

    def install_crd(self, crd: Manifest) -> None:
        """Apply a CustomResourceDefinition and wait until its objects can be listed."""
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/" + crd["metadata"]["name"]
        self.client.apply(path, crd)
        wait_for(
            f"{crd['metadata']['name']} to be established",
            lambda: has_condition(self.client.get(path), "Established"),
        )
        spec = crd["spec"]
        versions = [version["name"] for version in spec["versions"] if version["served"]]
        collection = f"/apis/{spec['group']}/{versions[0]}/{spec['names']['plural']}"
        # Established comes first; until the storage is ready the answer is 404 or 429.
        wait_for(f"{collection} to be served", lambda: self.client.get(collection))

    def run(self, name: str, *arguments: str) -> Process:
        """Start a program that ends with the control plane."""
        process = Process(
            name,
            [self.programs[name], *arguments],
            log=self.directory / f"{name}.log",
            session=self.session,
            cwd=self.directory,
        )
        self._running.append(process)
        return process
