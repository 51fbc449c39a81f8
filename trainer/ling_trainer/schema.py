"""The base of every configuration class, and how its fields are found. No JAX."""

import functools
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

type PositiveInt = Annotated[int, Field(ge=1)]
type Count = Annotated[int, Field(ge=0)]
type NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
type Fraction = Annotated[float, Field(ge=0, lt=1)]
type Rules = Iterable[tuple[bool, str]]  # (holds, message)


class ConfigError(ValueError):
    """A setting is wrong; each line of the message names the field, the value and the rule."""


class Schema(BaseModel):
    """Frozen, hashable, closed: an unknown key is an error, not a typo that trains for a week.

    Python and YAML are snake_case, the CRD is camelCase; both are accepted as input.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


def require(rules: Rules) -> None:
    """Raise ValueError with the message of every (holds, message) rule that does not hold."""
    broken = [message for holds, message in rules if not holds]
    if broken:
        raise ValueError("; ".join(broken))


def section_type(annotation: object) -> type[Schema] | None:
    """Return the Schema class behind a field's annotation, or None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Schema):
        return annotation
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        found = [section_type(a) for a in typing.get_args(annotation)]
        return next((f for f in found if f is not None), None)
    return None


@functools.cache
def field_paths(schema: type[Schema], prefix: str = "") -> Mapping[str, str]:
    """Map each unique field name to its dotted path: {'steps': 'steps', 'dtype': 'model.dtype'}.

    Raises:
      ValueError: two sections have a field of the same name.
    """
    paths: dict[str, str] = {}
    for name, field in schema.model_fields.items():
        section = section_type(field.annotation)
        inner = field_paths(section, f"{prefix}{name}.") if section else {name: f"{prefix}{name}"}
        for key, path in inner.items():
            if key in paths:
                msg = f"field name {key!r} is at {paths[key]} and {path}; names must be unique"
                raise ValueError(msg)
            paths[key] = path
    return types.MappingProxyType(paths)
