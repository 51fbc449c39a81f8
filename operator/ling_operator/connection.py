"""Where the API server is and who we are: kubeconfig or service account."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

_SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class NoClusterError(Exception):
    """No configuration leads to an API server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """An API server's address and our credentials.

    Attributes:
      server: URL without a trailing slash.
      tls: context with the server's CA and our client certificate, or None for plain HTTP.
      authorization: returns the Authorization header's value, freshly read where it expires
        (projected tokens, plugins). It may block: call it in a thread.
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

    settings = client.Configuration()
    loaders = cast("Any", config)  # its loaders carry no types
    try:
        if kubeconfig is None and context is None and not _has_kubeconfig():
            loaders.load_incluster_config(client_configuration=settings)
            return _connection(settings, _service_account_namespace())
        loaders.load_kube_config(
            config_file=kubeconfig, context=context, client_configuration=settings
        )
        contexts, active = loaders.list_kube_config_contexts(config_file=kubeconfig)
        chosen = next((each for each in contexts if each["name"] == context), active)
        return _connection(settings, str(chosen["context"].get("namespace") or "default"))
    except (config.ConfigException, OSError) as error:
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


def _connection(settings: Any, namespace: str) -> Connection:
    """Take from the generated client's Configuration what a request needs."""

    def authorization() -> str | None:
        value = cast("str | None", settings.get_api_key_with_prefix("BearerToken"))
        # A token file ends in a newline, which no header may.
        return value.strip() if value else None

    server = str(settings.host).rstrip("/")
    return Connection(
        server=server,
        tls=_tls(settings) if server.startswith("https://") else None,
        authorization=authorization,
        namespace=namespace,
        server_hostname=cast("str | None", settings.tls_server_name),
        proxy=cast("str | None", settings.proxy),
    )


def _tls(settings: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=cast("str | None", settings.ssl_ca_cert))
    if not settings.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if settings.cert_file:
        context.load_cert_chain(str(settings.cert_file), cast("str | None", settings.key_file))
    return context


def _service_account_namespace() -> str:
    try:
        return _SERVICE_ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"
