"""A stored TrainingRun, as far as this version of the operator can read it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError

from ling_operator.api import HealthPolicy, TrainingRun, WatchedJobSet, dump
from ling_trainer.schema import ConfigError

type Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunView:
    """A TrainingRun as read.

    Attributes:
      run: the object, with a placeholder for a spec that cannot be read; None if not even the
        status can, as after a downgrade: then nothing may be decided.
      problem: what cannot be read; None if all can.
    """

    run: TrainingRun | None
    problem: str | None = None

    @property
    def version(self) -> str | None:
        """The object's resourceVersion."""
        return self.run.metadata.resource_version if self.run is not None else None


def view_run(raw: Raw) -> RunView:
    """Read a TrainingRun as the API server returns it, whatever it holds.

    The CRD refuses what cannot be read, unless it is older or newer than this program. Such a
    spec still has a status, and its run may still have to be stopped.
    """
    # Who owns which field is as deep as the object, and nothing that is read here.
    metadata = {k: v for k, v in _map(raw, "metadata").items() if k != "managedFields"}
    raw = {**raw, "metadata": metadata}
    try:
        return RunView(TrainingRun.parse(raw))
    except ConfigError as error:
        problem = str(error)
    try:
        return RunView(TrainingRun.parse({**raw, "spec": _placeholder(raw)}), problem)
    except ConfigError as error:
        return RunView(None, str(error))


def _placeholder(raw: Raw) -> dict[str, Any]:
    """Return a spec that starts nothing, with what of the stored one acts on a live attempt."""
    spec, attempt = _map(raw, "spec"), _map(raw, "status").get("attempt")
    return {
        "image": "unreadable",
        **_readable_watch(spec),
        "attempt": attempt if isinstance(attempt, int) and attempt > 0 else 1,
        "suspend": spec.get("suspend") is True,
        "health": _readable_health(spec),
    }


def _readable_watch(spec: Raw) -> dict[str, Any]:
    """Return which JobSet is watched: the run's own name would be that of another one."""
    name = _map(spec, "watch").get("jobSet")
    try:
        return {"watch": dump(WatchedJobSet(job_set=name))} if isinstance(name, str) else {}
    except ValidationError:
        return {}


def _readable_health(spec: Raw) -> dict[str, Any]:
    """Return what the user wants done about divergence, if at least that can be read."""
    try:
        return dump(HealthPolicy.model_validate(spec.get("health", {}), strict=True))
    except ValidationError:
        return {}


def _map(raw: Raw, key: str) -> Raw:
    value = raw.get(key)
    return cast("Raw", value) if isinstance(value, Mapping) else {}
