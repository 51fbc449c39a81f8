"""Kubernetes' own components: how each is started, and when it is ready."""

from __future__ import annotations

import json
import ssl
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from lingcluster.audit import POLICY
from lingcluster.certificates import service_account_key
from lingcluster.processes import Process, answers

if TYPE_CHECKING:
    from lingcluster.control_plane import ControlPlane

_START_TIMEOUT = 60.0
# Without nodelifecycle, whose leases the process kubelet does not renew; without endpointslice,
# which refuses loopback pod addresses and retries for ever.
_CONTROLLERS = (
    "garbage-collector-controller",
    "job-controller",
    "namespace-controller",
    "pod-garbage-collector-controller",
    "resourcequota-controller",
    "root-ca-certificate-publisher-controller",
    "serviceaccount-controller",
    "ttl-after-finished-controller",
)


def start_etcd(plane: ControlPlane) -> None:
    """Start etcd and return when it is healthy."""
    client = f"http://{plane.address}:{plane.ports['etcd']}"
    peer = f"http://{plane.address}:{plane.ports['etcd-peer']}"
    etcd = plane.run(
        "etcd",
        f"--data-dir={plane.directory / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    )
    etcd.wait_ready(lambda: answers(f"{client}/health"), timeout=_START_TIMEOUT)


def start_api_server(plane: ControlPlane, *, tokens: Path) -> Process:
    """Start the API server and return it when it is ready.

    Args:
      plane: its etcd runs.
      tokens: file of the users and their tokens.
    """
    policy = plane.directory / "audit-policy.json"
    policy.write_text(json.dumps(POLICY))
    signing_key = plane.directory / "service-account.key"
    if not signing_key.exists():
        service_account_key(signing_key)
    authority = plane.authority.certificate
    server = plane.run(
        "kube-apiserver",
        f"--etcd-servers=http://{plane.address}:{plane.ports['etcd']}",
        f"--bind-address={plane.address}",
        f"--advertise-address={plane.address}",
        f"--secure-port={plane.ports['apiserver']}",
        # The kubernetes Service's Endpoints cannot hold a loopback address.
        "--endpoint-reconciler-type=none",
        f"--tls-cert-file={plane.serving.certificate}",
        f"--tls-private-key-file={plane.serving.key}",
        f"--client-ca-file={authority}",
        f"--requestheader-client-ca-file={authority}",
        "--requestheader-allowed-names=nobody",
        f"--token-auth-file={tokens}",
        "--authorization-mode=RBAC",
        # As on GKE: a pod that asks for TPUs tolerates their nodes' taint.
        "--enable-admission-plugins=ExtendedResourceToleration",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-signing-key-file={signing_key}",
        f"--service-account-key-file={signing_key}",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--allow-privileged=true",
        # For logs: nodes' names resolve nowhere.
        "--kubelet-preferred-address-types=InternalIP",
        f"--audit-policy-file={policy}",
        f"--audit-log-path={plane.audit_log.path}",
        # Megabytes. By default a new file begins at 100, and a mark in the old one shows nothing.
        "--audit-log-maxsize=10000",
        *plane.additions.api_server_flags,
    )
    server.wait_ready(
        lambda: _is_healthy(f"{plane.server}/readyz", authority, plane.identity("admin").token),
        timeout=_START_TIMEOUT,
    )
    return server


def start_controller_manager(plane: ControlPlane) -> None:
    """Start the controller manager and return when it is healthy."""
    _start(
        plane,
        "kube-controller-manager",
        plane.ports["kcm"],
        f"--service-account-private-key-file={plane.directory / 'service-account.key'}",
        f"--root-ca-file={plane.authority.certificate}",
        "--use-service-account-credentials=true",
        f"--controllers={','.join([*_CONTROLLERS, *plane.additions.controllers])}",
    )


def start_scheduler(plane: ControlPlane) -> None:
    """Start the scheduler and return when it is healthy."""
    _start(plane, "kube-scheduler", plane.ports["scheduler"])


def _start(plane: ControlPlane, name: str, port: int, *arguments: str) -> None:
    kubeconfig = plane.identity(f"system:{name}").write_kubeconfig(
        plane.directory / f"{name}.kubeconfig"
    )
    process = plane.run(
        name,
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--leader-elect=false",
        f"--bind-address={plane.address}",
        f"--secure-port={port}",
        f"--tls-cert-file={plane.serving.certificate}",
        f"--tls-private-key-file={plane.serving.key}",
        *arguments,
    )
    url = f"https://{plane.address}:{port}/healthz"
    process.wait_ready(
        lambda: _is_healthy(url, plane.authority.certificate, None), timeout=_START_TIMEOUT
    )


def _is_healthy(url: str, authority: Path, token: str | None) -> bool:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    context = ssl.create_default_context(cafile=str(authority))
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, context=context, timeout=2) as answer:
        return answer.read() == b"ok"
