"""Checkpoints by Orbax: asynchronous, verified, each with the record of its run."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from ling_trainer.checkpoint_failure import OLDER, failure, unusable
from ling_trainer.checksum import leaf_checksums, leaf_name, leaf_names
from ling_trainer.config import CheckpointConfig
from ling_trainer.ends import EndRun
from ling_trainer.run_record import RunRecord, differences

_STATE, _RECORD = "state", "run"
_RECORD_FILE = f"{_RECORD}/metadata"  # where Orbax's JsonSave puts it
_COMMITTED = "commit_success.txt"


class _HasStep(Protocol):
    step: int


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest `keep`, and one at least `protect_steps` older.

    A run that is halted for what happened some steps ago must find a state from before. So that
    there always is one, the oldest checkpoint that is not yet old enough stays as well: with the
    time it takes the other's place. At most keep + 2 checkpoints exist, and the old one is
    never older than 2 * protect_steps plus the period.
    """

    keep: int
    protect_steps: int

    def kept(self, steps: Iterable[int]) -> set[int]:
        """Return the steps that stay."""
        ordered = sorted(steps)
        if not ordered:
            return set()
        limit = ordered[-1] - self.protect_steps
        old = [step for step in ordered if step <= limit]
        young = [step for step in ordered if step > limit]
        return {*ordered[-self.keep :], *old[-1:], *young[:1]}

    def should_preserve(self, checkpoints: Sequence[_HasStep], *, context: object) -> list[bool]:
        """Answer Orbax (its PreservationPolicy protocol)."""
        del context
        kept = self.kept(info.step for info in checkpoints)
        return [info.step in kept for info in checkpoints]


def checkpoint_directory(base_output_directory: str, run_name: str) -> epath.Path:
    """Return where a run's checkpoints lie."""
    return epath.Path(base_output_directory).absolute() / run_name / "checkpoints"


def committed_steps(directory: epath.Path) -> list[int]:
    """List the steps whose checkpoint is complete, in order. Reads the directory, no JAX needed.

    Raises:
      EndRun: the storage does not answer (42), or refuses (4).
    """
    try:
        if not directory.exists():
            return []
        return sorted(
            int(entry.name)
            for entry in directory.iterdir()
            if entry.name.isdecimal() and (entry / _COMMITTED).exists()
        )
    except OSError as error:
        raise failure(error, f"cannot list {directory}") from error


def newest_checkpoint(directory: epath.Path, *, before: int | None, attempt: int) -> int | None:
    """Choose the checkpoint to restore: the newest, or the newest before a bad step.

    Those that this attempt saved itself count in any case: its restarts go on from them.

    Args:
      directory: from checkpoint_directory.
      before: first step that is not trusted, or None.
      attempt: of this process.

    Raises:
      EndRun: as committed_steps and read_record do.
    """
    for step in reversed(committed_steps(directory)):
        if before is None or step < before or read_record(directory, step).attempt >= attempt:
            return step
    return None


def read_record(directory: epath.Path, step: int) -> RunRecord:
    """Read a checkpoint's run record; no JAX needed.

    Raises:
      EndRun: it is missing or damaged (exit code 4), or the storage failed (42).
    """
    try:
        return RunRecord.from_json(json.loads((directory / str(step) / _RECORD_FILE).read_text()))
    except (OSError, ValueError) as error:
        raise failure(error, _where(directory, step)) from error


