"""Scrapes of real processes."""

import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ling_trainer import health_metrics
from ports import free_ports

pytestmark = pytest.mark.slow


def scrape(url: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return labels and value of every sample, by series."""
    with urllib.request.urlopen(url) as page:
        text = page.read().decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def test_two_processes_export_what_health_metrics_lists(launch):
    hang = {"fault.enabled": True, "fault_kind": "hang", "fault_step": 3}
    told = {"LING_RUN": "demo", "LING_RUN_NAMESPACE": "team", "LING_ATTEMPT": "2", "POD_UID": "u"}
    evaluated = {"eval_interval": 1, "eval_steps": 1, "split": "90,10,0"}
    settings = hang | evaluated | {"checkpoint_period": 1}
    run = launch("scraped", settings, processes=2, environ=told)

    before = scrape(run.url())
    assert {value for _, value in before["ling_nonfinite_steps_total"]} == {0}
    assert [value for _, value in before["ling_steps_total"]] == [0]
    assert before["ling_target_steps"][0][1] == 10
    assert not {"ling_learning_loss", "ling_eval_lm_loss"} & set(before)

    run.until(r" step=2 ")
    deadline = time.monotonic() + 60
    while scrape(run.url())["ling_last_finite_checkpoint_step"][0][1] < 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    page = scrape(run.url())
    names = {metric.name for metric in health_metrics.ALL}
    assert set(page) == names - {"ling_learning_indexer_loss"}  # ling2 has no indexer
    assert page["ling_step"][0][1] == 2
    assert page["ling_last_finite_step"][0][1] == 2
    assert page["ling_tokens_total"][0][1] > 0
    assert page["ling_checkpoint_period_steps"][0][1] == 1
    saved_at = "ling_last_checkpoint_timestamp_seconds"
    assert before[saved_at][0][1] < page[saved_at][0][1] <= time.time()
    for samples in page.values():
        for labels, _ in samples:
            assert (labels["run"], labels["run_namespace"]) == ("demo", "team")
    ((info, one),) = page["ling_run_info"]
    assert one == 1
    expected = {"pod_uid": "u", "process": "0", "processes": "2", "attempt": "2"}
    assert expected.items() <= info.items()
    assert info["preset"] == "ling2_tiny"

    peer = scrape(run.url(process=1))
    assert set(peer) == {metric.name for metric in health_metrics.ALL if metric.every_process}
    assert peer["ling_run_info"][0][0]["process"] == "1"


def test_the_metrics_port_is_the_configured_one_plus_the_containers_index(launch):
    (port,) = free_ports(1)
    run = launch("port", {"metrics_port": port - 3}, environ={"LING_CONTAINER_INDEX": "3"})
    assert run.url() == f"http://127.0.0.1:{port}/metrics"
    assert "ling_heartbeat_timestamp_seconds" in scrape(run.url())
