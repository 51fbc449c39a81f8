"""Can this spec be run? The rules that a schema cannot hold, and what follows from the spec."""

import json
import re
from collections.abc import Callable
from typing import Any

from ling_operator.api import GROUP, TrainingRun, TrainingRunSpec
from ling_operator.name_budget import name_budget
from ling_operator.tpu import slice_shape
from ling_operator.views import TRAINER_CONTAINER
from ling_operator.workload import QUEUE_LABEL
from ling_trainer.config import HealthConfig
from ling_trainer.health_metrics import DEFAULT_PORT
from ling_trainer.schema import ConfigError
from ling_trainer.settings import resolve

XPK_LABEL = "xpk.google.com/workload"
RUN_CONFIG_LIMIT = 100 * 1024
"""Bytes of LING_RUN_CONFIG; Linux refuses an environment string of 128 KiB."""

_LAST_PORT = 65535
_TAKEN_PORTS = {
    8471: "the TPU runtime's",
    8476: "the coordination service's",
    8080: "the slices' coordinator's",
}
_OWN_PREFIXES = (f"{GROUP}/", "jobset.sigs.k8s.io/", "batch.kubernetes.io/")
_OWN_ENV = frozenset({
    "LING_RUN_CONFIG", "LING_RUN", "LING_RUN_NAMESPACE", "LING_ATTEMPT",
    "LING_RESTORE_BEFORE_STEP", "LING_COORDINATOR_ADDRESS", "LING_NUM_PROCESSES",
    "LING_HOSTS_PER_SLICE", "LING_SLICE_INDEX", "LING_HOST_INDEX", "LING_CONTAINER_INDEX",
    "LING_CONTAINERS_PER_HOST",
    "POD_UID", "POD_IP",
})  # fmt: skip


def require_runnable(run: TrainingRun) -> None:
    """Check all that the CRD's schema cannot.

    Raises:
      ConfigError: one line for each problem, with field, value and remedy.
    """
    spec, lines = run.spec, list[str]()
    if sum(kind is not None for kind in (spec.tpu, spec.cpu, spec.watch)) != 1:
        lines.append("spec: set exactly one of tpu, cpu and watch")
    elif spec.watch is None:
        for check in (_check_shape, _check_name):
            lines += _problems(check, run)
            if lines:
                break  # without a shape there is no name budget
    if spec.watch is not None:
        lines += _watch_problems(spec)
    else:
        if spec.image is None:
            lines.append("spec.image is not set; name the trainer's container image")
        lines += _problems(_check_run, run)
        lines += _template_problems(spec)
    if lines:
        raise ConfigError("\n".join(lines))


def jobset_name(run: TrainingRun) -> str:
    """Return the name of the run's JobSet: its own, or the one that it watches."""
    watch = run.spec.watch
    return watch.job_set if watch is not None else run.metadata.name


def num_hosts(spec: TrainingRunSpec) -> int:
    """Return the number of pods of an attempt: hosts of all slices, or CPU processes."""
    if spec.tpu is not None:
        return spec.tpu.slices * slice_shape(spec.tpu).hosts
    return spec.cpu.processes if spec.cpu is not None else 0


def trainer_containers(spec: TrainingRunSpec) -> tuple[str, ...]:
    """Return the names of the trainer's containers of a pod: XPK's."""
    count = spec.tpu.parallel_containers if spec.tpu is not None else 1
    if count == 1:
        return (TRAINER_CONTAINER,)
    return tuple(f"{TRAINER_CONTAINER}-{index + 1}" for index in range(count))


def run_settings(run: TrainingRun) -> dict[str, Any]:
    """Return the trainer's settings: the user's, with the object's name and health rules.

    They stay as sparse as the user wrote them: the preset's figures are the image's.
    """
    health = run.spec.health
    named = {"runName", "run_name"} & run.spec.run.keys()
    return {
        **({} if named else {"run_name": run.metadata.name}),
        **run.spec.run,
        "health": {
            "trainer_stops": health.trainer_stops and health.non_finite.action == "Halt",
            "non_finite_consecutive_steps": health.non_finite.consecutive_steps,
        },
    }


def run_config_json(run: TrainingRun) -> str:
    """Return LING_RUN_CONFIG. Kubernetes expands $(NAME) in values; $$ is a dollar there."""
    return json.dumps(run_settings(run), allow_nan=False).replace("$(", "$$(")


def metrics_port(run: TrainingRun) -> int:
    """Return the port of the trainer's metrics; of its first container, where it has several."""
    if not run.spec.run:
        return DEFAULT_PORT
    return resolve(run_settings(run)).metrics.metrics_port


def target_steps(run: TrainingRun) -> int | None:
    """Return the steps that the settings ask for; None where they are not ours to read."""
    if not run.spec.run:
        return None
    try:
        return resolve(run_settings(run)).steps
    except ConfigError:
        return None


