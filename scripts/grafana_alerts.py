"""Grafana-managed alert rules, made of the chart's Prometheus rules."""

import re
from pathlib import Path
from typing import Any

import yaml

type Node = dict[str, Any]

CHART = Path(__file__).parents[1] / "charts" / "ling-operator"
_KNOWN_RUNS = "ling_run_phase or ling_heartbeat_timestamp_seconds"
_ALERT_HEADER = """\
# Written by `make manifests` from ../rules by scripts/grafana_alerts.py; do not edit.
# Alert rules for Grafana's file provisioning, for those who do not alert by Prometheus. Use one.
# Each query is a finite 1 for what is wrong and 0 for every other run (Grafana takes a NaN for an
# alert). noDataState OK: no run is no incident, and LingOperatorDown has a value in any case, so
# that no answer there is an incident. execErrState Error: a Prometheus that does not answer is its
# own alert and no page for a NaN. datasourceUid is `prometheus`; replace it with yours.
"""


def alert_rules() -> str:
    """Return the alert rules as Grafana's file provisioning takes them."""
    groups: list[Node] = []
    for path in sorted((CHART / "rules").glob("*.yaml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            rules = [_grafana_rule(rule) for rule in group["rules"]]
            name = {"orgId": 1, "name": group["name"], "folder": "Ling", "interval": "30s"}
            groups.append({**name, "rules": rules})
    document = {"apiVersion": 1, "groups": groups}
    return _ALERT_HEADER + yaml.dump(document, Dumper=_Readable, sort_keys=False, width=99)


class _Readable(yaml.SafeDumper):
    """Writes text of several lines as such."""


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Readable.add_representer(str, _write_text)


def _grafana_rule(rule: Node) -> Node:
    name = rule["alert"]
    always = "absent(" in rule["expr"]
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+", name.removeprefix("Ling"))
    query: Node = {
        "refId": "A",
        "relativeTimeRange": {"from": 600, "to": 0},
        "datasourceUid": "prometheus",
        "model": {"refId": "A", "instant": True, "range": False, "expr": _zero_or_one(rule)},
    }
    threshold: Node = {
        "refId": "B",
        "datasourceUid": "__expr__",
        "model": {
            "refId": "B",
            "type": "threshold",
            "expression": "A",
            "conditions": [{"evaluator": {"type": "gt", "params": [0]}}],
        },
    }
    annotations = dict(rule["annotations"])
    if "$value" in annotations["description"]:  # here it is always 1
        annotations["description"] = _whose(rule) + annotations["summary"]
    return {
        "uid": "ling-" + "-".join(words).lower(),
        "title": name,
        "condition": "B",
        "data": [query, threshold],
        "for": rule["for"],
        **({"keepFiringFor": rule["keep_firing_for"]} if "keep_firing_for" in rule else {}),
        "noDataState": "Alerting" if always else "OK",
        "execErrState": "Error",
        "labels": rule["labels"],
        "annotations": annotations,
    }


def _zero_or_one(rule: Node) -> str:
    """Return 1 for each that the rule is about, 0 for all others that are known."""
    labels = _labels(rule)
    by = f"by ({', '.join(labels)}) " if labels else ""
    others = {"": "ling_operator_leading", "kind": "ling_operator_watch_age_seconds"}
    known = others.get(",".join(labels), _KNOWN_RUNS)
    return f"(group {by}(\n{rule['expr'].strip()}\n))\nor 0 * group {by}({known})"


def _labels(rule: Node) -> list[str]:
    """Return the labels of the rule's result: those of its first `by`."""
    found = re.search(r" by \(([a-z_, ]+)\)", rule["expr"])
    return found[1].split(", ") if found else []


def _whose(rule: Node) -> str:
    labels = _labels(rule)
    if "run" in labels:
        return "Run {{ $labels.run_namespace }}/{{ $labels.run }}: "
    return "".join(f"{label} {{{{ $labels.{label} }}}}: " for label in labels)
