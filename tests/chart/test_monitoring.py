"""Scrape objects find the trainers, and rules and dashboards are the files as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lingcluster.client import Manifest
from lingcluster.helm import Helm, of_kind

IMAGE = ("--set", "image.repository=r/ling-operator")
PROMETHEUS = ("--set", "monitoring.prometheusOperator.enabled=true")
GOOGLE = ("--set", "monitoring.googleManagedPrometheus.enabled=true")
GRAFANA = ("--set", "monitoring.grafana.dashboards=true,monitoring.grafana.alerts=true")
RUNBOOK = ("--set", "monitoring.runbookUrl=https://runbooks.example.com/operations.md")
ONE = ("--set", "watchNamespaces={team-a}")
META = "__meta_kubernetes_pod_"

type Labels = dict[str, str]


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


def relabel(target: Labels, rules: list[dict[str, Any]]) -> Labels | None:
    """Apply what the monitor uses of Prometheus' relabelling; None where the target is dropped."""
    for rule in rules:
        text = ";".join(target.get(name, "") for name in rule["sourceLabels"])
        match = re.fullmatch(rule.get("regex", "(.*)"), text)
        if rule.get("action") == "keep":
            if match is None:
                return None
        elif match is not None:
            value = match.expand(rule["replacement"].replace("$", "\\"))
            target = target | {rule["targetLabel"]: value}
    return target


def addresses(monitor: Manifest, targets: list[Labels]) -> list[str]:
    found = [
        relabel(target, endpoint["relabelings"])
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
        for target in targets
    ]
    return sorted(each["__address__"] for each in found if each is not None)


def container(name: str, port: str = "", *, annotation: str = "9464") -> Labels:
    """Return a target as Prometheus discovers it, one for each container and declared port."""
    return {
        "__address__": "10.4.3.5" + (f":{port}" if port else ""),
        f"{META}ip": "10.4.3.5",
        f"{META}container_name": name,
        f"{META}container_port_number": port,
        f"{META}annotation_ling_primatrix_io_metrics_port": annotation,
    }


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ([container("jax-tpu")], ["9464"]),
        ([container("jax-tpu", annotation="9700")], ["9700"]),
        ([container("jax-tpu", "9464")], ["9464"]),
        ([container("jax-tpu"), container("istio-proxy", "15020")], ["9464"]),
        ([container("jax-tpu-1"), container("jax-tpu-2")], ["9464", "9465"]),
        (
            [
                container("jax-tpu-1", "9700", annotation="9700"),
                container("jax-tpu-2", "9701", annotation="9700"),
            ],
            ["9700", "9701"],
        ),
    ],
    ids=["plain", "other port", "host network", "sidecar", "two containers", "two, declared"],
)
def test_a_trainer_is_scraped_once_a_container_at_its_port(
    helm: Helm, targets: list[Labels], expected: list[str]
) -> None:
    monitors = named(of_kind(helm.template(*IMAGE, *PROMETHEUS), "PodMonitor"))
    found = addresses(monitors["trainers"], targets)
    assert found == [f"10.4.3.5:{port}" for port in expected]


def test_scrape_objects_look_where_the_operator_does(helm: Helm) -> None:
    everywhere = named(of_kind(helm.template(*IMAGE, *PROMETHEUS), "PodMonitor"))["trainers"]
    assert everywhere["spec"]["namespaceSelector"] == {"any": True}
    one = named(of_kind(helm.template(*IMAGE, *PROMETHEUS, *ONE), "PodMonitor"))["trainers"]
    assert one["spec"]["namespaceSelector"] == {"matchNames": ["team-a"]}
    assert of_kind(helm.template(*IMAGE, *GOOGLE), "ClusterPodMonitoring")
    google = helm.template(*IMAGE, *GOOGLE, *ONE)
    assert not of_kind(google, "ClusterPodMonitoring")
    (trainers,) = (
        each for each in of_kind(google, "PodMonitoring") if "trainers" in each["metadata"]["name"]
    )
    assert trainers["metadata"]["namespace"] == "team-a"
