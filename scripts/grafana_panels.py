"""Words that dashboards are written in: rows of panels of queries, and expressions they share."""

from dataclasses import dataclass
from typing import Literal

COLUMNS = 24
RUN = 'run_namespace="$run_namespace", run="$run"'
SELECTED = f"{{{RUN}}}"
BY_RUN = "by (run_namespace, run)"
MEDIAN_STEP = f"max {BY_RUN} (quantile_over_time(0.5, ling_perf_step_time_seconds%s[1h]))"
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
        f"clamp_max({steps} * on (run_namespace, run) {MEDIAN_STEP % selector} "
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
