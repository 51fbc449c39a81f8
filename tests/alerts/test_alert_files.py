"""The chart's rules, dashboards and Grafana rules: what promtool and tsc do not look at."""

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from ling_operator.health_policy import HealthPolicy
from ling_trainer import health_metrics

LABELS = re.compile(r"\$labels\.([a-z_]+)")
SERIES = re.compile(r"\bling_[a-z0-9_]+")
DURATION = re.compile(r"[0-9]+(s|m|h)")


@pytest.fixture
def scripts(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of scripts/ by name."""
    monkeypatch.syspath_prepend(repository / "scripts")

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


@pytest.fixture
def chart(repository: Path) -> Path:
    return repository / "charts" / "ling-operator"


@pytest.fixture
def rules(chart: Path) -> list[dict[str, Any]]:
    files = [yaml.safe_load(path.read_text()) for path in sorted((chart / "rules").glob("*.yaml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def test_what_make_manifests_writes_is_what_is_there(
    repository: Path, chart: Path, scripts: Any
) -> None:
    grafana = scripts("grafana_dashboards")
    for name, text in grafana.dashboards().items():
        assert (chart / "dashboards" / name).read_text() == text, name
    assert (chart / "grafana" / "alert-rules.yaml").read_text() == grafana.alert_rules()
    written = (repository / "docs" / "metrics.md").read_text()
    assert written == scripts("metrics_docs").render()


def test_each_alert_says_what_it_is_how_grave_and_what_to_do(
    rules: list[dict[str, Any]], repository: Path
) -> None:
    handbook = (repository / "docs" / "operations.md").read_text()
    headings = {line.removeprefix("### ") for line in handbook.splitlines() if line[:4] == "### "}
    for rule in rules:
        name, annotations = rule["alert"], rule["annotations"]
        assert name in headings, f"docs/operations.md has no runbook for {name}"
        assert annotations["runbook_url"] == f"docs/operations.md#{name.lower()}"
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert annotations["summary"].endswith(".")
        assert "{{" not in annotations["summary"], "a summary is the same for every run"
        known = set(re.findall(r"[a-z_]+", re.findall(r" by \(([^)]*)\)|$", rule["expr"])[0]))
        assert set(LABELS.findall(annotations["description"])) <= known, name
    assert {heading for heading in headings if heading.startswith("Ling")} == {
        rule["alert"] for rule in rules
    }


def test_no_rule_compares_a_loss_and_none_hides_a_missing_series(
    rules: list[dict[str, Any]], chart: Path, scripts: Any
) -> None:
    finite = {
        metric.name
        for metric in health_metrics.ALL
        if metric.log_key is None
        or metric.unit == "0 or 1"
        or metric.name.startswith(health_metrics.PREFIX + "perf_")
    }
    of_operator = {line.name for line in scripts("metrics_docs").operator_lines()}
    for rule in rules:
        named = set(SERIES.findall(rule["expr"]))
        assert named <= finite | of_operator, rule["alert"]
    for path in (*(chart / "rules").iterdir(), *(chart / "dashboards").iterdir()):
        text = re.sub(r"^ *#.*$", "", path.read_text(), flags=re.MULTILINE)
        assert "vector(" not in text, path.name


def test_dashboards_and_alert_mean_the_same_by_goodput(
    rules: list[dict[str, Any]], scripts: Any
) -> None:
    (rule,) = (rule for rule in rules if rule["alert"] == "LingGoodputLow")
    shown = re.sub(r"\s", "", scripts("grafana_panels").goodput(""))
    assert shown in re.sub(r"\s", "", rule["expr"])


def test_every_reason_of_an_operators_rule_reaches_an_alert(rules: list[dict[str, Any]]) -> None:
    (rest,) = (rule for rule in rules if rule["alert"] == "LingHealthRule")
    excluded = re.findall(r'reason!~"([^"]+)"', rest["expr"])[0]
    named = {reason for rule in rules for reason in re.findall(r'reason="(\w+)"', rule["expr"])}
    reasons = set(re.findall(r"[Rr]easons? (\w+)", _policy_text())) - {"NonFiniteLoss"}
    assert {"LossSpike", "StragglerHost", "ZeroLoss", "MetricsMissing"} <= reasons
    for reason in reasons:
        own = re.fullmatch(excluded, reason) is not None
        assert own == (reason in named), reason


def _policy_text() -> str:
    fields = HealthPolicy.model_fields.values()
    return " ".join(str(getattr(field.annotation, "__doc__", "")) for field in fields)


def _grafana_rules(chart: Path) -> Iterator[dict[str, Any]]:
    document = yaml.safe_load((chart / "grafana" / "alert-rules.yaml").read_text())
    assert document["apiVersion"] == 1
    for group in document["groups"]:
        assert group.keys() == {"orgId", "name", "folder", "interval", "rules"}
        assert DURATION.fullmatch(group["interval"])
        yield from group["rules"]


def test_grafana_would_start_with_the_provisioned_rules(
    chart: Path, rules: list[dict[str, Any]]
) -> None:
    """A file that it refuses keeps Grafana from starting; these are its checks."""
    provisioned = list(_grafana_rules(chart))
    assert {rule["title"] for rule in provisioned} == {rule["alert"] for rule in rules}
    uids = [rule["uid"] for rule in provisioned]
    assert len(set(uids)) == len(uids)
    for rule in provisioned:
        assert re.fullmatch(r"[a-z0-9-]{1,40}", rule["uid"])
        assert DURATION.fullmatch(rule["for"])
        assert DURATION.fullmatch(rule.get("keepFiringFor", "0s"))
        query, threshold = rule["data"]
        assert query["relativeTimeRange"]["from"] > query["relativeTimeRange"]["to"]
        assert threshold["datasourceUid"] == "__expr__"
        assert threshold["model"]["expression"] == query["refId"]
        assert rule["condition"] == threshold["refId"]
        assert rule["execErrState"] == "Error"
        always = rule["title"] == "LingOperatorDown"
        assert rule["noDataState"] == ("Alerting" if always else "OK")
        # Label values go through Grafana's replacement of environment variables.
        assert "$" not in json.dumps(rule["labels"])
        assert "$value" not in json.dumps(rule["annotations"]), "the value is 0 or 1 here"


def test_panels_neither_overlap_nor_leave_the_grid(chart: Path) -> None:
    for path in (chart / "dashboards").glob("*.json"):
        dashboard = json.loads(path.read_text())
        taken: set[tuple[int, int]] = set()
        for panel in dashboard["panels"]:
            at = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert at["x"] + at["w"] <= 24
            assert not cells & taken, panel["title"]
            taken |= cells
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(set(ids)) == len(ids)
