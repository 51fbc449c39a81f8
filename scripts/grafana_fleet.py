"""The dashboard of all runs and of the operator."""

from grafana_panels import BY_RUN, Panel, Query, Row, goodput, one


def _each(series: str) -> str:
    return f"max {BY_RUN} ({series})"


def _quantiles(histogram: str) -> tuple[Query, ...]:
    rate = f"sum by (le) (rate({histogram}_bucket[$__rate_interval]))"
    return tuple(
        Query(expr=f"histogram_quantile({quantile}, {rate})", legend=f"{quantile}")
        for quantile in (0.5, 0.99)
    )


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
                    Query(
                        expr=f"count {BY_RUN} (max by (run_namespace, run, rule) "
                        "(ling_run_rule_ignored))",
                        legend="ignored rules",
                    ),
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
                queries=_quantiles("ling_operator_reconcile_seconds"),
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
                title="From a change to the pass that looks at it",
                queries=_quantiles("ling_operator_queue_wait_seconds"),
                unit="s",
            ),
            Panel(
                title="Runs that wait for a worker",
                queries=one("sum(ling_operator_queue_depth)", "waiting"),
            ),
            Panel(
                title="Runs that it may not act on",
                queries=one("sum(1 - ling_run_permitted)", "refused"),
                bad_from=1,
                text="Each has its words in the condition Permitted.",
            ),
            Panel(
                title="Watches that the API server refuses",
                queries=one("sum by (kind) (ling_operator_watch_refused)", "{{kind}}"),
                bad_from=1,
            ),
        ),
    ),
)
