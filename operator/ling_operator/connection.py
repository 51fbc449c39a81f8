"""Where the API server is and who we are: kubeconfig or service account."""

import ipaddress
import shutil
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from yaml import YAMLError

_SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_PROXY_SCHEMES = ("http://", "https://")
_MALFORMED = (AttributeError, TypeError, ValueError)  # what the client makes of such files


class NoClusterError(Exception):
    """No configuration leads to an API server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """An API server's address and our credentials.

    Attributes:
      server: URL without a trailing slash.
      tls: context with the server's CA and our client certificate, or None for plain HTTP.
      authorization: returns the Authorization header's value, freshly read where it expires
        (projected tokens, plugins); raises NoClusterError where it cannot be had. It may block:
        call it in a thread.
      namespace: where commands act unless told otherwise.
      server_hostname: name to verify instead of the URL's host.
      proxy: HTTP proxy to use.
    """

    server: str
    tls: ssl.SSLContext | None
    authorization: Callable[[], str | None]
    namespace: str = "default"
    server_hostname: str | None = None
    proxy: str | None = None


def discover(kubeconfig: str | None, context: str | None = None) -> Connection:
    """Find the API server, in kubectl's order.

    Args:
      kubeconfig: path of a kubeconfig file. None: the files of KUBECONFIG, then ~/.kube/config,
        then the service account of the pod that this runs in.
      context: of the kubeconfig; None: its current one.

    Raises:
      NoClusterError: none of them exists, or one does not make sense.
    """
    # kubernetes.config pulls in the whole generated client: a second that local runs do not need.
    from kubernetes import client, config
    from kubernetes.config import incluster_config

    settings = client.Configuration()
    try:
        if kubeconfig is None and context is None and not _has_kubeconfig():
            cast("Any", config).load_incluster_config(client_configuration=settings)
            token = Path(str(incluster_config.SERVICE_TOKEN_FILENAME))
            namespace = _service_account_namespace()
            return _connection(settings, namespace, token_file=token, proxy=None)
        return _of_kubeconfig(kubeconfig, context, settings)
    except (config.ConfigException, OSError, YAMLError, *_MALFORMED) as error:
        msg = (
            f"no usable cluster configuration: {error}; pass --kubeconfig FILE, set KUBECONFIG, "
            "or run inside a pod with a service account"
        )
        raise NoClusterError(msg) from error


def _has_kubeconfig() -> bool:
    from kubernetes.config import kube_config

    places = str(kube_config.KUBE_CONFIG_DEFAULT_LOCATION).split(
        str(kube_config.ENV_KUBECONFIG_PATH_SEPARATOR)
    )
    return any(Path(place).expanduser().is_file() for place in places)


def _of_kubeconfig(kubeconfig: str | None, context: str | None, settings: Any) -> Connection:
    from kubernetes.config import ConfigException
    from kubernetes.config import kube_config as library

    kube_config = cast("Any", library)  # its loaders carry no types
    merged = kube_config.KubeConfigMerger(kubeconfig or kube_config.KUBE_CONFIG_DEFAULT_LOCATION)
    if merged.config is None:
        msg = f"there is no file {kubeconfig or kube_config.KUBE_CONFIG_DEFAULT_LOCATION}"
        raise ConfigException(msg)
    # Of several files kubectl takes the first that names a current context, the client the last.
    files: list[dict[str, Any]] = list(merged.config_files.values())
    current = next((f["current-context"] for f in files if f.get("current-context")), None)
    loader = kube_config.KubeConfigLoader(
        config_dict=merged.config,
        active_context=context or current,
        config_base_path=None,
        config_persister=merged.save_changes,
    )
    loader.load_and_set(settings)
    chosen: dict[str, Any] = loader.current_context["context"]
    user, folder = _entry(merged.config, "users", chosen.get("user"), key="user")
    cluster, _ = _entry(merged.config, "clusters", chosen["cluster"], key="cluster")
    _require_plugins_answer(user, settings)
    token = user.get("tokenFile")
    return _connection(
        settings,
        str(chosen.get("namespace") or "default"),
        token_file=folder / token if token else None,
        proxy=cluster.get("proxy-url"),
    )


def _entry(config: Any, kind: str, name: str | None, *, key: str) -> tuple[dict[str, Any], Path]:
    """Return a named entry, empty where there is none, and the folder of the file it is in."""
    found = config[kind].get_with_name(name, safe=True) if config.safe_get(kind) else None
    if found is None:
        return {}, Path()
    return dict(found.value.get(key) or {}), Path(found.path or "").absolute().parent


def _require_plugins_answer(user: Mapping[str, Any], settings: Any) -> None:
    """Refuse to go on as nobody: the client only logs that a plugin gave no credentials.

    Raises:
      NoClusterError: the plugin is not installed, or has failed.
    """
    plugin: Mapping[str, Any] | None = user.get("exec")
    if plugin is None or settings.api_key.get("BearerToken") or settings.cert_file:
        return
    command = str(plugin.get("command"))
    if shutil.which(command) is None:
        hint = plugin.get("installHint") or "install it"
        msg = f"the credentials come from {command}, which is not on PATH: {str(hint).strip()}"
        raise NoClusterError(msg)
    msg = f"the credentials come from {command}, which gave none; run it by hand, or log in again"
    raise NoClusterError(msg)


def _connection(
    settings: Any, namespace: str, *, token_file: Path | None, proxy: str | None
) -> Connection:
    """Take from the generated client's Configuration what a request needs."""
    server = str(settings.host).rstrip("/")
    return Connection(
        server=server,
        tls=_tls(settings) if server.startswith("https://") else None,
        authorization=_authorization(settings, token_file),
        namespace=namespace,
        server_hostname=cast("str | None", settings.tls_server_name),
        proxy=_proxy(settings, server, proxy),
    )


