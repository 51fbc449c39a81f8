"""The CRD: what is in manifests/crd is what the classes say, and Kubernetes can hold it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ling_operator.api import TrainingRunSpec
from ling_operator.crd import CRD_PATH, build_crd, render_crd
from ling_operator.crd_rules import FIXED_FIELDS

type Node = dict[str, Any]
FREE_FIELDS = {"suspend", "attempt", "health"}


@pytest.fixture(scope="module")
def crd() -> Node:
    return build_crd()


@pytest.fixture(scope="module")
def schema(crd: Node) -> Node:
    (version,) = crd["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


def walk(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in node:
            yield from walk(node[key], f"{path}[]")


def test_the_manifest_is_what_the_classes_say(repository: Path) -> None:
    stored = (repository / CRD_PATH).read_text(encoding="ascii")
    assert stored == render_crd(), "run `make manifests`"


def test_client_side_apply_can_hold_it(crd: Node) -> None:
    assert len(json.dumps(crd)) <= 150 * 1024


def test_the_schema_is_structural(schema: Node) -> None:
    allowed = {"object", "array", "string", "integer", "number", "boolean"}
    for path, node in walk(schema):
        assert node["type"] in allowed, path
        assert not {"$ref", "anyOf", "oneOf", "allOf", "const", "title", "$defs"} & node.keys()
        assert not isinstance(node.get("exclusiveMinimum", True), int | float) or isinstance(
            node.get("exclusiveMinimum", True), bool
        ), path
        assert ("properties" in node) + ("additionalProperties" in node) <= 1, path
        if node["type"] == "array":
            assert "items" in node, path


def test_every_object_is_described_closed_or_open_on_purpose(schema: Node) -> None:
    for path, node in walk(schema):
        if node["type"] == "object" and path != ".metadata":
            is_open = node.get("x-kubernetes-preserve-unknown-fields", False)
            assert "properties" in node or "additionalProperties" in node or is_open, path


def test_run_is_explained_but_neither_defaulted_nor_required_nor_pruned(schema: Node) -> None:
    run = schema["properties"]["spec"]["properties"]["run"]
    sections = set()
    for path, node in walk(run):
        assert "default" not in node, path
        assert "required" not in node, path
        if node["type"] == "object":
            sections.add(path)
            assert node["x-kubernetes-preserve-unknown-fields"] is True, path
    assert {"", ".model", ".data", ".optimizer", ".loss", ".fault"} <= sections
    steps = run["properties"]["steps"]
    assert (steps["type"], steps["minimum"]) == ("integer", 1)
    assert run["properties"]["model"]["properties"]["qLoraRank"]["nullable"] is True
    rate = run["properties"]["optimizer"]["properties"]["learningRate"]
    assert (rate["minimum"], rate["exclusiveMinimum"]) == (0, True)


def test_the_rest_of_spec_shows_its_defaults(schema: Node) -> None:
    spec = schema["properties"]["spec"]["properties"]
    assert spec["attempt"]["default"] == 1
    assert spec["restarts"]["default"] == 3
    assert spec["health"]["default"] == {}
    health = spec["health"]["properties"]
    assert health["scrapeIntervalSeconds"]["default"] == 5
    assert health["nonFinite"]["default"] == {}
    assert health["nonFinite"]["properties"]["action"]["enum"] == ["Halt", "Alert", "Ignore"]
    for path, node in walk(schema["properties"]["status"]):
        assert "default" not in node, f"status{path}: the operator writes all of it"


def test_every_health_rule_is_explained_and_shows_its_thresholds_and_its_action(
    schema: Node,
) -> None:
    health = schema["properties"]["spec"]["properties"]["health"]["properties"]
    rules = {name: node for name, node in health.items() if node["type"] == "object"}
    assert len(rules) == 9
    for name, rule in rules.items():
        assert rule["default"] == {}, name
        assert "Reason" in rule["description"], name
        assert rule["properties"]["action"]["enum"] == ["Halt", "Alert", "Ignore"], name
        for field, node in rule["properties"].items():
            assert "default" in node, f"{name}.{field}"
            assert node["description"], f"{name}.{field}"


def test_every_field_of_spec_is_either_fixed_or_free() -> None:
    fields = {str(field.alias) for field in TrainingRunSpec.model_fields.values()}
    assert fields == set(FIXED_FIELDS) | FREE_FIELDS


def test_the_rules_that_no_type_can_express_are_there(schema: Node) -> None:
    rules = {r["rule"]: r["message"] for r in schema["x-kubernetes-validations"]}
    text = "\n".join(rules)
    assert "self.spec.attempt >= oldSelf.spec.attempt" in rules
    assert "size(self.metadata.name) <= 45" in text
    for field in FIXED_FIELDS:
        (rule,) = (r for r, message in rules.items() if f"spec.{field} is fixed" in message)
        assert f"has(self.spec.{field})" in rule
        assert f"has(oldSelf.spec.{field})" in rule
        assert "!has(oldSelf.status.jobSetUID)" in rule
        assert "self.spec.attempt > oldSelf.spec.attempt" in rule
    spec_rules = [r["rule"] for r in schema["properties"]["spec"]["x-kubernetes-validations"]]
    assert any("has(self.tpu), has(self.cpu), has(self.watch)" in rule for rule in spec_rules)
    assert "has(self.image) || has(self.watch)" in spec_rules


def test_kubectl_get_shows_phase_step_target_loss_health_and_age(crd: Node) -> None:
    (version,) = crd["spec"]["versions"]
    shown = [c["name"] for c in version["additionalPrinterColumns"] if not c.get("priority")]
    assert shown == ["Phase", "Step", "Target", "Loss", "Health", "Age"]
    assert version["subresources"] == {"status": {}}
    assert crd["spec"]["names"]["shortNames"] == ["trun"]


def test_status_lists_are_merged_by_key(schema: Node) -> None:
    status = schema["properties"]["status"]["properties"]
    for name, key in (("conditions", "type"), ("attempts", "attempt")):
        assert status[name]["x-kubernetes-list-type"] == "map"
        assert status[name]["x-kubernetes-list-map-keys"] == [key]
        assert key in status[name]["items"]["required"]
    assert "jobSetUID" in status
