"""The operator comes up beside a real API server with the rights of its manifests alone."""

from __future__ import annotations

import signal

import pytest

from lingcluster import operator_process
from lingcluster.audit import AuditLog
from lingcluster.client import ApiError, KubeClient
from lingcluster.control_plane import ControlPlane
from lingcluster.operator_process import StartOperator


def test_the_operator_becomes_ready_as_its_own_user_and_is_refused_nothing(
    start_operator: StartOperator, audit_log: AuditLog
) -> None:
    operator = start_operator()
    requests = audit_log.wait_for(user=operator_process.USER)
    assert {each.verb for each in requests} >= {"list"}
    assert audit_log.records(user=operator_process.USER, code=403) == []
    assert operator.metrics()


def test_sigterm_ends_the_operator_with_0(start_operator: StartOperator) -> None:
    operator = start_operator()
    operator.signal(signal.SIGTERM)
    assert operator.wait(timeout=15) == 0


def test_the_operators_token_is_no_administrators(
    control_plane: ControlPlane, operator_kubeconfig: object
) -> None:
    client = KubeClient(
        control_plane.service_account(operator_process.NAMESPACE, operator_process.SERVICE_ACCOUNT)
    )
    for path in ("/api/v1/secrets", "/api/v1/nodes", "/api/v1/namespaces/default/configmaps"):
        with pytest.raises(ApiError) as refusal:
            client.get(path)
        assert refusal.value.status == 403
    client.close()
