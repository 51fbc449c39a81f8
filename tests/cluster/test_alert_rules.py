"""The alert rules under promtool: when each fires, when not, and that each word of it matters."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lingcluster.alert_cases import CASES
from lingcluster.alert_mistakes import FIRST_NAN, MUTATIONS, Mutation
from lingcluster.build import Programs
from lingcluster.client import Manifest
from lingcluster.helm import Helm, of_kind
from lingcluster.promtool import RULES, Case, promtool_file


@pytest.fixture(scope="session")
def rule_files(repository: Path) -> dict[str, Any]:
    """The chart's rule files by name."""
    folder = repository / "charts" / "ling-operator" / "rules"
    return {name: yaml.safe_load((folder / name).read_text()) for name in RULES}


def _promtool(
    programs: Programs, folder: Path, rules: Mapping[str, Any], cases: Sequence[Case]
) -> subprocess.CompletedProcess[str]:
    for name, content in rules.items():
        (folder / name).write_text(yaml.safe_dump(content))
    (folder / "cases.yaml").write_text(yaml.safe_dump(promtool_file(cases)))
    return subprocess.run(
        [programs["promtool"], "test", "rules", "cases.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_promtool_finds_nothing_to_lint(programs: Programs, repository: Path) -> None:
    folder = repository / "charts" / "ling-operator" / "rules"
    checked = subprocess.run(
        [programs["promtool"], "check", "rules", "--lint=all", "--lint-fatal", *RULES],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_each_alert_fires_when_it_should_and_not_before_or_beside(
    programs: Programs, rule_files: dict[str, Any], tmp_path: Path
) -> None:
    done = _promtool(programs, tmp_path, rule_files, CASES)
    assert done.returncode == 0, done.stdout + done.stderr
    fired = {name for case in CASES for names in case.firing.values() for name in names}
    alerts = {rule["alert"] for file in rule_files.values() for rule in _rules(file)}
    assert fired == alerts, "an alert that no case fires"
    assert len({case.name for case in CASES}) == len(CASES)


# Google Managed Prometheus has no keep_firing_for: what it lacks there, and no more.
_GOOGLES = {
    FIRST_NAN: {4.75: [], 5: ["LingLossNaN"], 14: ["LingLossNaN"], 16: []},
    "a NaN before the first scrape": {4.75: [], 5: ["LingLossNaN"], 14: ["LingLossNaN"], 16: []},
    "a pod that dies right after its NaN": {5: ["LingLossNaN"], 14: ["LingLossNaN"], 16: []},
    "NaN gradients of a finite loss, in one step": {14: ["LingGradientNonFinite"], 16: []},
    "a halt, latched from the first sample on, while another replica takes the lead": {
        1.25: ["LingRunDiverged"],
        18: ["LingRunDiverged"],
        19: [],
    },
}


def test_what_the_chart_installs_are_these_rules(
    programs: Programs, rule_files: dict[str, Any], tmp_path: Path
) -> None:
    helm = Helm(programs["helm"], home=tmp_path)
    kinds = ("prometheusOperator", "googleManagedPrometheus")
    switches = [f"--set=monitoring.{kind}.enabled=true" for kind in kinds]
    url = "https://handbook.example/operations"
    objects = helm.template(
        "--set=image.repository=example/ling-operator",
        f"--set=monitoring.runbookUrl={url}",
        *switches,
    )
    ours = [group for name in RULES for group in rule_files[name]["groups"]]
    installed = _groups(objects, "PrometheusRule")
    for group in installed:
        for rule in group["rules"]:
            links = rule["annotations"]
            assert links["runbook_url"] == f"{url}#{rule['alert'].lower()}"
            links["runbook_url"] = f"docs/operations.md#{rule['alert'].lower()}"
    assert _sorted(installed) == _sorted(ours)

    googles = {name: {"groups": []} for name in RULES}
    googles["training.yaml"]["groups"] = _groups(objects, "ClusterRules")
    assert not [rule for rule in _rules(googles["training.yaml"]) if "keep_firing_for" in rule]
    cases = [
        dataclasses.replace(case, firing=_GOOGLES.get(case.name, case.firing)) for case in CASES
    ]
    done = _promtool(programs, tmp_path, googles, cases)
    assert done.returncode == 0, done.stdout + done.stderr


def _groups(objects: Sequence[Manifest], kind: str) -> list[dict[str, Any]]:
    return [group for each in of_kind(objects, kind) for group in each["spec"]["groups"]]


def _sorted(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(groups, key=lambda group: group["name"])


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_mistake_in_a_rule_is_noticed(
    mutation: Mutation, programs: Programs, rule_files: dict[str, Any], tmp_path: Path
) -> None:
    broken = yaml.safe_load(yaml.safe_dump(rule_files))
    (rule,) = (
        rule
        for file in broken.values()
        for rule in _rules(file)
        if rule["alert"] == mutation.alert
    )
    for old, new in mutation.replace.items():
        assert old in rule["expr"], f"{old!r} is not in the rule; the mutation is out of date"
        rule["expr"] = rule["expr"].replace(old, new)
    for name, value in mutation.fields.items():
        assert name in rule
        rule.pop(name) if value is None else rule.update({name: value})
    (case,) = (case for case in CASES if case.name == mutation.noticed)
    done = _promtool(programs, tmp_path, broken, [case])
    assert done.returncode == 1
    assert "FAILED" in done.stdout + done.stderr
    assert "exp:" in done.stdout + done.stderr or "exp_samples" in done.stdout + done.stderr, (
        "promtool refused the rule instead of finding other alerts: " + done.stdout + done.stderr
    )


def _rules(file: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [rule for group in file["groups"] for rule in group["rules"]]
