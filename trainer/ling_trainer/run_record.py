"""What a checkpoint says about its run beside the arrays: its identity and data position."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ling_trainer.config import RunConfig
from ling_trainer.data.index_file import DataError
from ling_trainer.data.order import SampleOrder
from ling_trainer.model_config import ModelConfig

FORMAT = 1
_FREE_MODEL_FIELDS = frozenset(
    {"dtype", "chunk_size", "scan_layers", "remat_policy", "initializer_range"}
)
"""What may differ from the run's start: how to compute, not what."""
_DATA_FIELDS = (
    "dataset_type",
    "split",
    "data_shuffle_seed",
    "max_target_length",
    "rampup_batch_size",
    "add_extra_token_to_sequence",
    "mid_level_dataset_surplus",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The JSON part of a checkpoint.

    Attributes:
      attempt: of the TrainingRun that saved it; 0 outside of the operator.
      sample_order: how many samples each index of the data was built for.
      valid_order: likewise of the validation split; None while nothing has fixed it.
      identity: settings that the arrays and the data position depend on, by dotted name.
      checksums: of each leaf of the state, by name.
      data_content: what the data were made of, a line a dataset; None where it was not looked at.
      settings: the whole configuration of the process that saved it, for what reads checkpoints
        outside of a run; None in older ones.
    """

    attempt: int
    sample_order: SampleOrder
    identity: Mapping[str, Any]
    checksums: Mapping[str, int] = dataclasses.field(default_factory=dict)
    data_content: tuple[str, ...] | None = None
    settings: Mapping[str, Any] | None = None
    valid_order: SampleOrder | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what is stored."""
        return {
            "format": FORMAT,
            "attempt": self.attempt,
            "sample_order": self.sample_order.to_json(),
            "valid_order": None if self.valid_order is None else self.valid_order.to_json(),
            "identity": dict(self.identity),
            "checksums": dict(self.checksums),
            "data_content": None if self.data_content is None else list(self.data_content),
            "settings": None if self.settings is None else dict(self.settings),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Read what to_json returned.

        Raises:
          ValueError: it is something else, or of a newer format.
        """
        if record.get("format") != FORMAT:
            raise ValueError(
                f"its run record has format {record.get('format')!r} and this version reads "
                f"{FORMAT}; use the version that wrote it"
            )
        try:
            content, valid = record["data_content"], record.get("valid_order")
            return cls(
                attempt=int(record["attempt"]),
                sample_order=SampleOrder.from_json(record["sample_order"]),
                valid_order=None if valid is None else SampleOrder.from_json(valid),
                identity=dict(record["identity"]),
                checksums={str(k): int(v) for k, v in record["checksums"].items()},
                data_content=None if content is None else tuple(map(str, content)),
                settings=record.get("settings"),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its run record is damaged ({error!r})") from error


def architecture_of(model: ModelConfig) -> dict[str, Any]:
    """Return the settings that parameters have their shape and meaning from, by dotted name.

    Where null stands for another field's value, it is that value.
    """
    fields = model.model_dump(mode="json")
    fields["num_key_value_heads"] = model.key_value_heads
    shared = model.moe_shared_expert_intermediate_size or model.moe_intermediate_size
    fields["moe_shared_expert_intermediate_size"] = shared
    return {f"model.{k}": v for k, v in fields.items() if k not in _FREE_MODEL_FIELDS}


def identity_of(config: RunConfig, *, global_batch_size: int) -> dict[str, Any]:
    """Return the settings that every attempt of a run must share.

    The architecture, because the arrays have its shape and meaning; and what turns a step number
    into samples, because the data position is kept as a step. Paths are left out: data may move.
    """
    data = config.data.model_dump(mode="json")
    return (
        architecture_of(config.model)
        | {f"data.{name}": data[name] for name in _DATA_FIELDS}
        | {"data.global_batch_size": global_batch_size}
    )


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Name each setting that differs, with the checkpoint's value first."""
    return [
        f"{name} is {theirs.get(name)!r} in the checkpoint and {ours.get(name)!r} now"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


def check_data_content(ours: tuple[str, ...], theirs: tuple[str, ...] | None, where: str) -> None:
    """Check that the data are those of the checkpoint; they may have moved.

    Args:
      ours: content of the data that were opened.
      theirs: content in the checkpoint's record; None is not compared.
      where: path of the data.

    Raises:
      DataError: they are others, so that no sample would be the one it was.
    """
    if theirs is None or ours == theirs:
        return
    raise DataError(
        f"{where}: these are not the data of the checkpoint ({', '.join(ours)}; the checkpoint "
        f"has {', '.join(theirs)}); name the data that the run began with, or begin a new run "
        "under another run_name"
    )
