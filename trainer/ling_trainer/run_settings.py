"""Where the settings of a command come from: files, the environment, overrides. No JAX."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from ling_trainer.config import RunConfig
from ling_trainer.presets import PRESETS, Settings
from ling_trainer.schema import ConfigError, Schema, section_type
from ling_trainer.settings import load_yaml, parse_overrides, resolve

RUN_CONFIG = "LING_RUN_CONFIG"
HELP = f"""\
Settings come from a preset, then FILE, then key=value arguments; later ones win.
FILE is YAML. In its place the environment variable {RUN_CONFIG} may hold the settings as JSON.
A key is a field's name, alone (steps=100) or with its section (loss.mtp_roll=plain).
"""


def load_config(arguments: Sequence[str], environ: Mapping[str, str]) -> RunConfig:
    """Resolve preset < FILE or LING_RUN_CONFIG < key=value arguments.

    Args:
      arguments: at most one FILE, which has no '=', and overrides.
      environ: may hold LING_RUN_CONFIG, then no FILE is taken.

    Raises:
      ConfigError: every problem, one a line.
    """
    files = files_of(arguments)
    overrides = parse_overrides(argument for argument in arguments if "=" in argument)
    text = environ.get(RUN_CONFIG)
    if len(files) > 1 or (files and text is not None):
        other = RUN_CONFIG if text is not None else files[1]
        raise ConfigError(f"settings come from {files[0]} and from {other}; name one of them")
    if text is not None:
        return resolve(_json(text), overrides)
    if files:
        return resolve(load_yaml(_read(Path(files[0])), files[0]), overrides)
    return resolve(overrides)


def files_of(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that name files: those without '='."""
    return [argument for argument in arguments if "=" not in argument]


def settings_help() -> str:
    """List every setting with its type, default and meaning."""
    lines = [f"presets: {', '.join(PRESETS)}", "", "settings:"]
    return "\n".join(lines + _setting_lines(RunConfig, ""))


def _setting_lines(schema: type[Schema], prefix: str) -> list[str]:
    lines: list[str] = []
    for name, field in schema.model_fields.items():
        section = section_type(field.annotation)
        if section:
            lines += ["", f"  {name}: {(section.__doc__ or '').strip().splitlines()[0]}"]
            lines += _setting_lines(section, f"{prefix}{name}.")
            continue
        default = "" if field.is_required() else f" = {json.dumps(field.default)}"
        lines.append(f"  {prefix}{name}{default}")
        if field.description:
            lines += [f"      {line.strip()}" for line in field.description.splitlines()]
    return lines


def _json(text: str) -> Settings:
    try:
        loaded = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{RUN_CONFIG} is not JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{RUN_CONFIG} holds a {type(loaded).__name__}; write an object")
    return loaded


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; name a YAML file of settings"
        ) from None
