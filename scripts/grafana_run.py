"""The dashboard of one run. What a panel shows is a line here; its place is the order."""

from grafana_panels import (
    BY_RUN,
    MEDIAN_STEP,
    RUN,
    SELECTED,
    Panel,
    Query,
    Row,
    goodput,
    lines,
    of_run,
    one,
)

_HEARTBEAT_AGE = (
    f"(time() - ling_heartbeat_timestamp_seconds{SELECTED}) "
    f"* on (run_namespace, run, instance) group_left (process) ling_run_info{SELECTED}"
)
_REMAINING = (
    f"({of_run('ling_target_steps')} - {of_run('ling_step')}) "
    f"* on (run_namespace, run) {MEDIAN_STEP % SELECTED}"
)
_NONFINITE = "sum by (kind, signal) (ling_nonfinite_steps_total" + SELECTED + ")"
_ZEROS = f"{of_run('ling_learning_num_zeros')} / {of_run('ling_learning_num_grad_elements')}"
_AT_RISK = f"time() - max {BY_RUN} (ling_last_checkpoint_timestamp_seconds{{{RUN}}} > 0)"

ONE_RUN: tuple[Row, ...] = (
    Row(
        title="Run",
        panels=(
            Panel(
                title="Phase",
                kind="state-timeline",
                queries=one(f"max by (phase) (ling_run_phase{SELECTED})", "{{phase}}"),
                width=12,
                text="From the operator, so it is there without any pod.",
            ),
            Panel(
                title="Steps done",
                kind="stat",
                queries=one(f"{of_run('ling_step')} / {of_run('ling_target_steps')}"),
                unit="percentunit",
                width=3,
            ),
            Panel(title="Time left", kind="stat", queries=one(_REMAINING), unit="s", width=3),
            Panel(
                title="Halted",
                kind="stat",
                queries=one(of_run("ling_run_halted")),
                bad_from=1,
                width=3,
            ),
            Panel(
                title="Non-finite steps",
                kind="stat",
                queries=one(f"sum(ling_nonfinite_steps_total{SELECTED})"),
                bad_from=1,
                width=3,
                text="Counted by the trainer since its start: none is lost between two scrapes.",
            ),
        ),
    ),
    Row(
        title="Losses",
        panels=(
            Panel(
                title="Loss",
                queries=lines("lm_loss", "loss", prefix="ling_learning_"),
                text="lm_loss is the cross-entropy alone, in nats a token. A NaN is a gap here.",
                width=12,
            ),
            Panel(
                title="Contributions to the loss",
                queries=lines(
                    "mtp_loss", "moe_lb_loss", "moe_z_loss", "z_loss", prefix="ling_learning_"
                ),
                width=6,
                text="Coefficients inside.",
            ),
            Panel(
                title="Evaluation",
                queries=lines("eval_lm_loss"),
                width=6,
                text="Of the last evaluation; nothing without eval_interval.",
            ),
        ),
    ),
    Row(
        title="Health",
        panels=(
            Panel(
                title="Steps with NaN or Inf",
                queries=one(_NONFINITE, "{{kind}} {{signal}}"),
                bad_from=1,
                text="A counter: a step between two scrapes shows too.",
            ),
            Panel(
                title="Last step not finite (0 or 1)",
                queries=lines("is_nan", "is_inf", "grad_is_nonfinite", prefix="ling_learning_"),
                bad_from=1,
                text="Of the step that a scrape met; a bad one in between is not seen here.",
            ),
            Panel(
                title="Health rules that hold",
                queries=one(f"max by (reason) (ling_run_alert{SELECTED})", "{{reason}}"),
                bad_from=1,
                text="spec.health rules with action Alert, by the operator; empty is good. What a "
                "run ignores is counted in the fleet's table.",
            ),
            Panel(
                title="Gradient norm",
                queries=lines("raw_grad_norm", "grad_norm", prefix="ling_learning_"),
                text="raw_grad_norm is before clipping.",
            ),
            Panel(
                title="Gradient elements that are zero",
                queries=one(_ZEROS, "zeros"),
                unit="percentunit",
            ),
            Panel(
                title="Parameters and routers",
                queries=lines("param_norm", "router_bias_std", prefix="ling_learning_"),
            ),
        ),
    ),
    Row(
        title="Throughput",
        panels=(
            Panel(
                title="Tokens a second",
                queries=(
                    Query(
                        expr=f"sum {BY_RUN} (rate(ling_tokens_total{SELECTED}[$__rate_interval]))",
                        legend="with a loss, average",
                    ),
                    *lines("perf_tokens_per_second"),
                ),
                text="The average holds what is between the steps; the other is of a single step.",
            ),
            Panel(
                title="Time of a step",
                queries=lines("perf_step_time_seconds"),
                unit="s",
            ),
            Panel(
                title="Goodput of the last hour",
                queries=one(goodput(SELECTED), "goodput"),
                unit="percentunit",
                text="Steps that still count times the median step, over the time that passed.",
            ),
            Panel(title="Learning rate", queries=lines("learning_rate", prefix="ling_learning_")),
            Panel(
                title="Tokens with a loss in a step",
                queries=lines("total_weights", prefix="ling_learning_"),
            ),
            Panel(
                title="Steps without any",
                queries=lines("empty_steps_total"),
                bad_from=1,
            ),
        ),
    ),
    Row(
        title="Hosts",
        panels=(
            Panel(
                title="Since each process's last sign of life",
                queries=(
                    Query(expr=_HEARTBEAT_AGE, legend="{{process}} {{instance}}"),
                    Query(expr=of_run("ling_run_stall_patience_seconds"), legend="allowed"),
                ),
                unit="s",
                width=16,
                text="A line that rises alone is a straggler; all together, up to what "
                "spec.health.stall allows, are a stall.",
            ),
            Panel(
                title="Processes seen",
                queries=one(f"count {BY_RUN} (ling_run_info{SELECTED})", "processes"),
            ),
        ),
    ),
    Row(
        title="Checkpoints and restarts",
        panels=(
            Panel(
                title="Work at risk",
                queries=one(_AT_RISK, "since the last checkpoint"),
                unit="s",
            ),
            Panel(
                title="Step and checkpoint",
                queries=lines("step", "last_finite_checkpoint_step", "last_finite_step"),
            ),
            Panel(
                title="Restarts and attempt",
                queries=lines("run_restarts", "run_attempt"),
                text="Restarts of the attempt; a resume is none.",
            ),
        ),
    ),
)
