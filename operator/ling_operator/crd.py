"""api.py -> CustomResourceDefinition: structural schema, CEL rules, printer columns.

`python -m ling_operator.crd` writes it; a test compares the file with what the classes say.
"""

import argparse
from pathlib import Path
from typing import Any

import yaml

from ling_operator.api import (
    GROUP,
    KIND,
    PLURAL,
    RUN_SCHEMA,
    SHORT_NAME,
    SINGULAR,
    VERSION,
    TrainingRun,
    TrainingRunSpec,
    TrainingRunStatus,
)
from ling_operator.crd_rules import root_rules, spec_rules
from ling_trainer.schema import Schema

type Node = dict[str, Any]

CRD_PATH = Path("manifests/crd/trainingruns.yaml")
_PRESERVE = "x-kubernetes-preserve-unknown-fields"
_KEPT = (
    "type",
    "description",
    "enum",
    "format",
    "pattern",
    "minimum",
    "maximum",
    "multipleOf",
    "minLength",
    "maxLength",
)
_MAP_KEYS = {"conditions": "type", "attempts": "attempt"}


def build_crd() -> Node:
    """Build the CustomResourceDefinition."""
    version: Node = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": _printer_columns(),
        "schema": {"openAPIV3Schema": _root_schema()},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
            },
            "versions": [version],
        },
    }


def render_crd() -> str:
    """Return the manifest as it is kept in manifests/crd."""
    body = yaml.safe_dump(build_crd(), sort_keys=False, width=99)
    return f"# Written by `make manifests` from ling_operator/api.py; do not edit.\n{body}"


def main() -> None:
    """Write the manifest."""
    parser = argparse.ArgumentParser(description="Write the TrainingRun CRD.")
    parser.add_argument("path", type=Path, nargs="?", default=CRD_PATH)
    path: Path = parser.parse_args().path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_crd(), encoding="ascii")


def _root_schema() -> Node:
    spec = _structural(TrainingRunSpec, defaults=True, nullable=False)
    spec["properties"]["run"] = _settings_schema()
    spec["x-kubernetes-validations"] = spec_rules()
    status = _structural(TrainingRunStatus, defaults=False, nullable=False)
    for name, key in _MAP_KEYS.items():
        status["properties"][name] |= {
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": [key],
        }
    return {
        "type": "object",
        "description": TrainingRun.__doc__,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
        "x-kubernetes-validations": root_rules(),
    }


def _settings_schema() -> Node:
    """Return the schema of spec.run: explained and bounded, but neither defaulted nor closed.

    A default would be stored in every object and hide the preset's figure; a field that was
    pruned as unknown would be a silent typo. The operator checks the whole with the trainer's
    class and names what it does not know.
    """
    schema = _structural(RUN_SCHEMA, defaults=False, nullable=True)

    def open_up(node: Node) -> None:
        node.pop("required", None)
        if node["type"] == "object":
            node[_PRESERVE] = True
        for child in node.get("properties", {}).values():
            open_up(child)

    open_up(schema)
    field = TrainingRunSpec.model_fields["run"]
    return {**schema, "description": field.description}


def _structural(schema: type[Schema], *, defaults: bool, nullable: bool) -> Node:
    """Turn a class into a structural schema: no $ref, no anyOf, every node typed."""
    root = schema.model_json_schema(by_alias=True)
    definitions: Node = root.get("$defs", {})

    def inline(node: Node) -> Node:
        node = _resolve(node, definitions)
        result = {key: node[key] for key in _KEPT if key in node}
        for bound in ("minimum", "maximum"):
            exclusive = f"exclusive{bound.capitalize()}"
            if exclusive in node:
                result |= {bound: node[exclusive], exclusive: True}
        if node.get("nullable") and nullable:
            result["nullable"] = True
        if defaults and "default" in node:
            result |= _default(node)
        if "properties" in node:
            result["properties"] = {k: inline(v) for k, v in node["properties"].items()}
            result |= {"required": node["required"]} if "required" in node else {}
        elif isinstance(node.get("additionalProperties"), dict):
            result["additionalProperties"] = inline(node["additionalProperties"])
        elif node["type"] == "object":
            result[_PRESERVE] = True
        if "items" in node:
            result["items"] = inline(node["items"])
        return result

    return inline(root)


def _resolve(node: Node, definitions: Node) -> Node:
    """Follow $ref and open `T | None`; what is said beside them wins over what they point at."""
    while "$ref" in node or "anyOf" in node:
        if "$ref" in node:
            target = definitions[node["$ref"].removeprefix("#/$defs/")]
        else:
            (target,) = (option for option in node["anyOf"] if option != {"type": "null"})
            target = {**target, "nullable": True}
        rest = {key: value for key, value in node.items() if key not in {"$ref", "anyOf"}}
        node = {**target, **rest}
    return node if "const" not in node else {**node, "enum": [node["const"]]}


def _default(node: Node) -> Node:
    """Return the default to store: scalars, and {} where the members' own defaults fill it."""
    default = node["default"]
    if isinstance(default, dict):
        return {"default": {}} if "properties" in node else {}
    return {"default": default} if isinstance(default, bool | int | float | str) else {}


def _printer_columns() -> list[Node]:
    healthy = '.status.conditions[?(@.type=="Healthy")].reason'
    created = '.status.conditions[?(@.type=="Created")].reason'
    columns: list[Node] = [
        {"name": "Phase", "type": "string", "jsonPath": ".status.phase"},
        {"name": "Step", "type": "integer", "jsonPath": ".status.training.step"},
        {"name": "Target", "type": "integer", "jsonPath": ".status.training.targetSteps"},
        {"name": "Loss", "type": "string", "jsonPath": ".status.training.loss"},
        {"name": "Health", "type": "string", "jsonPath": healthy},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]
    wide: list[Node] = [
        {"name": "Attempt", "type": "integer", "jsonPath": ".status.attempt"},
        {"name": "Restarts", "type": "integer", "jsonPath": ".status.restarts"},
        {"name": "Tokens/s", "type": "integer", "jsonPath": ".status.training.tokensPerSecond"},
        {"name": "ETA", "type": "string", "jsonPath": ".status.training.estimatedCompletionTime"},
        {"name": "Checkpoint", "type": "integer", "jsonPath": ".status.lastFiniteCheckpoint"},
        {"name": "MTTR", "type": "integer", "jsonPath": ".status.mttr.meanSeconds"},
        {"name": "Created", "type": "string", "jsonPath": created},
    ]
    return columns + [{**column, "priority": 1} for column in wide]


if __name__ == "__main__":
    main()