def _problems(check: Callable[[TrainingRun], None], run: TrainingRun) -> list[str]:
    try:
        check(run)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _watch_problems(spec: TrainingRunSpec) -> list[str]:
    """Name what belongs to the JobSet's launcher."""
    blank = TrainingRunSpec()
    theirs = ("image", "command", "args", "run", "queue", "restarts", "template")
    lines = [
        f"spec.{field} belongs to the JobSet that spec.watch.jobSet names; remove it here"
        for field in theirs
        if getattr(spec, field) != getattr(blank, field)
    ]
    if spec.health.halt_mode == "Fail":
        lines.append(
            "spec.health.haltMode=Fail would delete a JobSet that somebody else launched; "
            "use Suspend with spec.watch"
        )
    return lines


def _check_shape(run: TrainingRun) -> None:
    if run.spec.tpu is None:
        return
    shape = slice_shape(run.spec.tpu)
    if run.spec.tpu.slices > 1 and shape.hosts == 1:
        msg = (
            f"spec.tpu.slices={run.spec.tpu.slices}: several slices need a topology of more than "
            f"one host, {shape.topology} has one; choose a larger topology or slices: 1"
        )
        raise ConfigError(msg)


def _check_name(run: TrainingRun) -> None:
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", run.metadata.name):
        msg = (
            f"metadata.name={run.metadata.name!r}: use lower-case letters, digits and '-', "
            "and begin with a letter; it becomes a host name"
        )
        raise ConfigError(msg)
    slices = run.spec.tpu.slices if run.spec.tpu is not None else 1
    hosts = num_hosts(run.spec) // slices
    budget = name_budget(slices=slices, hosts=hosts)
    if len(run.metadata.name) > budget:
        msg = (
            f"metadata.name has {len(run.metadata.name)} characters; with {slices} slices of "
            f"{hosts} hosts the pods' names leave {budget}: choose a shorter name"
        )
        raise ConfigError(msg)


def _check_run(run: TrainingRun) -> None:
    if not run.spec.run:
        if not run.spec.command:
            msg = "spec.run is empty; name a preset, such as preset: ling2_tiny"
            raise ConfigError(msg)
        return
    try:
        own = resolve({"run_name": run.metadata.name}, run.spec.run)
    except ConfigError as error:
        lines = (f"spec.run: {line}" for line in str(error).splitlines())
        raise ConfigError("\n".join(lines)) from None
    if own.health != HealthConfig():
        msg = (
            "spec.run.health is set by the operator; use spec.health.trainerStops and "
            "spec.health.nonFinite.consecutiveSteps"
        )
        raise ConfigError(msg)
    _check_port(own.metrics.metrics_port, containers=len(trainer_containers(run.spec)))
    size = len(run_config_json(run).encode())
    if size > RUN_CONFIG_LIMIT:
        msg = f"spec.run is {size} bytes as JSON, at most {RUN_CONFIG_LIMIT} fit; shorten it"
        raise ConfigError(msg)


def _check_port(port: int, *, containers: int) -> None:
    if port == 0:
        msg = "spec.run.metrics.metricsPort=0: the operator cannot find a port that is not fixed"
        raise ConfigError(msg)
    ports = range(port, port + containers)
    taken = [f"{at} is {whose}" for at, whose in _TAKEN_PORTS.items() if at in ports]
    if ports[-1] > _LAST_PORT or taken:
        why = taken[0] if taken else f"{containers} containers reach beyond {_LAST_PORT}"
        msg = f"spec.run.metrics.metricsPort={port}: {why}; leave it out, or choose another"
        raise ConfigError(msg)


def _template_problems(spec: TrainingRunSpec) -> list[str]:
    template = spec.template
    lines = [
        f"spec.template.env sets {name}, which the operator sets; remove it"
        for name in sorted(_OWN_ENV & {str(variable.get("name")) for variable in template.env})
    ]
    lines += [
        f"spec.template.{field} sets {key}, which is not yours to set; remove it"
        for field, keys in (("labels", template.labels), ("annotations", template.annotations))
        for key in sorted(keys)
        if key.startswith(_OWN_PREFIXES) or key in {XPK_LABEL, QUEUE_LABEL}
    ]
    if not isinstance(template.resources.get("limits", {}), dict):
        lines.append("spec.template.resources.limits is no mapping; write name: quantity")
    others = (*template.sidecars, *template.init_containers)
    taken = {"dshm": template.volumes} | dict.fromkeys(trainer_containers(spec), others)
    lines += [
        f"spec.template: the name {name} is taken by the operator; choose another"
        for name, items in taken.items()
        if any(item.get("name") == name for item in items)
    ]
    return lines
