"""Parameters that exist already: of a run's checkpoint, or converted from Hugging Face."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from etils import epath
from jaxtyping import Float
from pydantic import ValidationError

from ling_trainer.checkpoint import committed_steps, read_record
from ling_trainer.convert import Place, places
from ling_trainer.ends import EndRun, ExitCode, end_run
from ling_trainer.model.hf_layout import bias_names
from ling_trainer.model_config import ModelConfig
from ling_trainer.parameter_store import Keys, ParameterReader, leaf_name, slice_checksum

STATE, RECORD = "state", "parameters.json"
ROUTER_BIAS: Keys = ("router_bias",)
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HfOrigin:
    """The Hugging Face checkpoint that parameters were converted from.

    Attributes:
      config: text of its config.json.
      dtype: type of most tensors; bfloat16 where they were quantised.
      other_dtypes: types of the others, by name.
    """

    config: str
    dtype: str
    other_dtypes: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRecord:
    """What lies beside converted arrays.

    Attributes:
      model: the architecture.
      checksums: of every array by name; see checksum.py.
      origin: where they come from.
    """

    model: ModelConfig
    checksums: Mapping[str, int]
    origin: HfOrigin | None

    def to_json(self) -> dict[str, Any]:
        """Return what is stored."""
        origin = self.origin and {
            "config": self.origin.config,
            "dtype": self.origin.dtype,
            "other_dtypes": dict(self.origin.other_dtypes),
        }
        return {
            "format": _FORMAT,
            "model": self.model.model_dump(mode="json"),
            "checksums": dict(self.checksums),
            "origin": origin,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Read what to_json returned.

        Raises:
          ValueError: it is something else, or of a newer format.
        """
        if record.get("format") != _FORMAT:
            raise ValueError(
                f"it has format {record.get('format')!r} and this version reads {_FORMAT}"
            )
        try:
            origin = record["origin"]
            return cls(
                model=ModelConfig.model_validate(record["model"]),
                checksums={str(k): int(v) for k, v in record["checksums"].items()},
                origin=None if origin is None else HfOrigin(**origin),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is damaged ({error!r})") from error


@dataclass(frozen=True)
class StoredParameters:
    """Parameters and router biases on disk.

    Attributes:
      where: for messages.
      model: the architecture.
      arrays: the store; paths are ("params", ...) and ("router_bias",).
      checksums: of every array by name.
      origin: the Hugging Face checkpoint that they were converted from.
    """

    where: str
    model: ModelConfig
    arrays: ParameterReader
    checksums: Mapping[str, int]
    origin: HfOrigin | None

    def tensors(self) -> Iterator[tuple[str, Float[np.ndarray, "..."]]]:
        """Yield Hugging Face's tensors, float32, with one layer's leaf in memory at a time.

        Raises:
          EndRun: an array is damaged (exit code 4), which shows after its last tensor.
        """
        path, total = ("params",), 0
        for place in places(self.model):
            if path != ("params", *place.path):
                self._check(path, total)
                path, total = ("params", *place.path), 0
            for part, start, value in self._pieces(path, place):
                total += slice_checksum(value, start=start)
                if part is None:
                    yield from place.leaf.write(value)
                else:
                    yield from place.leaf.write_part(value, part)
        self._check(path, total)
        biases = self.read(ROUTER_BIAS)
        self._check(ROUTER_BIAS, slice_checksum(biases, start=0))
        yield from zip(bias_names(self.model), biases, strict=True)

    def read(self, path: tuple[str | int, ...], index: tuple[Any, ...] = ()) -> np.ndarray:
        """Read array[index].

        Raises:
          EndRun: it is not there, or cannot be read (exit code 4).
        """
        try:
            return self.arrays.read(path, index)
        except (OSError, ValueError) as error:  # TensorStore raises these
            name = leaf_name(path)
            raise unusable(f"{self.where}: leaf {name} cannot be read: {error}") from error

    def _pieces(
        self, path: tuple[str | int, ...], place: Place
    ) -> Iterator[tuple[tuple[int, ...] | None, int, np.ndarray]]:
        """Yield (part, place of its first element, value): parts if they are stored apart."""
        leading = len(place.group) + len(place.leaf.parts[0])
        size = int(np.prod(place.leaf.shape))
        start = size * (place.group[0] if place.group else 0)
        if leading == len(place.group) or not self._slices(path, leading):
            yield None, start, self.read(path, place.group)
            return
        for part in place.leaf.parts:
            step = size // len(place.leaf.parts)
            yield part, start + step * part[0], self.read(path, (*place.group, *part))

    def _slices(self, path: tuple[str | int, ...], leading: int) -> bool:
        try:
            return self.arrays.slices(path, leading)
        except (OSError, ValueError):
            return False  # reading it says what is wrong

    def _check(self, path: tuple[str | int, ...], total: int) -> None:
        name = leaf_name(path)
        if path != ("params",) and self.checksums.get(name) != total % 2**32:
            raise unusable(f"{self.where}: leaf {name} is damaged (its checksum differs)")


def open_parameters(directory: str | epath.Path, *, step: int | None = None) -> StoredParameters:
    """Open what `ling-train convert hf-to-ling` made, or a run's checkpoint.

    Args:
      directory: converted parameters, a run's directory, its `checkpoints`, or one of those.
      step: of a run's checkpoint; None is the newest.

    Raises:
      EndRun: there is none, or its record is damaged (exit code 4); the storage failed (42).
    """
    directory = epath.Path(directory)
    if (directory / RECORD).exists():
        return _converted(directory)
    if (directory / "checkpoints").exists():
        directory = directory / "checkpoints"
    elif step is None and directory.name.isdecimal() and (directory / STATE).exists():
        directory, step = directory.parent, int(directory.name)
    steps = committed_steps(directory)
    if step is None and steps:
        step = steps[-1]
    if step not in steps or step is None:
        found = f"its steps are {steps}" if steps else "no complete checkpoint is there"
        wanted = "" if step is None else f" of step {step}"
        raise unusable(
            f"{directory}: there is no checkpoint{wanted} ({found}), and no {RECORD} of converted "
            "parameters; name the directory of a run or of a conversion"
        )
    where = directory / str(step)
    record = read_record(directory, step)
    fields = {k.removeprefix("model."): v for k, v in record.identity.items() if "model." in k}
    return StoredParameters(
        where=str(where),
        model=_model(fields, str(where)),
        arrays=ParameterReader(where / STATE),
        checksums=record.checksums,
        origin=None,
    )


def _converted(directory: epath.Path) -> StoredParameters:
    try:
        record = ParameterRecord.from_json(json.loads((directory / RECORD).read_text()))
    except (OSError, ValueError) as error:
        raise unusable(f"{directory / RECORD}: {error}; convert again") from error
    return StoredParameters(
        where=str(directory),
        model=record.model,
        arrays=ParameterReader(directory / STATE),
        checksums=record.checksums,
        origin=record.origin,
    )


def _model(fields: Mapping[str, Any], where: str) -> ModelConfig:
    try:
        return ModelConfig.model_validate(fields)
    except ValidationError as error:
        raise unusable(f"{where}: its architecture cannot be read: {error}") from error


def unusable(message: str) -> EndRun:
    """Build the end of a process whose parameters cannot be used."""
    return end_run(ExitCode.CHECKPOINT, "CheckpointUnusable", message)
