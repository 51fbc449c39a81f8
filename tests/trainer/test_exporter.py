"""The metrics page: which series, which values, which process, which address."""

import dataclasses
import math
import socket
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ling_trainer import health_metrics
from ling_trainer.ends import EndRun, ExitCode
from ling_trainer.exporter import Exporter, Identity, Snapshot
from ling_trainer.health_metrics import NonFinite, Signal
from ling_trainer.progress import Progress, fold
from ling_trainer.report import NonFiniteStep

IDENTITY = Identity(
    run="demo", run_namespace="team", pod_uid="uid-1", process=0, processes=2, attempt=3,
    preset="ling2_tiny", version="0.1.0",
)  # fmt: skip
FULL_LOG: dict[str, float] = {str(m.log_key): 1.5 for m in health_metrics.ALL if m.log_key}
NAN_LOSS = NonFiniteStep(signal=Signal.NON_FINITE_LOSS, kind=NonFinite.NAN, value=math.nan)


@pytest.fixture
def scrape():
    """Serve a snapshot on loopback, and return its samples by name and labels."""
    exporters: list[Exporter] = []

    def read(snapshot: Snapshot, **identity: Any) -> dict[tuple[str, frozenset[str]], float]:
        exporter = Exporter(dataclasses.replace(IDENTITY, **identity))
        exporters.append(exporter)
        exporter.publish(snapshot)
        url = exporter.serve(address="127.0.0.1", port=0)
        with urllib.request.urlopen(url) as page:
            families = list(text_string_to_metric_families(page.read().decode()))
        return {
            (s.name, frozenset(f"{k}={v}" for k, v in s.labels.items())): s.value
            for family in families
            for s in family.samples
        }

    yield read
    for exporter in exporters:
        exporter.close()


def snapshot(progress: Progress = Progress(), log: dict[str, float] | None = None) -> Snapshot:  # noqa: B008
    return Snapshot(
        heartbeat=100.0,
        progress=progress,
        target_steps=10,
        checkpoint_step=4,
        checkpoint_time=90.0,
        checkpoint_period=20,
        log=log or {},
    )


def test_a_full_page_has_exactly_the_series_of_health_metrics(scrape):
    names = {name for name, _ in scrape(snapshot(log=FULL_LOG))}
    assert names == {metric.name for metric in health_metrics.ALL}


def test_what_a_model_does_not_have_has_no_series_and_each_prediction_depth_has_one(scrape):
    optional = {metric.log_key for metric in health_metrics.LOGGED if metric.optional}
    log = {key: value for key, value in FULL_LOG.items() if key not in optional}
    depths = {"learning/mtp_1_loss": 2.5, "learning/mtp_2_loss": 3.5}
    page = scrape(snapshot(log=log | depths))
    names = {name for name, _ in page}
    absent = {metric.name for metric in health_metrics.LOGGED if metric.optional}
    assert "ling_learning_indexer_loss" in absent
    expected = {metric.name for metric in health_metrics.ALL} - absent
    assert names == expected | {"ling_learning_mtp_1_loss", "ling_learning_mtp_2_loss"}
    own = frozenset({"run=demo", "run_namespace=team"})
    assert page["ling_learning_mtp_2_loss", own] == 3.5


def test_counters_are_there_at_zero_before_the_first_step_and_losses_are_not(scrape):
    page = scrape(snapshot())
    counters = {k: v for k, v in page.items() if k[0] == "ling_nonfinite_steps_total"}
    assert len(counters) == len(NonFinite) * len(Signal)
    assert set(counters.values()) == {0}
    names = {name for name, _ in page}
    assert names == {metric.name for metric in health_metrics.ON_WIRE_ONLY}


def test_every_series_says_which_run_in_which_namespace_it_belongs_to(scrape):
    for _, labels in scrape(snapshot(log=FULL_LOG)):
        assert {"run=demo", "run_namespace=team"} <= labels


def test_other_processes_export_no_scalar(scrape):
    names = {name for name, _ in scrape(snapshot(log=FULL_LOG), process=1)}
    assert names == {metric.name for metric in health_metrics.ALL if metric.every_process}


def test_a_nan_step_is_counted_under_its_signal_and_stays_when_later_steps_are_fine(scrape):
    progress = fold(Progress(), step=1, tokens=7, bad=NAN_LOSS, now=1.0)
    progress = fold(progress, step=2, tokens=7, bad=None, now=2.0)
    page = scrape(snapshot(progress, FULL_LOG))
    key = frozenset({"run=demo", "run_namespace=team", "kind=nan", "signal=NonFiniteLoss"})
    assert page["ling_nonfinite_steps_total", key] == 1
    own = frozenset({"run=demo", "run_namespace=team"})
    assert page["ling_last_nonfinite_step", own] == 1
    assert page["ling_last_finite_step", own] == 2
    assert page["ling_nonfinite_steps_consecutive_max", own] == 1
    assert page["ling_tokens_total", own] == 14


def test_work_at_risk_is_told_by_the_last_checkpoints_time_and_the_period(scrape):
    page = scrape(snapshot())
    own = frozenset({"run=demo", "run_namespace=team"})
    assert page["ling_last_finite_checkpoint_step", own] == 4
    assert page["ling_last_checkpoint_timestamp_seconds", own] == 90
    assert page["ling_checkpoint_period_steps", own] == 20


def test_a_nan_loss_is_exported_as_nan(scrape):
    page = scrape(snapshot(log=FULL_LOG | {"learning/loss": math.nan}))
    own = frozenset({"run=demo", "run_namespace=team"})
    assert math.isnan(page["ling_learning_loss", own])


def test_a_taken_port_ends_with_code_5_and_names_it():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(EndRun, match=rf"port {port} is taken.*metrics\.metrics_port") as error:
            Exporter(IDENTITY).serve(address="127.0.0.1", port=port)
    assert error.value.ending.code == ExitCode.METRICS_PORT


def test_an_address_of_another_machine_is_a_wrong_setting_not_a_taken_port():
    with pytest.raises(EndRun, match="POD_IP") as error:
        Exporter(IDENTITY).serve(address="192.0.2.1", port=0)
    assert error.value.ending.code == ExitCode.CONFIGURATION
