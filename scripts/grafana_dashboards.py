"""Write the chart's Grafana files: dashboards here, alert rules in grafana_alerts.py.

`python scripts/grafana_dashboards.py` writes them; a test compares the files with what is here.
"""

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from grafana_alerts import CHART, alert_rules
from grafana_fleet import FLEET
from grafana_panels import COLUMNS, SELECTED, Panel, Row
from grafana_run import ONE_RUN

type Node = dict[str, Any]

DATASOURCE: Node = {"type": "prometheus", "uid": "${datasource}"}


def dashboard(*, uid: str, title: str, rows: Sequence[Row], one_run: bool) -> Node:
    """Build a dashboard.

    Args:
      uid: stays the same for ever; links point at it.
      title: as listed.
      rows: from top to bottom.
      one_run: it has variables for namespace and name, and marks what happened.
    """
    return {
        "uid": uid,
        "title": title,
        "tags": ["ling"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables(one_run=one_run)},
        "annotations": {"list": _annotations() if one_run else []},
        "links": [_OTHERS],
        "panels": list(_layout(rows)),
    }


_OTHERS: Node = {
    "title": "Ling",
    "type": "dashboards",
    "icon": "external link",
    "tooltip": "",
    "url": "",
    "tags": ["ling"],
    "asDropdown": False,
    "targetBlank": False,
    "includeVars": False,
    "keepTime": True,
}


def _layout(rows: Sequence[Row]) -> Iterator[Node]:
    number, top = itertools.count(1), 0
    for row in rows:
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        yield {
            "id": next(number),
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": place,
            "panels": [],
        }
        top, left, height = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, height = top + height, 0, 0
            own = 5 if panel.kind in {"stat", "state-timeline"} else 8
            height = max(height, own)
            place = {"h": own, "w": panel.width, "x": left, "y": top}
            yield {"id": next(number), "gridPos": place, **_panel(panel)}
            left += panel.width
        top += height


def _panel(panel: Panel) -> Node:
    table = panel.kind == "table"
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "expr": query.expr,
            "legendFormat": query.legend,
            **({"format": "table"} if table else {}),
            "instant": table,
            "range": not table,
        }
        for index, query in enumerate(panel.queries)
    ]
    steps: list[Node] = [{"value": None, "color": "green"}]
    if panel.bad_from is not None:
        steps.append({"value": panel.bad_from, "color": "red"})
    defaults: Node = {
        "unit": panel.unit,
        "thresholds": {"mode": "absolute", "steps": steps},
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
    }
    return {
        "type": panel.kind,
        "title": panel.title,
        **({"description": panel.text} if panel.text else {}),
        "datasource": DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": _names(panel) if table else []},
        "options": _options(panel),
        **({"transformations": _TABLE} if table else {}),
    }


_TABLE: list[Node] = [
    {"id": "merge", "options": {}},
    {"id": "organize", "options": {"excludeByName": {"Time": True}}},
]


def _names(panel: Panel) -> list[Node]:
    fields = "${__data.fields.%s}"
    variables = "&".join(f"var-{name}={fields % name}" for name in ("run_namespace", "run"))
    link = {"title": "Open the run", "url": f"/d/ling-run?{variables}"}
    return [
        {
            "matcher": {"id": "byName", "options": "run"},
            "properties": [{"id": "links", "value": [link]}],
        },
        *(
            {
                "matcher": {"id": "byName", "options": f"Value #{chr(ord('A') + index)}"},
                "properties": [{"id": "displayName", "value": query.legend}],
            }
            for index, query in enumerate(panel.queries)
        ),
    ]


def _options(panel: Panel) -> Node:
    if panel.kind == "stat":
        return {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "background" if panel.bad_from is not None else "value",
            "graphMode": "none",
            "textMode": "auto",
            "justifyMode": "auto",
            "orientation": "auto",
            "percentChangeColorMode": "standard",
            "showPercentChange": False,
            "wideLayout": True,
        }
    if panel.kind == "state-timeline":
        return {
            "mergeValues": True,
            "showValue": "never",
            "rowHeight": 0.9,
            "legend": {
                "displayMode": "list",
                "placement": "bottom",
                "showLegend": False,
                "calcs": [],
            },
            "tooltip": {"mode": "single", "sort": "none"},
        }
    if panel.kind == "table":
        return {"showHeader": True, "cellHeight": "sm"}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _variables(*, one_run: bool) -> list[Node]:
    source: Node = {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
    }
    # Series of both halves: a halted run has no page, and a run may have no operator.
    known = '{__name__=~"ling_run_phase|ling_target_steps"%s}'
    namespace = _variable("run_namespace", "Namespace", known % "")
    run = _variable("run", "Run", known % ', run_namespace="$run_namespace"')
    return [source, namespace, run] if one_run else [source]


def _variable(name: str, label: str, selector: str) -> Node:
    query = f"label_values({selector}, {name})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
    }


def _annotations() -> list[Node]:
    marks = (
        ("Step with NaN or Inf", "red", f"changes(ling_last_nonfinite_step{SELECTED}[1m]) > 0"),
        ("New attempt", "blue", f"changes(ling_run_attempt{SELECTED}[1m]) > 0"),
    )
    return [
        {
            "name": name,
            "datasource": DATASOURCE,
            "enable": True,
            "iconColor": color,
            "target": {"refId": "Anno", "expr": expr},
        }
        for name, color, expr in marks
    ]


def dashboards() -> dict[str, str]:
    """Return each dashboard's file name and text."""
    built = (
        dashboard(uid="ling-fleet", title="Ling / Fleet", rows=FLEET, one_run=False),
        dashboard(uid="ling-run", title="Ling / Run", rows=ONE_RUN, one_run=True),
    )
    return {f"{each['uid']}.json": json.dumps(each, indent=1) + "\n" for each in built}


def main() -> None:
    """Write the files."""
    for name, text in dashboards().items():
        (CHART / "dashboards" / name).write_text(text)
    (CHART / "grafana" / "alert-rules.yaml").write_text(alert_rules())


if __name__ == "__main__":
    sys.exit(main())
