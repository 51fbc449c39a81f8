"""Everything about a run that is worth a look after something went wrong, in one archive.

Bounded, without secrets as far as names tell them, and complete about what it lacks: a part that
cannot be had is named in summary.txt and stops nothing.
"""

import asyncio
import io
import json
import tarfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ling_operator import remote
from ling_operator.caches import JOBSET_GROUP, collection
from ling_operator.listing import attempts_of, columns, row_of, table
from ling_operator.manifest import dump_yaml
from ling_operator.pod_logs import log_path
from ling_operator.redaction import hide, redact
from ling_operator.rest import ApiError, JsonObject, RestClient
from ling_operator.views import JOB_SET_NAME_LABEL, view_pod
from ling_operator.workload import KUEUE_GROUP

LOG_LINES = 5000
LOG_BYTES = 2 * 1024 * 1024
MOST_PODS = 256
_PART_SECONDS = 20.0
_AT_ONCE = 8
_FILE_MODE = 0o600

type Read = Callable[[], Awaitable[str]]


@dataclass(slots=True)
class Bundle:
    """Files by name, and what could not be had.

    Attributes:
      name: of the archive's folder.
    """

    name: str
    files: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[str] = field(default_factory=list[str])
    secrets: set[str] = field(default_factory=set[str])

    def add(self, name: str, value: object) -> None:
        """Add an object, without what its names say are secrets."""
        clean, secrets = redact(value)
        self.files[name] = dump_yaml(clean)
        self.secrets |= secrets

    async def read(self, name: str, read: Read) -> None:
        """Add a text, or the reason why there is none."""
        try:
            async with asyncio.timeout(_PART_SECONDS):
                text = await read()
        except TimeoutError:
            self.problems.append(f"{name}: no answer within {_PART_SECONDS:g} s")
        except ApiError as error:
            self.problems.append(f"{name}: {remote.explain(error)}")
        else:
            self.files[name] = text

    def write(self, path: Path, when: datetime) -> None:
        """Write an archive (.tar.gz, .tgz), or a folder for any other name.

        Raises:
          OSError: it cannot be made, or exists.
        """
        texts = {name: hide(text, self.secrets).encode() for name, text in self.files.items()}
        if path.name.endswith((".tar.gz", ".tgz")):
            path.touch(mode=_FILE_MODE, exist_ok=False)
            with tarfile.open(path, "w:gz") as archive:
                for name, content in sorted(texts.items()):
                    entry = tarfile.TarInfo(f"{self.name}/{name}")
                    entry.size, entry.mode = len(content), _FILE_MODE
                    entry.mtime = int(when.timestamp())
                    archive.addfile(entry, io.BytesIO(content))
            return
        path.mkdir(mode=0o700)
        for name, content in texts.items():
            file = path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=_FILE_MODE)
            file.write_bytes(content)


async def gather(client: RestClient, namespace: str, name: str, now: datetime) -> Bundle:
    """Collect what the cluster has of a run.

    Raises:
      ApiError: the run itself cannot be read.
    """
    run = await remote.get(client, namespace, name)
    bundle = Bundle(f"{name}-debug-{now:%Y%m%dT%H%M%SZ}")
    bundle.add("trainingrun.yaml", run)
    jobset = remote.jobset_of(run)
    label = {"labelSelector": f"{JOB_SET_NAME_LABEL}={jobset}"}
    jobsets = collection(JOBSET_GROUP, "jobsets", namespace)
    made = await _object(bundle, "jobset.yaml", client.get(f"{jobsets}/{jobset}"))
    pods = await _items(bundle, "pods", client.get(collection("v1", "pods", namespace), **label))
    jobs = collection("batch/v1", "jobs", namespace)
    await _items(bundle, "jobs", client.get(jobs, **label))
    await _workload(bundle, client, namespace, made)
    names = {name, jobset, *(item["metadata"]["name"] for item in pods)}
    await _events(bundle, client, namespace, names)
    _settings(bundle, made)
    _last_words(bundle, run, pods)
    await _outputs(bundle, client, namespace, pods)
    bundle.files["summary.txt"] = _summary(bundle, run, now)
    return bundle


async def _object(bundle: Bundle, name: str, request: Awaitable[JsonObject]) -> JsonObject | None:
    try:
        async with asyncio.timeout(_PART_SECONDS):
            found = await request
    except TimeoutError:
        bundle.problems.append(f"{name}: no answer within {_PART_SECONDS:g} s")
        return None
    except ApiError as error:
        bundle.problems.append(f"{name}: {remote.explain(error)}")
        return None
    bundle.add(name, found)
    return found


async def _items(bundle: Bundle, kind: str, request: Awaitable[JsonObject]) -> list[JsonObject]:
    found = await _object(bundle, f"{kind}.yaml", request)
    items: list[JsonObject] = found["items"] if found is not None else []
    if found is not None and not items:
        bundle.problems.append(f"{kind}.yaml: there are no {kind} any more")
    return items


