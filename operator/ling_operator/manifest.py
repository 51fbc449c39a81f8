"""A TrainingRun from a YAML file and key=value settings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ling_operator.api import API_VERSION, KIND, TrainingRun
from ling_operator.runnable import require_runnable
from ling_trainer.schema import ConfigError
from ling_trainer.settings import load_yaml, merge, parse_overrides

type JsonObject = dict[str, Any]


def load_manifest(path: Path, overrides: Sequence[str], *, attempt: int | None) -> JsonObject:
    """Read the one TrainingRun of a file, and change it as the command line says.

    Args:
      path: YAML file; documents of other kinds in it are refused.
      overrides: `key=value` settings of the trainer, which win over spec.run.
      attempt: replaces spec.attempt; None leaves it.

    Raises:
      ConfigError: the file is not readable, no YAML, or no TrainingRun that can be run.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path} cannot be read: {error}"
        raise ConfigError(msg) from None
    manifest = load_yaml(text, str(path))
    kind = manifest.get("kind"), manifest.get("apiVersion")
    if kind != (KIND, API_VERSION):
        msg = f"{path} holds kind {kind[0]} of {kind[1]}; write kind {KIND} of {API_VERSION}"
        raise ConfigError(msg)
    spec = dict(manifest.get("spec") or {})
    if overrides:
        spec["run"] = merge(spec.get("run") or {}, parse_overrides(overrides))
    if attempt is not None:
        spec["attempt"] = attempt
    manifest = {**manifest, "spec": spec}
    require_runnable(TrainingRun.parse(manifest))
    return manifest


def dump_yaml(value: object) -> str:
    """Write an object as people read it: block style, in the order it came."""
    return yaml.safe_dump(value, sort_keys=False, default_flow_style=False, allow_unicode=True)