def check_identity(
    directory: epath.Path, step: int, *, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> None:
    """Check that a checkpoint is of this model and batch (see run_record.identity_of).

    Raises:
      EndRun: it is not (exit code 4); the message names each setting.
    """
    if wrong := differences(ours, theirs):
        raise unusable(
            f"{_where(directory, step)}: {'; '.join(wrong)}; restore the setting, or choose "
            "another run_name"
        )


class Checkpoints:
    """The checkpoints of one run. Every process of it makes the same calls."""

    def __init__(self, directory: epath.Path, config: CheckpointConfig) -> None:
        """Open the directory, make it if need be, and remove what an interrupted save left."""
        self._directory = directory
        options = ocp.CheckpointManagerOptions(
            preservation_policy=Retention(
                config.max_num_checkpoints_to_keep, config.protect_steps
            ),
            enable_async_checkpointing=config.async_checkpointing,
            cleanup_tmp_directories=True,
        )
        try:
            handlers = {
                _STATE: ocp.StandardCheckpointHandler(),
                _RECORD: ocp.JsonCheckpointHandler(),
            }
            self._manager = ocp.CheckpointManager(
                directory, options=options, item_handlers=handlers
            )
        except (OSError, ValueError) as error:
            raise failure(error, f"cannot open {directory}") from error
        self._committed = max(committed_steps(directory), default=0)
        self._pending: int | None = None

    @property
    def newest_committed(self) -> int:
        """Step of the newest complete checkpoint; 0 while there is none."""
        if self._pending is not None and not self._manager.is_saving_in_progress():
            self.wait()
        return self._committed

    def discard_after(self, step: int) -> list[int]:
        """Delete every checkpoint later than step, and return their steps."""
        later = [found for found in committed_steps(self._directory) if found > step]
        for found in later:
            self._manager.delete(found)
        self._committed = min(self._committed, step)
        return later

    def restore[State](self, step: int, like: State) -> State:
        """Read a checkpoint's state, and check that it is undamaged.

        Args:
          step: of the checkpoint.
          like: the state's jax.ShapeDtypeStructs, with the shardings to restore to.

        Raises:
          EndRun: structure or a leaf's shape differ, or data is damaged (exit code 4); the storage
            failed (42).
        """
        where = _where(self._directory, step)
        record = read_record(self._directory, step)
        try:
            self._check_structure(step, like)
            restored = self._manager.restore(
                step, args=ocp.args.Composite(**{_STATE: ocp.args.StandardRestore(like)})
            )
        except EndRun:
            raise
        except Exception as error:  # Orbax raises its own errors as bare Exception
            raise failure(error, where) from error
        state: State = restored[_STATE]
        for leaf, checksum in _named_checksums(state).items():
            if record.checksums.get(leaf) != checksum:
                raise unusable(f"{where}: leaf {leaf} is damaged (its checksum differs); {OLDER}")
        return state

    def save(self, step: int, state: Any, record: RunRecord) -> None:
        """Save in the background; the state may be donated once this returns.

        An earlier save is awaited first.

        Raises:
          EndRun: an earlier save failed, or this one at once (exit code 42, or 4 where no restart
            helps).
        """
        self.wait()
        record = replace(record, checksums=_named_checksums(state))
        args = {
            _STATE: ocp.args.StandardSave(state),
            _RECORD: ocp.args.JsonSave(record.to_json()),
        }
        try:
            self._manager.save(step, args=ocp.args.Composite(**args), force=True)
        except Exception as error:
            raise failure(error, _where(self._directory, step)) from error
        self._pending = step

    def wait(self) -> None:
        """Wait until the last save is complete.

        Raises:
          EndRun: it failed (exit code 42, or 4 where no restart helps).
        """
        if self._pending is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise failure(error, _where(self._directory, self._pending)) from error
        self._committed, self._pending = self._pending, None

    def _check_structure(self, step: int, like: Any) -> None:
        """Compare names, shapes and types with what is stored, before reading any array."""
        stored = self._manager.item_metadata(step)[_STATE]
        theirs = _shapes(stored.tree)
        ours = _shapes(like)
        # Parameters first: the optimizer's moments only repeat what is wrong with them.
        names = sorted(ours.keys() | theirs.keys(), key=lambda n: (not n.startswith("params."), n))
        for leaf in names:
            if ours.get(leaf) != theirs.get(leaf):
                there, here = theirs.get(leaf, "missing"), ours.get(leaf, "missing")
                raise unusable(
                    f"{_where(self._directory, step)}: leaf {leaf} is {there} there and {here} in "
                    "this run; use the configuration that wrote it, or choose another run_name"
                )


def _where(directory: epath.Path, step: int) -> str:
    return f"checkpoint of step {step} at {directory / str(step)}"


def _named_checksums(state: Any) -> dict[str, int]:
    first = jax.tree.leaves(state)[0].sharding
    replicated = (
        NamedSharding(first.mesh, PartitionSpec()) if isinstance(first, NamedSharding) else None
    )
    sums = np.asarray(jax.device_get(leaf_checksums(state, replicated)))
    return dict(zip(leaf_names(state), sums.tolist(), strict=True))


def _shapes(tree: Any) -> dict[str, str]:
    return {
        leaf_name(path): f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if hasattr(leaf, "shape")
    }
