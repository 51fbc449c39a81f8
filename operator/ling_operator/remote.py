"""What the command line does with TrainingRuns of a cluster: one request or two, no watching."""

from typing import Any

from ling_operator.api import ENDED, GROUP, PLURAL, RUN_LABEL, VERSION, Phase
from ling_operator.caches import collection
from ling_operator.rest import JsonObject, RestClient
from ling_operator.views import TRAINER_CONTAINER, PodView, view_pod

_MANAGER = "ling"


class NothingThereError(Exception):
    """There is nothing to show."""


async def apply(client: RestClient, manifest: JsonObject, namespace: str) -> JsonObject:
    """Create a TrainingRun, or change it to what the manifest says."""
    metadata = {"namespace": namespace, **manifest["metadata"]}
    body = {**manifest, "metadata": metadata}
    body.pop("status", None)
    path = _object(metadata["namespace"], metadata["name"])
    return await client.apply(path, body, manager=_MANAGER)


async def get(client: RestClient, namespace: str, name: str) -> JsonObject:
    """Read one TrainingRun."""
    return await client.get(_object(namespace, name))


async def find_all(client: RestClient, namespace: str | None) -> list[JsonObject]:
    """Read the TrainingRuns of a namespace, or of all for None."""
    path = collection(f"{GROUP}/{VERSION}", PLURAL, namespace)
    runs: list[JsonObject] = []
    page: dict[str, str] = {}
    while True:
        answer = await client.get(path, limit="500", **page)
        runs += answer["items"]
        token = answer["metadata"].get("continue")
        if not token:
            return runs
        page = {"continue": token}


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


async def log(
    client: RestClient, namespace: str, name: str, *, process: int, tail: int | None
) -> str:
    """Return the output of a process of the newest restart of the newest attempt.

    Raises:
      NothingThereError: the run has no such pod.
    """
    path = collection("v1", "pods", namespace)
    found = await client.get(path, labelSelector=f"{RUN_LABEL}={name}")
    pods = sorted((view_pod(item) for item in found["items"]), key=_place)
    if not pods:
        msg = f"{namespace}/{name} has no pods"
        raise NothingThereError(msg)
    newest = [pod for pod in pods if _age(pod) == max(map(_age, pods))]
    if process >= len(newest):
        msg = f"{namespace}/{name} has {len(newest)} processes; there is no process {process}"
        raise NothingThereError(msg)
    lines = {"tailLines": str(tail)} if tail is not None else {}
    pod_path = f"{path}/{newest[process].name}/log"
    return await client.text(pod_path, container=TRAINER_CONTAINER, **lines)


async def _edit(client: RestClient, run: JsonObject, spec: JsonObject) -> None:
    metadata = run["metadata"]
    # The version makes an edit of what has changed meanwhile fail instead of overruling it.
    precondition = {"resourceVersion": metadata["resourceVersion"]}
    path = _object(metadata["namespace"], metadata["name"])
    await client.merge_patch(path, {"metadata": precondition, "spec": spec})


def _object(namespace: str, name: str) -> str:
    return f"{collection(f'{GROUP}/{VERSION}', PLURAL, namespace)}/{name}"


def _place(pod: PodView) -> tuple[int, int]:
    return pod.job_index, pod.completion_index


def _age(pod: PodView) -> tuple[int, int]:
    return pod.attempt, pod.restart_attempt
