"""Finding the API server: files, service accounts, tokens that change."""

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
    assert found.authorization() == "Bearer first"
    token.write_text("second\n")
    assert found.authorization() == "Bearer second"
    token.unlink()
    with pytest.raises(NoClusterError, match="no credentials"):
        found.authorization()


def test_a_token_file_is_read_again_and_stands_beside_its_kubeconfig(tmp_path: Path) -> None:
    config = json.loads(kubeconfig())
    config["users"] = [{"name": "u", "user": {"tokenFile": "token", "token": "older"}}]
    (tmp_path / "config").write_text(json.dumps(config))
    (tmp_path / "token").write_text("first\n")
    found = discover(str(tmp_path / "config"))
    assert found.authorization() == "Bearer first"
    (tmp_path / "token").write_text("second\n")
    assert found.authorization() == "Bearer second"


@pytest.mark.usefixtures("nowhere")
def test_of_several_kubeconfigs_the_first_that_names_a_current_context_decides_as_for_kubectl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second, none = tmp_path / "first", tmp_path / "second", tmp_path / "none"
    first.write_text(kubeconfig().replace("here", "one").replace("1.2.3.4", "1.1.1.1"))
    other = json.loads(kubeconfig().replace("1.2.3.4", "2.2.2.2"))
    other["clusters"][0]["name"] = other["contexts"][0]["context"]["cluster"] = "d"
    second.write_text(json.dumps(other))
    none.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": ""}))
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", f"{none}:{first}:{second}")
    assert discover(None).server == "https://1.1.1.1:6443"
    assert discover(None, "here").server == "https://2.2.2.2:6443"


@pytest.mark.parametrize(
    ("no_proxy", "server", "cluster", "proxy"),
    [
        ("", "https://1.2.3.4:6443", {}, "http://proxy:3128"),
        ("1.2.3.0/24", "https://1.2.3.4:6443", {}, None),
        ("other,.example.com", "https://api.example.com", {}, None),
        ("", "https://127.0.0.1:6443", {}, None),
        ("", "https://localhost:6443", {}, None),
        ("1.2.3.4", "https://1.2.3.4", {"proxy-url": "http://own:1"}, "http://own:1"),
    ],
)
def test_a_proxy_of_the_environment_is_used_unless_no_proxy_names_the_server(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    no_proxy: str,
    server: str,
    cluster: dict[str, str],
    proxy: str | None,
) -> None:
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "proxy:3128")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, no_proxy)
    (tmp_path / "config").write_text(kubeconfig(server=server, **cluster))
    assert discover(str(tmp_path / "config")).proxy == proxy


def test_a_proxy_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(kubeconfig(**{"proxy-url": "socks5://localhost:1080"}))
    with pytest.raises(NoClusterError, match="socks5://localhost:1080: only http"):
        discover(str(tmp_path / "config"))


def test_an_authority_that_kubectl_accepts_is_accepted_by_newer_pythons_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = ssl.create_default_context

    def of_python_3_13(**options: Any) -> ssl.SSLContext:
        context = make(**options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
        return context

    monkeypatch.setattr(ssl, "create_default_context", of_python_3_13)
    (tmp_path / "config").write_text(kubeconfig())
    found = discover(str(tmp_path / "config"))
    assert found.tls is not None
    assert not found.tls.verify_flags & ssl.VERIFY_X509_STRICT


def plugin(tmp_path: Path, command: str, **more: object) -> str:
    config = json.loads(kubeconfig())
    api = "client.authentication.k8s.io/v1"
    config["users"][0]["user"] = {"exec": {"apiVersion": api, "command": command, **more}}
    (tmp_path / "config").write_text(json.dumps(config))
    return str(tmp_path / "config")


def test_a_plugin_is_asked_again_once_its_token_has_expired(tmp_path: Path) -> None:
    script, count = tmp_path / "auth-plugin", tmp_path / "count"
    script.write_text(
        "#!/bin/sh\n"
        f"echo x >> {count}\n"
        f"n=$(wc -l < {count})\n"
        'expiry=2020-01-01T00:00:00Z; [ "$n" -lt 2 ] || expiry=2999-01-01T00:00:00Z\n'
        'echo "{\\"apiVersion\\":\\"client.authentication.k8s.io/v1\\",'
        '\\"kind\\":\\"ExecCredential\\",\\"status\\":{\\"token\\":\\"t$n\\",'
        '\\"expirationTimestamp\\":\\"$expiry\\"}}"\n'
    )
    script.chmod(0o755)
    found = discover(plugin(tmp_path, str(script)))
    assert [found.authorization() for _ in range(3)] == ["Bearer t2"] * 3


def test_a_plugin_that_gives_nothing_ends_in_a_sentence_and_not_as_nobody(tmp_path: Path) -> None:
    hint = "Install gke-gcloud-auth-plugin"
    missing = plugin(tmp_path, "no-such-auth-plugin", installHint=hint)
    with pytest.raises(NoClusterError, match=f"no-such-auth-plugin, which is not on PATH: {hint}"):
        discover(missing)
    with pytest.raises(NoClusterError, match="false, which gave none"):
        discover(plugin(tmp_path, "false"))


@pytest.mark.parametrize(
    "content", ["{", "3", "- a", "clusters: 3", "current-context: a\nusers: 1"]
)
def test_a_file_that_is_no_kubeconfig_ends_in_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "config").write_text(content)
    with pytest.raises(NoClusterError, match="no usable cluster configuration"):
        discover(str(tmp_path / "config"))
