"""How preset, file and overrides become one RunConfig. No JAX."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import yaml
from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from ling_trainer.config import RunConfig
from ling_trainer.presets import PRESETS, Settings
from ling_trainer.schema import ConfigError, Schema, field_paths, section_type

_BATCH_SIZES = ("global_batch_size", "per_device_batch_size")


def resolve(*layers: Mapping[str, Any]) -> RunConfig:
    """Merge settings, later layers over earlier ones and all of them over the preset they name.

    Args:
      layers: nested settings; keys in snake_case or camelCase, sections may be flattened by
        unique field name. `preset` (or its alias `model_name`) is taken from the last that has it.

    Returns: The validated configuration.

    Raises:
      ConfigError: an unknown key, a wrong type or a broken rule; one line for each, with the
        field, the value and the remedy.
    """
    normal = [_normalise(layer) for layer in layers]
    preset = next((n["preset"] for n in reversed(normal) if n.get("preset") is not None), None)
    merged: Settings = {}
    for layer in [preset_settings(preset), *normal]:
        merged = _merge(_without_batch_size(merged, layer), layer)
    try:
        return RunConfig.model_validate(merged, strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(describe(error, RunConfig))) from None


def merge(*layers: Mapping[str, Any]) -> Settings:
    """Merge settings, later layers over earlier ones, as sparse as they are; no preset is read."""
    merged: Settings = {}
    for layer in map(_normalise, layers):
        merged = _merge(_without_batch_size(merged, layer), layer)
    return merged


def preset_settings(name: object) -> Settings:
    """Return the settings of a preset; {} for None.

    Raises:
      ConfigError: no preset has this name.
    """
    if name is None:
        return {}
    if not isinstance(name, str) or name not in PRESETS:
        msg = f"preset={name!r} is not known; choose one of {', '.join(PRESETS)}"
        raise ConfigError(msg)
    return PRESETS[name]()


def parse_overrides(arguments: Iterable[str]) -> Settings:
    """Turn `key=value` arguments into nested settings; values are YAML scalars or flow YAML.

    Raises:
      ConfigError: an argument has no '=', its value is no YAML, or its key is unknown.
    """
    settings: Settings = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            msg = f"override {argument!r} has no '='; write key=value, for example steps=100"
            raise ConfigError(msg)
        settings = _merge(settings, _normalise({key: _scalar(key, text)}))
    return settings


def load_yaml(text: str, source: str) -> Settings:
    """Parse a YAML document of settings.

    Raises:
      ConfigError: it is no YAML, or no mapping.
    """
    try:
        loaded = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader with YAML 1.2 floats
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {error}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        msg = f"{source} holds a {type(loaded).__name__}; write a mapping of settings"
        raise ConfigError(msg)
    return cast("Settings", loaded)


def describe(error: ValidationError, schema: type[Schema]) -> list[str]:
    """Render each problem as 'field=value: rule', with a near name for an unknown key."""
    lines: list[str] = []
    for problem in error.errors(include_url=False):
        path = ".".join(_snake(schema, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            lines.append(_unknown(path, schema))
        elif problem["type"] == "missing":
            lines.append(f"{path} is not set; give it a value or choose a preset that has it")
        elif problem["type"] == "value_error":
            lines.append(f"{path}: {message}" if path else message)
        else:
            lines.append(f"{path}={problem['input']!r}: {message[:1].lower()}{message[1:]}")
    return lines


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 3e-4 as a number: YAML 1.2 does, PyYAML's 1.1 wants 3.0e-4."""


_Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _scalar(key: str, text: str) -> object:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - see _Loader
    except yaml.YAMLError:
        raise ConfigError(f"{key}={text!r}: the value is no YAML; quote it") from None


def _normalise(settings: Mapping[str, Any]) -> Settings:
    """Rename camelCase keys and model_name; move flattened and dotted keys to their section."""
    paths = field_paths(RunConfig)
    result: Settings = {}
    for key, value in settings.items():
        name = _field_name(RunConfig, "preset" if key in {"model_name", "modelName"} else key)
        path = name if name in RunConfig.model_fields or "." in name else None
        if path is None:
            found = {to: paths[to] for to in (name, _any_camel(name)) if to in paths}
            path = next(iter(found.values()), name)
        result = _merge(result, _nest(path.split("."), value, RunConfig))
    return result


def _nest(path: list[str], value: object, schema: type[Schema] | None) -> Settings:
    head = _field_name(schema, path[0]) if schema else path[0]
    field = schema.model_fields.get(head) if schema else None
    inner = section_type(field.annotation) if field else None
    if len(path) > 1:
        return {head: _nest(path[1:], value, inner)}
    if inner and isinstance(value, Mapping):
        merged: Settings = {}
        for key, item in cast("Mapping[str, object]", value).items():
            merged |= _nest([str(key)], item, inner)
        return {head: merged}
    return {head: value}


def _field_name(schema: type[Schema], key: str) -> str:
    return next((n for n, f in schema.model_fields.items() if key == f.alias), key)


def _any_camel(key: str) -> str:
    return next((name for name in field_paths(RunConfig) if to_camel(name) == key), key)


def _merge(base: Settings, over: Mapping[str, Any]) -> Settings:
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        nested = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = _merge(dict(old), value) if nested else value  # type: ignore[arg-type]
    return result


def _without_batch_size(base: Settings, over: Settings) -> Settings:
    """Drop the batch size of earlier layers where the next one chooses: one alone may be set."""
    layer: object = over.get("data")
    chosen = cast("Mapping[str, object]", layer if isinstance(layer, Mapping) else {})
    if all(chosen.get(name) is None for name in _BATCH_SIZES):
        return base
    data = {k: v for k, v in base.get("data", {}).items() if k not in _BATCH_SIZES}
    return {**base, "data": data}


def _snake(schema: type[Schema], location: tuple[int | str, ...]) -> list[str]:
    parts: list[str] = []
    current: type[Schema] | None = schema
    for item in location:
        name = _field_name(current, str(item)) if current else str(item)
        field = current.model_fields.get(name) if current else None
        current = section_type(field.annotation) if field else None
        parts.append(name)
    return parts


def _unknown(path: str, schema: type[Schema]) -> str:
    known = field_paths(schema)
    near = difflib.get_close_matches(path.rsplit(".", 1)[-1], known, n=1)
    hint = (
        f"did you mean {known[near[0]]}?" if near else "see `ling-train run --help` for the keys"
    )
    return f"{path} is not a setting; {hint}"
