"""The chart's scrape objects say whose a page is, whatever it says itself: a real Prometheus."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lingcluster.build import Programs
from lingcluster.client import wait_for
from lingcluster.helm import Helm, of_kind
from lingcluster.loopback import LoopbackBlock
from lingcluster.monitoring import Prometheus
from lingcluster.processes import Session

PAGE = b"""\
ling_learning_is_nan 1
ling_step{run="another",run_namespace="elsewhere"} 7
"""
POD = {
    "__meta_kubernetes_namespace": "team",
    "__meta_kubernetes_pod_container_name": "jax-tpu",
    "__meta_kubernetes_pod_label_ling_primatrix_io_run": "ours",
}


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def page(loopback: LoopbackBlock) -> Iterator[str]:
    """The address of a page that knows no run, and lies about one."""
    with http.server.ThreadingHTTPServer((loopback.control_plane, 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"{loopback.control_plane}:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("kind", ["PodMonitor", "ClusterPodMonitoring"])
def test_a_page_is_of_the_run_whose_pod_serves_it(
    kind: str,
    page: str,
    programs: Programs,
    loopback: LoopbackBlock,
    cluster_session: Session,
    tmp_path: Path,
) -> None:
    (port,) = loopback.free_ports(1)
    prometheus = Prometheus(
        programs,
        tmp_path,
        address=f"{loopback.control_plane}:{port}",
        targets={"trainer": [page]},
        rules=[],
        alertmanager=f"{loopback.control_plane}:1",
        session=cluster_session,
        labels=POD,
        scrape=_settings(kind, Helm(programs["helm"], home=tmp_path)),
    )
    try:
        prometheus.wait_until_ready()
        for name in ("ling_learning_is_nan", "ling_step"):
            (sample,) = wait_for(name, lambda name=name: prometheus.query(name), timeout=60)
            labels = {k: v for k, v in sample["metric"].items() if "run" in k}
            assert labels == {"run": "ours", "run_namespace": "team"}, name
    finally:
        prometheus.stop()


def _settings(kind: str, helm: Helm) -> dict[str, Any]:
    """Return what the monitoring operators make of the object, less how pods are found."""
    objects = helm.template(
        "--set=image.repository=example/ling-operator",
        "--set=monitoring.prometheusOperator.enabled=true",
        "--set=monitoring.googleManagedPrometheus.enabled=true",
    )
    (monitor,) = (
        each for each in of_kind(objects, kind) if each["metadata"]["name"].endswith("-trainers")
    )
    spec = monitor["spec"]
    if kind == "PodMonitor":
        (endpoint,) = spec["podMetricsEndpoints"]
        before, after = endpoint["relabelings"], endpoint["metricRelabelings"]
    else:
        (endpoint,) = spec["endpoints"]
        namespace = {
            "sourceLabels": ["__meta_kubernetes_namespace"],
            "targetLabel": "namespace",
        }
        before = [namespace, *map(_from_pod, spec["targetLabels"]["fromPod"])]
        after = endpoint["metricRelabeling"]
    return {"relabel_configs": _rules(before), "metric_relabel_configs": _rules(after)}


def _from_pod(label: Mapping[str, str]) -> dict[str, Any]:
    name = label["from"].replace(".", "_").replace("/", "_")
    return {
        "sourceLabels": [f"__meta_kubernetes_pod_label_{name}"],
        "targetLabel": label["to"],
    }


def _rules(rules: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    words = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    return [{words.get(key, key): value for key, value in rule.items()} for rule in rules]
