"""Draw the dashboard of one run from a Prometheus: the panels' own queries, as a PNG.

For the README, where no Grafana runs; it needs matplotlib (extra `plot`).
"""

import argparse
import json
import math
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from grafana_panels import Panel
from grafana_run import ONE_RUN

SECONDS = 600


class Source:
    """The run's last minutes in a Prometheus."""

    def __init__(self, url: str, *, namespace: str, run: str) -> None:
        self._url = url
        self._variables = {
            "$__rate_interval": "15s",
            "$run_namespace": namespace,
            "$run": run,
        }
        self.end = time.time()
        times = [float(row[0]) for row in self.lines("max(ling_step)", self.end - SECONDS)[0][1]]
        self.start = times[0]

    def lines(
        self, expr: str, start: float | None = None
    ) -> list[tuple[dict[str, str], list[list[Any]]]]:
        """Return labels, and times with values, of each line of an expression."""
        for name, value in self._variables.items():
            expr = expr.replace(name, value)
        begin = self.start if start is None else start
        query = {"query": expr, "start": str(begin), "end": str(self.end), "step": "1"}
        url = f"{self._url}/api/v1/query_range?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url) as answer:  # noqa: S310 - the caller's own Prometheus
            result = json.loads(answer.read())["data"]["result"]
        return [(each["metric"], each["values"]) for each in result]


def draw(source: Source, axes: Any, panel: Panel) -> None:
    """Draw one panel; a legend's {{label}} is filled in as Grafana does."""
    for query in panel.queries:
        for metric, rows in source.lines(query.expr):
            name = query.legend
            for label, value in metric.items():
                name = name.replace("{{" + label + "}}", value)
            seconds = [float(row[0]) - source.start for row in rows]
            values = [float(row[1]) for row in rows]
            color = "tab:red" if panel.bad_from is not None and max(values) > 0 else None
            axes.plot(seconds, values, lw=1.2, label=name, color=color)
            if any(map(math.isnan, values)):
                axes.set_facecolor("mistyrose")
    axes.set_title(panel.title, fontsize=8, loc="left")
    axes.tick_params(labelsize=6)
    axes.yaxis.get_offset_text().set_fontsize(6)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=5.5, loc="best", frameon=False)


def main() -> None:
    """Draw it."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description="Draw a run's dashboard from a Prometheus.")
    for name in ("prometheus", "namespace", "run", "output"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args()
    source = Source(given.prometheus, namespace=given.namespace, run=given.run)
    panels = [
        panel for row in ONE_RUN for panel in row.panels if panel.kind in {"timeseries", "stat"}
    ]
    columns = 4
    rows = math.ceil(len(panels) / columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(13, 1.75 * rows), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, panel in zip(grid.flat, panels, strict=False):
        draw(source, axes, panel)
    figure.suptitle(f"{given.run}: seconds since the first scrape; one step with a NaN", size=10)
    figure.tight_layout()
    figure.savefig(Path(given.output), dpi=80)


if __name__ == "__main__":
    main()