def _authorization(settings: Any, token_file: Path | None) -> Callable[[], str | None]:
    from kubernetes.config import ConfigException

    def authorization() -> str | None:
        try:
            if token_file is not None:  # it is replaced long before its token expires
                # A token file ends in a newline, which no header may.
                return f"Bearer {token_file.read_text('ascii').strip()}"
            value = cast("str | None", settings.get_api_key_with_prefix("BearerToken"))
        except (ConfigException, OSError, ValueError, LookupError) as error:
            msg = f"no credentials: {error}"
            raise NoClusterError(msg) from error
        return value.strip() if value else None

    return authorization


def _tls(settings: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=cast("str | None", settings.ssl_ca_cert))
    # Since 3.13 Python refuses authorities without key identifier or key usage, which many
    # clusters have; kubectl does not.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not settings.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if settings.cert_file:
        context.load_cert_chain(str(settings.cert_file), cast("str | None", settings.key_file))
    return context


def _proxy(settings: Any, server: str, own: str | None) -> str | None:
    """Return the kubeconfig's proxy, else the environment's unless NO_PROXY names the server.

    Raises:
      NoClusterError: the kubeconfig's is of a kind that is not supported.
    """
    from kubernetes.client.rest import should_bypass_proxies

    if own is not None and not own.startswith(_PROXY_SCHEMES):
        msg = f"proxy-url: {own}: only http and https proxies are supported"
        raise NoClusterError(msg)
    direct = _is_here(server) or should_bypass_proxies(server, settings.no_proxy or "")
    if own is not None or direct or not settings.proxy:
        return own
    proxy = str(settings.proxy)
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    return proxy if proxy.startswith(_PROXY_SCHEMES) else None


def _is_here(server: str) -> bool:
    """Tell whether a server is on this machine: no proxy leads there."""
    host = urlsplit(server).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _service_account_namespace() -> str:
    try:
        return _SERVICE_ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"
