"""What the Grafana dashboards show: one of the fleet, one of a single run. Tables of panels.

What a panel shows is a line of a table; where it stands follows from the order.
"""

from dataclasses import dataclass
from typing import Literal

COLUMNS = 24
RUN = 'run_namespace="$run_namespace", run="$run"'
BY_RUN = "by (run_namespace, run)"
_MEDIAN_STEP = f"max {BY_RUN} (quantile_over_time(0.5, ling_perf_step_time_seconds%s[1h]))"
_ATTEMPT_AGE = f"time() - max {BY_RUN} (ling_run_attempt_start_timestamp_seconds%s)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One expression, and the name of its lines."""

    expr: str
    legend: str = "__auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
      title: what is shown, with its unit where Grafana has none for it.
      queries: at least one.
      unit: Grafana's name of it.
      kind: of panel.
      text: what a reader has to know; the description.
      width: of 24 columns.
      bad_from: values from here on are red.
    """

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Literal["timeseries", "stat", "state-timeline", "table"] = "timeseries"
    text: str = ""
    width: int = 8
    bad_from: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A heading and the panels below it."""

    title: str
    panels: tuple[Panel, ...]


def goodput(selector: str) -> str:
    """Return the expression of goodput over the last hour, or since the attempt began.

    New steps (those that a restart repeats taken off) times a step's median time, over the time
    that has passed. The alert LingGoodputLow has the same.
    """
    steps = f"clamp_min(delta(max {BY_RUN} (ling_step{selector})[1h:15s]), 0)"
    return (
        f"clamp_max({steps} * on (run_namespace, run) {_MEDIAN_STEP % selector} "
        f"/ on (run_namespace, run) clamp_max({_ATTEMPT_AGE % selector}, 3600), 1)"
    )


def of_run(series: str) -> str:
    """Return a scalar of the chosen run, whichever pod tells it."""
    return f"max {BY_RUN} ({series}{{{RUN}}})"


def lines(*series: str, prefix: str = "ling_") -> tuple[Query, ...]:
    """Return a query for each series of the chosen run, named without its prefix."""
    return tuple(Query(expr=of_run(f"{prefix}{name}"), legend=name) for name in series)


def one(expr: str, legend: str = "__auto") -> tuple[Query, ...]:
    """Return one query."""
    return (Query(expr=expr, legend=legend),)


SELECTED = f"{{{RUN}}}"
_HEARTBEAT_AGE = (
    f"(time() - ling_heartbeat_timestamp_seconds{SELECTED}) "
    f"* on (run_namespace, run, instance) group_left (process) ling_run_info{SELECTED}"
)
_REMAINING = (
    f"({of_run('ling_target_steps')} - {of_run('ling_step')}) "
    f"* on (run_namespace, run) {_MEDIAN_STEP % SELECTED}"
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
                text="spec.health rules with action Alert, by the operator; empty is good.",
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
                queries=one(_HEARTBEAT_AGE, "{{process}} {{instance}}"),
                unit="s",
                width=16,
                text="A line that rises alone is a straggler; all together are a stall.",
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


def _each(series: str) -> str:
    return f"max {BY_RUN} ({series})"


FLEET: tuple[Row, ...] = (
    Row(
        title="Runs",
        panels=(
            Panel(
                title="Runs by phase",
                kind="stat",
                queries=one(
                    "count by (phase) (max by (run_namespace, run, phase) (ling_run_phase))",
                    "{{phase}}",
                ),
                width=12,
            ),
            Panel(
                title="Halted runs",
                kind="stat",
                queries=one(f"sum({_each('ling_run_halted')})"),
                bad_from=1,
                width=4,
            ),
            Panel(
                title="Alerts",
                kind="stat",
                queries=one(
                    'count by (alertname) (ALERTS{alertname=~"Ling.*", alertstate="firing"})',
                    "{{alertname}}",
                ),
                bad_from=1,
                width=8,
                text="Empty is good, where Prometheus evaluates the chart's rules.",
            ),
            Panel(
                title="Runs",
                kind="table",
                queries=(
                    Query(expr=_each("ling_step"), legend="step"),
                    Query(
                        expr=f"{_each('ling_step')} / {_each('ling_target_steps')}", legend="done"
                    ),
                    Query(expr=_each("ling_learning_lm_loss"), legend="lm_loss"),
                    Query(expr=_each("ling_perf_tokens_per_second"), legend="tokens/s"),
                    Query(expr=_each("ling_run_restarts"), legend="restarts"),
                    Query(expr=f"sum {BY_RUN} (ling_nonfinite_steps_total)", legend="non-finite"),
                ),
                width=24,
            ),
        ),
    ),
    Row(
        title="Work",
        panels=(
            Panel(
                title="Tokens a second",
                queries=one(
                    f"sum {BY_RUN} (rate(ling_tokens_total[$__rate_interval]))",
                    "{{run_namespace}}/{{run}}",
                ),
            ),
            Panel(
                title="Goodput of the last hour",
                queries=one(goodput(""), "{{run_namespace}}/{{run}}"),
                unit="percentunit",
            ),
            Panel(
                title="Steps with NaN or Inf",
                queries=one(
                    f"sum {BY_RUN} (ling_nonfinite_steps_total)", "{{run_namespace}}/{{run}}"
                ),
                bad_from=1,
            ),
        ),
    ),
    Row(
        title="Operator",
        panels=(
            Panel(
                title="Replicas that lead", queries=one("sum(ling_operator_leading)", "leading")
            ),
            Panel(
                title="Passes a second by result",
                queries=one(
                    "sum by (result) (rate(ling_operator_reconcile_total[$__rate_interval]))",
                    "{{result}}",
                ),
                unit="ops",
            ),
            Panel(
                title="Time of a pass",
                queries=tuple(
                    Query(
                        expr=f"histogram_quantile({quantile}, sum by (le) "
                        "(rate(ling_operator_reconcile_seconds_bucket[$__rate_interval])))",
                        legend=f"{quantile}",
                    )
                    for quantile in (0.5, 0.99)
                ),
                unit="s",
            ),
            Panel(
                title="Reads of trainers' pages by result",
                queries=one(
                    "sum by (result) (rate(ling_operator_scrapes_total[$__rate_interval]))",
                    "{{result}}",
                ),
                unit="ops",
            ),
            Panel(
                title="Age of each watch",
                queries=one("max by (kind) (ling_operator_watch_age_seconds)", "{{kind}}"),
                unit="s",
            ),
            Panel(
                title="Runs that wait for a worker",
                queries=one("sum(ling_operator_queue_depth)", "waiting"),
            ),
        ),
    ),
)
