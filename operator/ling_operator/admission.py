"""May this version of an object replace the stored one? The API server's rules, for local runs."""

import uuid

from ling_operator.api import TrainingRun, TrainingRunSpec, dump
from ling_operator.jobset import template_hash
from ling_trainer.schema import ConfigError

_FREE_FIELDS = frozenset({"suspend", "attempt", "health"})


def admit(new: TrainingRun, stored: TrainingRun | None) -> TrainingRun:
    """Accept a new version of an object under the API server's rules, with the stored status.

    Raises:
      ConfigError: another run lives here, attempt falls, or what an attempt runs is changed
        without raising it.
    """
    if stored is None:
        metadata = new.metadata.model_copy(update={"uid": str(uuid.uuid4())})
        return new.model_copy(update={"metadata": metadata})
    if stored.metadata.name != new.metadata.name:
        msg = (
            f"metadata.name={new.metadata.name}: run {stored.metadata.name} keeps its files in "
            "this directory; choose another spec.run.run_name"
        )
        raise ConfigError(msg)
    before, after = stored.spec, new.spec
    if after.attempt < before.attempt:
        msg = f"spec.attempt={after.attempt} is lower than {before.attempt}; it only rises"
        raise ConfigError(msg)
    started = stored.status.job_set_uid is not None
    changed = template_hash(before) != template_hash(after)
    if started and changed and after.attempt == before.attempt:
        msg = (
            f"{', '.join(_differences(before, after))}: fixed while attempt {before.attempt} is "
            f"the one that runs; undo the change, or set spec.attempt: {before.attempt + 1} "
            f"(--attempt {before.attempt + 1}) to run it"
        )
        raise ConfigError(msg)
    generation = stored.metadata.generation + int(before != after)
    metadata = stored.metadata.model_copy(update={"generation": generation})
    return new.model_copy(update={"metadata": metadata, "status": stored.status})


def _differences(before: TrainingRunSpec, after: TrainingRunSpec) -> list[str]:
    """Name the fields that differ, those of spec.run one level deeper."""
    old, new = dump(before), dump(after)
    names = [f"spec.{k}" for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]
    if "spec.run" in names:
        inner = sorted(before.run.keys() | after.run.keys())
        names.remove("spec.run")
        names += [f"spec.run.{k}" for k in inner if before.run.get(k) != after.run.get(k)]
    return [name for name in names if name.removeprefix("spec.") not in _FREE_FIELDS]
