"""What the command line asks of a cluster: runs and their pods read, watched, edited."""

from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any

from ling_operator.api import ENDED, GROUP, PLURAL, VERSION, Phase
from ling_operator.caches import collection
from ling_operator.rest import ApiError, JsonObject, RestClient, WatchIdleError
from ling_operator.views import JOB_SET_NAME_LABEL

_MANAGER = "ling"
_OWNED_BY_OTHERS = "Apply failed with"
_UNKNOWN_KIND = ("could not find the requested resource", "page not found")


class NothingThereError(Exception):
    """There is nothing to show."""


def explain(error: ApiError) -> str:
    """Say in a line what the API server refused, and what to do where that is known."""
    message = " ".join(error.message.split())
    if error.status is None:
        return f"no answer from the API server: {message}"
    if error.is_not_found and any(text in message for text in _UNKNOWN_KIND):
        return (
            "this cluster knows no TrainingRuns; install the CRD: "
            "kubectl apply --server-side -f manifests/crd/"
        )
    if error.status == HTTPStatus.FORBIDDEN:
        return f"not allowed: {message}"
    if error.status == HTTPStatus.UNAUTHORIZED:
        return "the API server does not accept these credentials (401); log in again"
    if error.is_conflict and message.startswith(_OWNED_BY_OTHERS):
        return f"{message}; leave these fields out of the file, or take them: --force-conflicts"
    if error.is_conflict:
        return f"it was changed by somebody else meanwhile; try again ({message})"
    return message


async def apply(
    client: RestClient, manifest: JsonObject, namespace: str, *, force: bool
) -> JsonObject:
    """Create a TrainingRun, or change it to what the manifest says.

    Args:
      client: the API server's.
      manifest: the object.
      namespace: where the manifest names none.
      force: take over fields that somebody else has set, `ling suspend` and `resume` too.
    """
    metadata = {"namespace": namespace, **manifest["metadata"]}
    body = {**manifest, "metadata": metadata}
    body.pop("status", None)
    path = _object(metadata["namespace"], metadata["name"])
    return await client.apply(path, body, manager=_MANAGER, force=force)


async def get(client: RestClient, namespace: str, name: str) -> JsonObject:
    """Read one TrainingRun."""
    return await client.get(_object(namespace, name))


async def find_all(client: RestClient, namespace: str | None) -> tuple[list[JsonObject], str]:
    """Read the TrainingRuns of a namespace, or of all for None; and the list's version."""
    path = _collection(namespace)
    runs: list[JsonObject] = []
    page: dict[str, str] = {}
    while True:
        answer = await client.get(path, limit="500", **page)
        runs += answer["items"]
        token = answer["metadata"].get("continue")
        if not token:
            return runs, answer["metadata"]["resourceVersion"]
        page = {"continue": token}


async def watch(
    client: RestClient, namespace: str | None, version: str
) -> AsyncGenerator[tuple[JsonObject, bool]]:
    """Yield each changed TrainingRun and whether it is gone, until the watch has to be renewed.

    Raises:
      ApiError: the API server refuses, or cannot be reached.
    """
    events = client.watch(
        _collection(namespace), watch="true", allowWatchBookmarks="true", resourceVersion=version
    )
    try:
        async for event in events:
            if event["type"] in {"ADDED", "MODIFIED", "DELETED"}:
                yield event["object"], event["type"] == "DELETED"
            elif event["type"] == "ERROR":
                return
    except WatchIdleError:
        return


async def pods_of(client: RestClient, run: JsonObject) -> list[JsonObject]:
    """Read the pods of a run's JobSet, its own or the one it watches."""
    path = collection("v1", "pods", run["metadata"]["namespace"])
    found = await client.get(path, labelSelector=f"{JOB_SET_NAME_LABEL}={jobset_of(run)}")
    pods: list[JsonObject] = found["items"]
    return pods


def jobset_of(run: JsonObject) -> str:
    """Return the name of a run's JobSet."""
    watched: dict[str, Any] = run["spec"].get("watch") or {}
    return str(watched.get("jobSet") or run["metadata"]["name"])


async def suspend(client: RestClient, namespace: str, name: str) -> str:
    """Pause a run; return what was edited."""
    run = await get(client, namespace, name)
    if run["spec"].get("suspend"):
        return "spec.suspend is true already; nothing was changed"
    await _edit(client, run, {"suspend": True})
    return "spec.suspend: false -> true; pods write a checkpoint and leave"


async def resume(client: RestClient, namespace: str, name: str) -> str:
    """Let a run go on: un-suspend it, or raise spec.attempt where it has ended.

    Returns: What was edited.
    """
    run = await get(client, namespace, name)
    spec, phase = run["spec"], run.get("status", {}).get("phase", Phase.PENDING)
    edits: dict[str, Any] = {}
    said: list[str] = []
    if phase in ENDED:
        attempt = int(spec.get("attempt", 1))
        edits["attempt"] = attempt + 1
        said.append(f"spec.attempt: {attempt} -> {attempt + 1}, since the run is {phase}")
    if spec.get("suspend"):
        edits["suspend"] = False
        said.append("spec.suspend: true -> false")
    if not edits:
        return f"the run is {phase} and not suspended; nothing was changed"
    await _edit(client, run, edits)
    return "; ".join(said)


async def _edit(client: RestClient, run: JsonObject, spec: JsonObject) -> None:
    metadata = run["metadata"]
    # The version makes an edit of what has changed meanwhile fail instead of overruling it.
    precondition = {"resourceVersion": metadata["resourceVersion"]}
    path = _object(metadata["namespace"], metadata["name"])
    body = {"metadata": precondition, "spec": spec}
    await client.merge_patch(path, body, fieldManager=_MANAGER)


def _collection(namespace: str | None) -> str:
    return collection(f"{GROUP}/{VERSION}", PLURAL, namespace)


def _object(namespace: str, name: str) -> str:
    return f"{_collection(namespace)}/{name}"
