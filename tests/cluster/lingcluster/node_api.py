"""What the process kubelet asks of the API server.

It lists and watches with code of its own, so that a mistake in the reflector under test cannot
hide behind the same mistake here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from lingcluster.client import Identity, Manifest
from lingcluster.nodes import NodePool, node_manifest, node_status, taints

_log = logging.getLogger(__name__)
_MERGE = "application/merge-patch+json"
_STRATEGIC_MERGE = "application/strategic-merge-patch+json"
_WATCH_SECONDS = 240


class NodeApi:
    """Connected between `__aenter__` and `__aexit__`."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    async def __aenter__(self) -> NodeApi:
        context = ssl.create_default_context(cafile=str(self._identity.certificate_authority))
        self._http = aiohttp.ClientSession(
            self._identity.server,
            headers={"Authorization": f"Bearer {self._identity.token}"},
            connector=aiohttp.TCPConnector(ssl=context),
            timeout=aiohttp.ClientTimeout(total=30),
            raise_for_status=True,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def register(self, pool: NodePool, name: str, *, address: str) -> None:
        """Create the object of a node of `pool`, ready at `address`."""
        path = f"/api/v1/nodes/{name}"
        await self._request("POST", "/api/v1/nodes", node_manifest(pool, name))
        status = node_status(pool, name, address=address)
        await self._request("PATCH", f"{path}/status", {"status": status}, _MERGE)
        # Admission tainted it not-ready, and no node lifecycle controller takes that away.
        await self._request("PATCH", path, {"spec": {"taints": taints(pool)}}, _MERGE)

    async def list_pods(self) -> tuple[list[Manifest], str]:
        """Return all pods, and the resource version to watch them from."""
        listing = await self._request("GET", "/api/v1/pods")
        return listing["items"], listing["metadata"]["resourceVersion"]

    async def watch_pods(self, version: str) -> AsyncIterator[tuple[str, Manifest]]:
        """Yield the kind and the pod of each event since `version`, until the watch ends."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_WATCH_SECONDS + 30)
        async with self._http.get(
            "/api/v1/pods", params=query, timeout=timeout, read_bufsize=2**22
        ) as answer:
            async for line in answer.content:
                event = json.loads(line)
                if event["type"] == "ERROR":  # 410 above all: list again
                    _log.info("watch of pods: %s", event["object"].get("message"))
                    return
                if event["type"] != "BOOKMARK":
                    yield event["type"], event["object"]

    async def patch_status(self, pod: Manifest, status: Manifest) -> bool:
        """Write fields of a pod's status; False when the pod is gone."""
        # A strategic merge patch: conditions are merged by type, so those that others set, such
        # as DisruptionTarget, survive. The uid makes the patch fail on a later pod of this name.
        body = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": status}
        return await self._persist("PATCH", f"{_path(pod)}/status", body, _STRATEGIC_MERGE)

    async def remove(self, pod: Manifest) -> None:
        """Delete the object of a pod that has ended."""
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": pod["metadata"]["uid"]},
        }
        await self._persist("DELETE", _path(pod), options)

    async def _persist(
        self, method: str, path: str, body: Manifest, content_type: str = "application/json"
    ) -> bool:
        """Send until the API server takes it; False when the pod is gone."""
        while True:
            try:
                await self._request(method, path, body, content_type)
            except aiohttp.ClientResponseError as error:
                if error.status in (404, 409, 422):
                    return False
                _log.warning("%s %s: %s", method, path, error)
            except (aiohttp.ClientError, TimeoutError) as error:
                _log.warning("%s %s: %s", method, path, error)
            else:
                return True
            await asyncio.sleep(0.3)

    async def _request(
        self,
        method: str,
        path: str,
        body: Manifest | None = None,
        content_type: str = "application/json",
    ) -> Any:
        async with self._http.request(
            method,
            path,
            data=None if body is None else json.dumps(body),
            headers={"Content-Type": content_type},
        ) as answer:
            return await answer.json()


def _path(pod: Manifest) -> str:
    metadata = pod["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
