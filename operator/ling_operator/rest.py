"""A small asynchronous client of the Kubernetes REST API: JSON in, JSON out, and watches."""

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Self, cast

import aiohttp

from ling_operator import deep_json
from ling_operator.connection import Connection, NoClusterError
from ling_operator.credentials import Credentials

type JsonObject = dict[str, Any]

CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 30.0  # what a halt waits for at most when its connection is dead
READ_IDLE_SECONDS = 75.0  # the API server sends a bookmark a minute on an idle watch
STREAM_SECONDS = 600.0  # a trainer that compiles may print nothing for minutes
_READS = frozenset({"GET", "CONNECT"})

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"  # JSON is YAML


class ApiError(Exception):
    """The API server refused a request, or did not answer.

    Attributes:
      status: HTTP status, or None where there was no answer.
      reason: the Status object's reason, such as AlreadyExists; empty without one.
      message: a sentence for people.
    """

    def __init__(self, *, status: int | None, reason: str, message: str) -> None:
        super().__init__(f"{status or 'no answer'} {reason}: {message}" if reason else message)
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def is_conflict(self) -> bool:
        """The object changed, exists already, or is another one now: look again."""
        return self.status == HTTPStatus.CONFLICT

    @property
    def is_not_found(self) -> bool:
        """The object, or its kind, does not exist."""
        return self.status == HTTPStatus.NOT_FOUND

    @property
    def is_refusal(self) -> bool:
        """The server answered and said no: a right is missing, or the request breaks a rule."""
        no_refusals = {HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS}
        answered = self.status is not None and self.status < HTTPStatus.INTERNAL_SERVER_ERROR
        return answered and self.status not in no_refusals

    @property
    def is_overload(self) -> bool:
        """Tell whether the server has too much to do: ask again later, and for no more."""
        return self.status == HTTPStatus.TOO_MANY_REQUESTS

    @property
    def is_expired(self) -> bool:
        """The resource version or the list's continuation is too old: list again."""
        return self.status == HTTPStatus.GONE


class WatchIdleError(Exception):
    """A watch was silent for so long that its connection must be dead."""


