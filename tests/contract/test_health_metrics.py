"""The wire contract is frozen: a renamed or dropped series is a breaking change."""

import re

from ling_trainer import health_metrics as metrics

FROZEN = """
ling_learning_loss ling_learning_lm_loss ling_learning_lm_loss_token_avg ling_learning_objective
ling_learning_z_loss ling_learning_moe_lb_loss ling_learning_load_balancing_loss
ling_learning_moe_z_loss ling_learning_raw_moe_z_loss ling_learning_mtp_loss
ling_learning_raw_mtp_loss ling_learning_total_weights ling_learning_grad_norm
ling_learning_raw_grad_norm ling_learning_param_norm ling_learning_learning_rate
ling_learning_num_zeros ling_learning_num_grad_elements ling_learning_is_nan ling_learning_is_inf
ling_learning_grad_is_nonfinite ling_perf_step_time_seconds ling_perf_tokens_per_second
ling_step ling_target_steps ling_last_finite_step ling_last_nonfinite_step
ling_last_step_timestamp_seconds ling_last_finite_checkpoint_step
ling_nonfinite_steps_consecutive_max ling_nonfinite_steps_total ling_steps_total ling_tokens_total
ling_empty_steps_total ling_heartbeat_timestamp_seconds ling_run_info
""".split()


def test_the_exported_names_are_the_frozen_ones() -> None:
    assert [metric.name for metric in metrics.ALL] == FROZEN


def test_a_log_key_gives_the_series_name_by_one_rule() -> None:
    assert metrics.series_name("learning/is_nan") == "ling_learning_is_nan"
    assert all(m.name == metrics.series_name(m.log_key) for m in metrics.LOGGED if m.log_key)


def test_counters_end_in_total_and_gauges_do_not() -> None:
    for metric in metrics.ALL:
        is_counter = metric.kind is metrics.Kind.COUNTER
        assert metric.name.endswith("_total") == is_counter, metric.name


def test_every_series_says_what_it_is() -> None:
    for metric in metrics.ALL:
        assert re.fullmatch(r"[A-Za-z].*\.", metric.help), metric.name
        assert metric.unit
