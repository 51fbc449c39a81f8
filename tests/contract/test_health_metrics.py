"""The wire contract is frozen: a renamed or dropped series is a breaking change."""

import re
from pathlib import Path

from ling_trainer import health_metrics as metrics


def test_the_exported_names_are_the_frozen_ones() -> None:
    frozen = (Path(__file__).parent / "series.txt").read_text().split()
    assert [metric.name for metric in (*metrics.ALL, metrics.MTP_DEPTH_LOSS)] == frozen


def test_a_log_key_gives_the_series_name_by_one_rule() -> None:
    assert metrics.series_name("learning/is_nan") == "ling_learning_is_nan"
    assert all(m.name == metrics.series_name(m.log_key) for m in metrics.LOGGED if m.log_key)


def test_counters_end_in_total_and_gauges_do_not() -> None:
    for metric in metrics.ALL:
        is_counter = metric.kind is metrics.Kind.COUNTER
        assert metric.name.endswith("_total") == is_counter, metric.name


def test_each_prediction_depth_of_a_log_has_a_series_of_its_own_up_to_the_first_gap() -> None:
    log = {"learning/loss", "learning/mtp_1_loss", "learning/mtp_2_loss", "learning/mtp_4_loss"}
    names = [metric.name for metric in metrics.logged_in(log)]
    assert names == ["ling_learning_loss", "ling_learning_mtp_1_loss", "ling_learning_mtp_2_loss"]


def test_every_series_says_what_it_is() -> None:
    for metric in metrics.ALL:
        assert re.fullmatch(r"[A-Za-z].*\.", metric.help), metric.name
        assert metric.unit
