"""A wrong value is refused with its name, and the schema knows what values.yaml knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lingcluster.helm import Helm, HelmError

IMAGE = ("--set", "image.repository=r/ling-operator")
FREE = {"podSecurityContext", "securityContext"}  # Kubernetes' own objects, passed on

REFUSALS = [
    ("replica=3", "additional properties 'replica' not allowed"),
    ("crds.enable=false", "at '/crds': additional properties 'enable' not allowed"),
    ("monitoring.gmp.enabled=true", "at '/monitoring': additional properties 'gmp' not allowed"),
    ("networkPolicy.dns.cidr=10.0.0.1/32", "at '/networkPolicy/dns'"),
    ("podDisruptionBudget.minAvailable=1", "at '/podDisruptionBudget'"),
    ("livenessProbe.timeout=9", "at '/livenessProbe'"),
    ("affinity.node=x", "at '/affinity'"),
    ("resources.limit.memory=1Gi", "at '/resources': additional properties 'limit'"),
    ("replicas=0", "at '/replicas': minimum: got 0, want 1"),
    ("replicas=two", "at '/replicas': got string, want integer"),
    ("logLevel=verbose", "at '/logLevel'"),
    ("image.digest=0123", "at '/image/digest'"),
    ("image.repository=https://r/x y", "at '/image/repository'"),
    ("image.pullPolicy=always", "at '/image/pullPolicy'"),
    ("networkPolicy.trainers.lastPort=94650", "at '/networkPolicy/trainers/lastPort'"),
    ("networkPolicy.apiServer.cidrs={10.0.0.1}", "at '/networkPolicy/apiServer/cidrs/0'"),
    ("watchNamespaces={Team_A}", "at '/watchNamespaces/0'"),
    ("monitoring.prometheusOperator.interval=15", "monitoring/prometheusOperator/interval"),
    ("monitoring.runbookUrl=runbooks", "at '/monitoring/runbookUrl'"),
    ("watchNamespaces={a,a}", "at '/watchNamespaces': items at 0 and 1 are equal"),
    ("watchNamespaces[50]=a", "at '/watchNamespaces': maxItems: got 51, want 50"),
    ("serviceAccount.create=false", "serviceAccount.name is empty"),
    ("image.repository=", "image.repository is empty: set it to where you pushed"),
]


@pytest.mark.parametrize(("setting", "message"), REFUSALS, ids=[each[0] for each in REFUSALS])
def test_a_wrong_value_is_refused_by_name(helm: Helm, setting: str, message: str) -> None:
    with pytest.raises(HelmError) as refusal:
        helm.template(*IMAGE, "--set", setting)
    assert message in str(refusal.value)


def test_values_for_all_charts_of_a_parent_are_no_typo(helm: Helm) -> None:
    assert helm.template(*IMAGE, "--set", "global.imageRegistry=r")


def resolved(node: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    reference = node.get("$ref")
    return root["definitions"][reference.rpartition("/")[2]] if reference else node


def closed(node: dict[str, Any], root: dict[str, Any], path: str) -> list[str]:
    """Return the paths of objects with named properties that let others pass."""
    node = resolved(node, root)
    loose = []
    if "properties" in node and node.get("additionalProperties") is not False:
        loose.append(path)
    for name, child in node.get("properties", {}).items():
        loose += closed(child, root, f"{path}.{name}")
    return loose


def test_the_schema_is_closed_and_names_the_same_settings_as_values_yaml(chart: Path) -> None:
    schema = json.loads((chart / "values.schema.json").read_text())
    values = yaml.safe_load((chart / "values.yaml").read_text())
    assert closed(schema, schema, "") == []

    def compare(node: dict[str, Any], tree: dict[str, Any], path: str) -> None:
        node = resolved(node, schema)
        known = set(node.get("properties", {})) - {"global"}
        if not known or path in {"resources", "livenessProbe", "readinessProbe", "affinity"}:
            return
        assert known == set(tree), path
        for name in known:
            if isinstance(tree[name], dict) and name not in FREE:
                compare(node["properties"][name], tree[name], name)

    compare(schema, values, "")
