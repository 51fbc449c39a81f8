"""Scrape objects find the trainers, and rules and dashboards are the files as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ling_operator.api import TrainingRun
from ling_operator.pod_template import build_pod_template
from lingcluster.client import Manifest
from lingcluster.helm import Helm, of_kind

IMAGE = ("--set", "image.repository=r/ling-operator")
PROMETHEUS = ("--set", "monitoring.prometheusOperator.enabled=true")
GOOGLE = ("--set", "monitoring.googleManagedPrometheus.enabled=true")
GRAFANA = ("--set", "monitoring.grafana.dashboards=true,monitoring.grafana.alerts=true")
RUNBOOK = ("--set", "monitoring.runbookUrl=https://runbooks.example.com/operations.md")
TWO = ("--set", "watchNamespaces={team-a,team-b}")


@pytest.fixture(scope="module")
def rules(chart: Path) -> dict[str, dict[str, Any]]:
    """The rule files, by the end of the objects' names."""
    found = {path.stem: yaml.safe_load(path.read_text()) for path in chart.glob("rules/*.yaml")}
    assert found
    return found


def named(objects: list[Manifest]) -> dict[str, Manifest]:
    return {each["metadata"]["name"].removeprefix("ling-operator-"): each for each in objects}


def test_prometheus_rules_are_the_files(helm: Helm, rules: dict[str, Any]) -> None:
    objects = helm.template(*IMAGE, *PROMETHEUS)
    rendered = {
        name: each["spec"] for name, each in named(of_kind(objects, "PrometheusRule")).items()
    }
    assert rendered == rules


def test_google_rules_are_the_files_without_what_its_api_lacks(
    helm: Helm, rules: dict[str, Any]
) -> None:
    objects = named(of_kind(helm.template(*IMAGE, *GOOGLE), "ClusterRules"))
    assert objects.keys() == rules.keys()
    for name, each in objects.items():
        groups = each["spec"]["groups"]
        assert all(group.pop("interval") for group in groups)  # required there
        expected = [
            {
                "name": group["name"],
                "rules": [
                    {k: v for k, v in rule.items() if k != "keep_firing_for"}
                    for rule in group["rules"]
                ],
            }
            for group in rules[name]["groups"]
        ]
        assert groups == expected


@pytest.mark.parametrize("flags", [PROMETHEUS, GOOGLE], ids=["prometheus", "google"])
def test_alerts_link_to_the_published_runbook(helm: Helm, flags: tuple[str, str]) -> None:
    objects = helm.template(*IMAGE, *flags, *RUNBOOK)
    links = re.findall(r"runbook_url: (\S+)", yaml.safe_dump_all(objects))
    assert links
    assert all(
        re.match(r"https://runbooks\.example\.com/operations\.md#\w", each) for each in links
    )


def test_dashboards_and_grafanas_alerts_are_the_files(helm: Helm, chart: Path) -> None:
    maps = of_kind(helm.template(*IMAGE, *GRAFANA), "ConfigMap")
    rendered = {name: text for each in maps for name, text in each["data"].items()}
    files = [*chart.glob("dashboards/*.json"), *chart.glob("grafana/*.yaml")]
    assert rendered == {path.name: path.read_text().rstrip("\n") for path in files}
    assert all(len(text) < 1_000_000 for text in rendered.values())  # a ConfigMap holds 1 MiB
    labels = {
        name: each["metadata"]["labels"].keys() & {"grafana_dashboard", "grafana_alert"}
        for each in maps
        for name in each["data"]
    }
    for name, found in labels.items():
        assert found == ({"grafana_dashboard"} if name.endswith(".json") else {"grafana_alert"})


def scraped(monitor: Manifest, container: str, port: str) -> bool:
    """Tell whether a declared port of a container is scraped."""
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    keep = endpoint["relabelings"][0]
    assert keep["action"] == "keep"
    assert keep["sourceLabels"] == ["__meta_kubernetes_pod_container_name"]
    return port == endpoint["port"] and re.fullmatch(keep["regex"], container) is not None


@pytest.mark.parametrize("slice_of", ["v5p-128", "tpu7x-128"])
def test_the_trainers_containers_are_scraped_by_the_ports_they_declare(
    helm: Helm, slice_of: str
) -> None:
    tpu = {"accelerator": slice_of} | ({"parallelContainers": 2} if "7x" in slice_of else {})
    spec = {
        "image": "i",
        "tpu": tpu,
        "run": {"preset": "ling2_tiny", "datasetType": "synthetic", "baseOutputDirectory": "out"},
    }
    run = TrainingRun.model_validate({"metadata": {"name": "a", "namespace": "n"}, "spec": spec})
    pod = build_pod_template(run, 1, None)
    objects = helm.template(*IMAGE, *PROMETHEUS)
    monitor = named(of_kind(objects, "PodMonitor"))["trainers"]
    (expression,) = monitor["spec"]["selector"]["matchExpressions"]
    assert expression["key"] in pod["metadata"]["labels"]
    containers = pod["spec"]["containers"]
    assert len(containers) == tpu.get("parallelContainers", 1)
    for each in containers:
        (port,) = each["ports"]
        assert scraped(monitor, each["name"], port["name"])
    assert not scraped(monitor, "istio-proxy", "metrics")
    (google,) = of_kind(helm.template(*IMAGE, *GOOGLE), "ClusterPodMonitoring")
    assert [each["port"] for each in google["spec"]["endpoints"]] == ["metrics"]
    assert google["spec"]["selector"] == monitor["spec"]["selector"]


def test_scrape_objects_look_where_the_operator_does(helm: Helm) -> None:
    everywhere = named(of_kind(helm.template(*IMAGE, *PROMETHEUS), "PodMonitor"))["trainers"]
    assert everywhere["spec"]["namespaceSelector"] == {"any": True}
    two = named(of_kind(helm.template(*IMAGE, *PROMETHEUS, *TWO), "PodMonitor"))["trainers"]
    assert two["spec"]["namespaceSelector"] == {"matchNames": ["team-a", "team-b"]}
    (of_all,) = of_kind(helm.template(*IMAGE, *GOOGLE), "ClusterPodMonitoring")
    google = helm.template(*IMAGE, *GOOGLE, *TWO)
    assert not of_kind(google, "ClusterPodMonitoring")
    trainers = {
        each["metadata"]["namespace"]: each["spec"]
        for each in of_kind(google, "PodMonitoring")
        if "trainers" in each["metadata"]["name"]
    }
    assert trainers == dict.fromkeys(("team-a", "team-b"), of_all["spec"])
