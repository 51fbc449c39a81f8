"""Finding the API server: files, service accounts, tokens that change."""

import datetime
import json
import ssl
from pathlib import Path
from typing import Any

import pytest
from kubernetes.config import incluster_config, kube_config

from ling_operator import connection
from ling_operator.connection import NoClusterError, discover


def kubeconfig(**cluster: Any) -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "c", "cluster": {"server": "https://1.2.3.4:6443/", **cluster}}],
            "users": [{"name": "u", "user": {"token": "secret"}}],
            "contexts": [
                {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
            ],
        }
    )


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without kubeconfig and outside every cluster."""
    default = tmp_path / "default-kubeconfig"
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(default))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_PORT", raising=False)
    return default


def test_a_kubeconfig_gives_server_token_namespace_and_verification(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(kubeconfig(**{"tls-server-name": "api.example.com"}))
    found = discover(str(file))
    assert found.server == "https://1.2.3.4:6443"
    assert found.authorization() == "Bearer secret"
    assert found.namespace == "team"
    assert found.server_hostname == "api.example.com"
    assert found.tls is not None
    assert found.tls.verify_mode is ssl.CERT_REQUIRED
    assert found.tls.check_hostname


def test_verification_is_off_only_where_the_kubeconfig_says_so(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(kubeconfig(**{"insecure-skip-tls-verify": True}))
    found = discover(str(file))
    assert found.tls is not None
    assert found.tls.verify_mode is ssl.CERT_NONE


def test_the_default_kubeconfig_goes_before_the_pods_service_account(nowhere: Path) -> None:
    nowhere.write_text(kubeconfig())
    assert discover(None).server == "https://1.2.3.4:6443"


def test_nothing_to_be_found_names_the_three_places(nowhere: Path, tmp_path: Path) -> None:
    with pytest.raises(NoClusterError, match=r"--kubeconfig FILE, set KUBECONFIG, or run inside"):
        discover(None)
    with pytest.raises(NoClusterError, match="no usable cluster configuration"):
        discover(str(tmp_path / "missing"))


@pytest.mark.usefixtures("nowhere")
def test_a_projected_token_is_read_again_when_it_may_have_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("first\n")  # as the kubelet writes it, and no header may end in a newline
    authority.write_text(ssl.DER_cert_to_PEM_cert(b""))
    (tmp_path / "namespace").write_text("ling-system")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
    monkeypatch.setattr(connection, "_SERVICE_ACCOUNT_NAMESPACE", tmp_path / "namespace")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(connection, "_tls", lambda _settings: None)  # the CA here is no CA
    found = discover(None)
    assert found.server == "https://[fd00::1]:443"
    assert found.namespace == "ling-system"
    assert found.authorization() == "bearer first"
    token.write_text("second\n")
    later = datetime.datetime.now() + datetime.timedelta(minutes=2)

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return later

    monkeypatch.setattr(datetime, "datetime", Later)
    assert found.authorization() == "bearer second"
