"""Write docs/metrics.md: every series of the trainer and of the operator, and who alerts on it.

The trainer's come from health_metrics.py, the operator's from its own page. `make manifests` runs
it; a test compares the file with what it says.
"""

import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import yaml
from prometheus_client.metrics import MetricWrapperBase

from ling_operator.caches import Caches
from ling_operator.telemetry import Telemetry
from ling_operator.workqueue import WorkQueue
from ling_trainer import health_metrics

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "metrics.md"
RULES = ROOT / "charts" / "ling-operator" / "rules"

HEAD = """\
<!-- Written by `make manifests` from health_metrics.py and the operator's page; do not edit. -->
# Metrics

A log key (`learning/lm_loss` in `metrics.jsonl`) becomes a
series by one rule: `ling_` in front, slashes to underscores. Levels are gauges. Events are
counters, created at 0 before the first step, so that no scrape can miss one: of a NaN between
two scrapes a gauge knows nothing. The names are a contract: one that changes is marked
**breaking** in the changelog.

Every series has the labels `run` and `run_namespace`, those of the operator about itself
apart. They are not called `namespace` and `pod`, which scrapers add themselves. A NaN is
exported as `NaN`; it is above nothing and below nothing, so no rule compares a loss with a
number.
"""
TRAINER = """\
## Trainer

`GET /metrics` on port 9464, plus the container's index (`metrics_port`). Scalars are global:
they come from process 0 alone. What is marked *every process* comes from each. The page shows
one moment, never the step of one and the loss of another.
"""
RUNS = """\
## Operator, about runs

`GET /metrics` on port 8080 (`--metrics-bind-address`). They come from the replica that leads
alone, are rebuilt from the objects' status when it starts, and go with the object.
"""
OPERATOR = """\
## Operator, about itself

On the same page, without `run` and `run_namespace`; besides, `process_*` of the Python client.
`watched_namespace` is empty, which is the same as absent, where all namespaces are watched.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One series, as the table has it."""

    name: str
    kind: str
    unit: str
    labels: tuple[str, ...]
    text: str


def alerts_by_series() -> dict[str, list[str]]:
    """Return the alerts whose expression names a series."""
    found: dict[str, list[str]] = {}
    for path in sorted(RULES.glob("*.yaml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                for name in sorted(set(re.findall(r"\bling_[a-z_]+", rule["expr"]))):
                    found.setdefault(name, []).append(rule["alert"])
    return found


def trainer_lines() -> Iterator[Line]:
    """Yield the trainer's series in the order of the page."""
    for metric in (*health_metrics.ALL, health_metrics.MTP_DEPTH_LOSS):
        notes = [
            *(["every process"] if metric.every_process else []),
            *(["only where the model or the configuration has it"] if metric.optional else []),
        ]
        yield Line(
            name=metric.name,
            kind=str(metric.kind),
            unit=metric.unit,
            labels=metric.labels,
            text=metric.help + "".join(f" *{note.capitalize()}.*" for note in notes),
        )


def operator_lines() -> Iterator[Line]:
    """Yield the operator's series: those of a page without any run, which has every family."""
    nothing = SimpleNamespace(reflectors=(), runs=SimpleNamespace(objects={}))
    telemetry = Telemetry(WorkQueue(), cast("Caches", nothing))
    own = [each for each in vars(telemetry).values() if isinstance(each, MetricWrapperBase)]
    labels = {family.name: _labels(each) for each in own for family in each.describe()}
    for family in telemetry.registry.collect():
        if not family.name.startswith("ling_"):
            continue
        every = labels[family.name] if family.name in labels else _labels(family)
        yield Line(
            name=family.name + ("_total" if family.type == "counter" else ""),
            kind=family.type,
            unit=_unit(family.name),
            labels=tuple(label for label in every if label not in health_metrics.RUN_LABELS),
            text=family.documentation,
        )


def _labels(of: Any) -> tuple[str, ...]:
    # The client has no public way to a family's label names while it has no sample.
    return tuple(of._labelnames)


def _unit(name: str) -> str:
    if name.endswith("_timestamp_seconds"):
        return "seconds since the epoch"
    return "seconds" if name.endswith("_seconds") else "1"


def render() -> str:
    """Return the document."""
    alerts = alerts_by_series()
    lines = list(operator_lines())
    runs = [line for line in lines if line.name.startswith("ling_run_")]
    own = [line for line in lines if line not in runs]
    parts = (
        (HEAD, TRAINER, *_table(trainer_lines(), alerts)),
        (RUNS, *_table(runs, alerts)),
        (OPERATOR, *_table(own, alerts)),
    )
    return "\n".join(itertools.chain(*parts))


def _table(lines: Iterable[Line], alerts: Mapping[str, list[str]]) -> list[str]:
    rows = ["| series | kind | unit | labels | meaning | alerts |", "|---|---|---|---|---|---|"]
    for line in lines:
        names = ", ".join(
            f"[{name}](operations.md#{name.lower()})" for name in alerts.get(line.name, ())
        )
        labels = ", ".join(f"`{label}`" for label in line.labels)
        cells = (f"`{line.name}`", line.kind, line.unit, labels, line.text, names)
        rows.append("| " + " | ".join(cells) + " |")
    return [*rows, ""]


def main() -> None:
    """Write the file."""
    TARGET.write_text(render())


if __name__ == "__main__":
    sys.exit(main())