async def _workload(
    bundle: Bundle, client: RestClient, namespace: str, jobset: JsonObject | None
) -> None:
    """Add Kueue's Workload of the JobSet; a cluster without Kueue has none."""
    try:
        group = await client.get(f"/apis/{KUEUE_GROUP}")
        version = str(group["preferredVersion"]["groupVersion"])
        found = await client.get(collection(version, "workloads", namespace))
    except ApiError as error:
        said = "Kueue is not installed" if error.is_not_found else remote.explain(error)
        bundle.problems.append(f"workload.yaml: {said}")
        return
    uid = jobset["metadata"]["uid"] if jobset is not None else None
    for item in found["items"]:
        owners = item["metadata"].get("ownerReferences", [])
        if any(owner["uid"] == uid for owner in owners):
            bundle.add("workload.yaml", item)
            return
    bundle.problems.append("workload.yaml: the JobSet has none")


async def _events(bundle: Bundle, client: RestClient, namespace: str, names: set[str]) -> None:
    """Add a line for each event of the run and what belongs to it, the oldest first."""

    async def read() -> str:
        found = await client.get(collection("v1", "events", namespace))
        lines = [
            (
                str(event.get("lastTimestamp") or event.get("eventTime") or ""),
                f"{event['type']:8} {event['involvedObject']['kind']}/"
                f"{event['involvedObject']['name']}: {event['reason']}: {event['message']}",
            )
            for event in found["items"]
            if _belongs(event["involvedObject"].get("name", ""), names)
        ]
        return "".join(f"{when:28} {line}\n" for when, line in sorted(lines)) or "none\n"

    await bundle.read("events.txt", read)


def _belongs(name: str, names: set[str]) -> bool:
    return name in names or any(name.startswith(f"{each}-") for each in names)


def _settings(bundle: Bundle, jobset: JsonObject | None) -> None:
    """Add the trainer's settings, as its processes got them."""
    text = _environment(jobset).get("LING_RUN_CONFIG") if jobset is not None else None
    try:
        bundle.add("config.yaml", json.loads(text or ""))
    except ValueError:
        bundle.problems.append("config.yaml: the JobSet has no LING_RUN_CONFIG")


def _environment(jobset: JsonObject) -> dict[str, str]:
    template: Any = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    variables: list[JsonObject] = template["spec"]["containers"][0].get("env", [])
    return {each["name"]: each.get("value", "") for each in variables}


def _last_words(bundle: Bundle, run: JsonObject, pods: list[JsonObject]) -> None:
    """Add what containers said when they ended, and what the status has kept of others."""
    lines: list[str] = []
    for pod in pods:
        status = pod.get("status", {})
        for container in status.get("initContainerStatuses", []) + status.get(
            "containerStatuses", []
        ):
            for when in ("state", "lastState"):
                end = container.get(when, {}).get("terminated")
                if end is not None:
                    lines.append(
                        f"{pod['metadata']['name']} {container['name']}: exit code "
                        f"{end['exitCode']}, {end.get('reason', '')}, {end.get('finishedAt', '')}"
                        f"\n    {end.get('message', '(no message)')}"
                    )
    kept = [a["evidence"] for a in run.get("status", {}).get("attempts", []) if a.get("evidence")]
    if kept:
        lines.append(f"kept in the status:\n{dump_yaml(kept)}")
    bundle.files["last-words.txt"] = "\n".join(lines) + "\n" if lines else "nobody has ended\n"


async def _outputs(
    bundle: Bundle, client: RestClient, namespace: str, pods: list[JsonObject]
) -> None:
    """Add every container's output and, while it can be read, every pod's page of metrics."""
    if len(pods) > MOST_PODS:
        bundle.problems.append(f"logs: of {len(pods)} pods only the first {MOST_PODS}")
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(name: str, read: Read) -> None:
        async with gate:
            await bundle.read(name, read)

    limits = {"tailLines": str(LOG_LINES), "limitBytes": str(LOG_BYTES)}
    work: list[Awaitable[None]] = []
    for item in sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))[:MOST_PODS]:
        pod = view_pod(item)
        spec = item["spec"]
        for container in spec.get("initContainers", []) + spec["containers"]:
            query = {"container": str(container["name"]), **limits}
            path = log_path(namespace, pod.name)
            file = f"logs/{pod.name}/{container['name']}.log"
            work.append(one(file, lambda path=path, query=query: client.text(path, **query)))
        file = f"metrics/{pod.name}.txt"
        if pod.phase == "Running" and pod.metrics_port:
            pods_path = collection("v1", "pods", namespace)
            page = f"{pods_path}/{pod.name}:{pod.metrics_port}/proxy/metrics"
            work.append(one(file, lambda page=page: client.text(page)))
        else:
            bundle.problems.append(f"{file}: the pod does not run")
    await asyncio.gather(*work)


def _summary(bundle: Bundle, run: JsonObject, now: datetime) -> str:
    """Say where the run is, and what the bundle lacks."""
    shown = columns(wide=True, namespaces=True)
    cells = zip(shown, row_of(run, shown, now), strict=True)
    status: dict[str, Any] = run.get("status", {})
    lines = [f"{column.title.lower():12} {cell}" for column, cell in cells]
    lines += ["", *table(attempts_of(run, now))]
    if status.get("halt"):
        lines += ["", "halt", dump_yaml(status["halt"])]
    lines += ["", f"Made at {now.isoformat(timespec='seconds')}."]
    lines += [
        "Values whose names say token, secret, password, key and the like are left out, and so",
        "are these values wherever else they stand. Logs may still hold what no name tells.",
    ]
    lines += ["", "Not in here:" if bundle.problems else "Nothing is missing."]
    lines += [f"- {problem}" for problem in sorted(bundle.problems)]
    return "\n".join(lines) + "\n"
