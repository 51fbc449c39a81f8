"""What the API server itself refuses of a TrainingRun, in CEL, beside what the schema says."""

import json
from typing import Any

from ling_operator.api import TrainingRunSpec
from ling_operator.name_budget import NAME_BUDGET_RULE
from ling_trainer.schema import Schema

type Node = dict[str, Any]

FIXED_FIELDS = (
    "image", "command", "args", "tpu", "cpu", "watch", "run", "queue", "restarts", "template"
)  # fmt: skip
"""Fields of spec that act only when an attempt starts."""

_NEXT_ATTEMPT = (
    "self.spec.attempt > oldSelf.spec.attempt || !has(oldSelf.status) || "
    "!has(oldSelf.status.jobSetUID)"
)


def spec_rules() -> list[Node]:
    """Return what must hold within spec."""
    return [
        _rule(
            "[has(self.tpu), has(self.cpu), has(self.watch)].filter(set, set).size() == 1",
            "set exactly one of spec.tpu, spec.cpu and spec.watch",
        ),
        _rule(
            "has(self.image) || has(self.watch)",
            "spec.image is required; name the trainer's container image",
        ),
        *(
            _rule(
                f"!has(self.watch) || {_untouched(TrainingRunSpec, field)}",
                f"spec.{field} belongs to the JobSet that spec.watch.jobSet names; remove it here",
            )
            for field in ("image", "command", "args", "run", "queue", "restarts", "template")
        ),
        _rule(
            "!has(self.watch) || !has(self.health) || !has(self.health.haltMode) || "
            "self.health.haltMode != 'Fail'",
            "spec.health.haltMode Fail would delete a JobSet that somebody else launched; "
            "use Suspend with spec.watch",
        ),
    ]


def _untouched(schema: type[Schema], field: str, path: str = "self") -> str:
    """Return CEL for: the field is not set, or holds no more than the defaults stored for it."""
    info = next(f for f in schema.model_fields.values() if f.alias == field)
    at = f"{path}.{field}"
    default = info.get_default(call_default_factory=True)
    if isinstance(default, Schema):
        members = (str(f.alias) for f in type(default).model_fields.values())
        rules = " && ".join(_untouched(type(default), name, at) for name in members)
        return f"(!has({at}) || ({rules}))"
    if isinstance(default, bool | int | float | str):
        value = json.dumps(default)
        return f"(!has({at}) || {at} == {value})"
    return f"!has({at})"


def root_rules() -> list[Node]:
    """Return what must hold of the whole object, and of an edit of it."""
    return [
        _rule(
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name becomes a host name: use lower-case letters, digits and '-', "
            "and begin with a letter",
        ),
        _rule(
            f"has(self.spec.watch) || {NAME_BUDGET_RULE}",
            "metadata.name is too long for the names of its pods, "
            "<name>-slice-job-<slice>-<host>-<5 characters>: 43 characters are left for up to "
            "10 slices of 10 hosts, one less for each further digit of either",
        ),
        _rule(
            "has(self.spec.watch) == has(oldSelf.spec.watch)",
            "spec.watch cannot be added to a run or taken from it; make another TrainingRun",
        ),
        _rule(
            "self.spec.attempt >= oldSelf.spec.attempt",
            "spec.attempt never falls; raise it to start again",
        ),
        *(
            _rule(
                f"{_same(f'spec.{field}')} || {_NEXT_ATTEMPT}",
                f"spec.{field} is fixed once an attempt has started; "
                "raise spec.attempt in the same edit to start a new one with it",
            )
            for field in FIXED_FIELDS
        ),
    ]


def _same(path: str) -> str:
    """Return CEL for: unchanged, whether it is there or not."""
    return (
        f"(has(self.{path}) ? has(oldSelf.{path}) && self.{path} == oldSelf.{path} "
        f": !has(oldSelf.{path}))"
    )


def _rule(rule: str, message: str) -> Node:
    return {"rule": rule, "message": message}