class RestClient:
    """Talks to one API server; use as an asynchronous context manager.

    Args:
      connection: the server.
      read_idle_seconds: silence after which a watch counts as dead.
      request_seconds: for any other request.
      may_write: asked right before each request that changes something, and again when it has a
        connection, which may take longer than a right to write lasts; False refuses it.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        read_idle_seconds: float = READ_IDLE_SECONDS,
        request_seconds: float = REQUEST_SECONDS,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._connection = connection
        self._may_write = may_write
        self._read_idle_seconds = read_idle_seconds
        self._request_seconds = request_seconds
        self._session: aiohttp.ClientSession | None = None
        self._credentials = Credentials(connection)

    async def __aenter__(self) -> Self:
        """Open the connection pool."""
        # No limit: a watch or a log that is followed keeps its connection, and with none left
        # every other request would wait until it times out.
        connector = aiohttp.TCPConnector(limit=0, ssl=self._connection.tls or True)
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(self._about_to_send)
        self._session = aiohttp.ClientSession(connector=connector, trace_configs=[trace])
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, **params: str) -> JsonObject:
        """Read an object or a list."""
        return await self._request("GET", path, params=params)

    async def text(self, path: str, **params: str) -> str:
        """Read a subresource that is not JSON, such as a pod's log."""
        return await self._exchange("GET", path, params=params)

    async def stream(self, path: str, **params: str) -> AsyncGenerator[bytes]:
        """Yield what a subresource sends until it ends, such as a log that is followed.

        Raises:
          ApiError: the server refused, or the connection broke or was silent for long.
        """
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=STREAM_SECONDS)
        async with self._send("GET", path, params=params, timeout=timeout) as answer:
            async for chunk in answer.content.iter_any():
                yield chunk

    async def post(self, path: str, body: JsonObject) -> JsonObject:
        """Create an object."""
        return await self._request("POST", path, body=body)

    async def put(self, path: str, body: JsonObject) -> JsonObject:
        """Replace an object; a resourceVersion in it makes a stale write fail with 409."""
        return await self._request("PUT", path, body=body)

    async def merge_patch(self, path: str, body: JsonObject, **params: str) -> JsonObject:
        """Change the named fields; a uid in metadata makes a patch of another object fail."""
        return await self._request(
            "PATCH", path, body=body, content_type=MERGE_PATCH, params=params
        )

    async def apply(self, path: str, body: JsonObject, *, manager: str, force: bool) -> JsonObject:
        """Create an object, or change the fields in `body`; others' too with force, else 409."""
        params = {"fieldManager": manager, "force": str(force).lower()}
        return await self._request(
            "PATCH", path, body=body, content_type=APPLY_PATCH, params=params
        )

    async def delete(self, path: str, *, uid: str, propagation: str) -> JsonObject:
        """Delete the object of this uid and no other.

        Args:
          path: the object's.
          uid: precondition; another object of that name answers 409.
          propagation: Foreground, Background or Orphan.
        """
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": propagation,
        }
        return await self._request("DELETE", path, body=body)

    async def watch(
        self, path: str, *, on_open: Callable[[], None] = lambda: None, **params: str
    ) -> AsyncGenerator[JsonObject]:
        """Yield watch events until the server ends the stream.

        Args:
          path: the collection's.
          on_open: called when the server has accepted the watch; events may be a minute away.
          params: of the query.

        Raises:
          ApiError: the server refused, or the connection broke.
          WatchIdleError: nothing arrived for read_idle_seconds, not even a bookmark.
        """
        timeout = aiohttp.ClientTimeout(
            sock_connect=CONNECT_SECONDS, sock_read=self._read_idle_seconds
        )
        rest = b""
        async with self._send("GET", path, params=params, timeout=timeout) as answer:
            on_open()
            try:
                # Lines are split here: the reader's own readline refuses objects over 64 KiB.
                async for chunk in answer.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        if line.strip():
                            yield _decode(line, path)
            except TimeoutError as error:
                msg = f"{path}: silent for {self._read_idle_seconds:g} s"
                raise WatchIdleError(msg) from error

    async def _request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: JsonObject | None = None,
        content_type: str = JSON,
    ) -> JsonObject:
        text = await self._exchange(
            method, path, params=params, body=body, content_type=content_type
        )
        return _decode(text, path)

    async def _exchange(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: JsonObject | None = None,
        content_type: str = JSON,
    ) -> str:
        timeout = aiohttp.ClientTimeout(total=self._request_seconds, sock_connect=CONNECT_SECONDS)
        async with self._send(
            method, path, params=params, body=body, content_type=content_type, timeout=timeout
        ) as answer:
            return await answer.text(errors="replace")  # a log may hold anything

    @asynccontextmanager
    async def _send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None,
        body: JsonObject | None = None,
        content_type: str = JSON,
        timeout: aiohttp.ClientTimeout,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send, and yield the answer if its status is below 400."""
        if self._session is None:
            msg = "use the client as `async with RestClient(...) as client`"
            raise RuntimeError(msg)
        headers = await self._headers(content_type)
        self._require_right(method, path)
        try:
            async with self._session.request(
                method,
                self._connection.server + path,
                params=params,
                data=None if body is None else json.dumps(body, allow_nan=False),
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
                server_hostname=self._connection.server_hostname,
                proxy=self._connection.proxy,
            ) as answer:
                if answer.status == HTTPStatus.UNAUTHORIZED:
                    self._credentials.refused()
                if answer.status >= HTTPStatus.BAD_REQUEST:
                    raise _refusal(answer, await answer.text())
                yield answer
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            msg = f"{method} {path}: {str(error) or type(error).__name__}"
            raise ApiError(status=None, reason="", message=msg) from error

    async def _about_to_send(
        self,
        _session: aiohttp.ClientSession,
        _context: SimpleNamespace,
        sent: aiohttp.TraceRequestHeadersSentParams,
    ) -> None:
        """Refuse a change of which nothing is on its way yet; aiohttp's second tries too."""
        self._require_right(sent.method, sent.url.path)

    def _require_right(self, method: str, path: str) -> None:
        if method not in _READS and not self._may_write():
            msg = f"{method} {path}: not sent, this replica does not lead"
            raise ApiError(status=None, reason="NotLeading", message=msg)

    async def _headers(self, content_type: str) -> dict[str, str]:
        headers = {"Accept": JSON, "Content-Type": content_type, "User-Agent": "ling-operator"}
        try:
            authorization = await self._credentials.header()
        except NoClusterError as error:
            raise ApiError(status=None, reason="", message=str(error)) from error
        return headers | ({"Authorization": authorization} if authorization else {})


def _decode(text: str | bytes, path: str) -> JsonObject:
    try:
        return cast("JsonObject", deep_json.loads(text))
    except ValueError as error:
        msg = f"{path}: the answer is no JSON: {error}"
        raise ApiError(status=None, reason="", message=msg) from error


def _refusal(answer: aiohttp.ClientResponse, text: str) -> ApiError:
    """Read the Status object of an error answer; a proxy's page is kept as its first line."""
    try:
        status = cast("JsonObject", json.loads(text))
        reason, message = str(status.get("reason", "")), str(status.get("message", ""))
    except (ValueError, AttributeError):
        reason, message = "", text.strip().partition("\n")[0][:500]
    message = message or f"HTTP {answer.status} {answer.reason}"
    return ApiError(status=answer.status, reason=reason, message=message)
