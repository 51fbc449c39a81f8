"""A table of cases as the file that `promtool test rules` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RULES = ("training.yaml", "operator.yaml")
LEADING = {'ling_operator_leading{pod="a"}': "1x1000"}


@dataclass(frozen=True)
class Case:
    """Series scraped every 15 s, and which alerts fire when.

    Attributes:
      name: a sentence.
      series: name and labels -> promtool's notation of values, 15 s apart.
      firing: minutes since the first sample -> names of all alerts that fire.
      reason: label of the alerts that have one.
      operator: one leads all the time.
    """

    name: str
    series: Mapping[str, str]
    firing: Mapping[float, Sequence[str]]
    reason: Mapping[str, str] = field(default_factory=dict[str, str])
    operator: bool = True


RUN_LESS = {"LingOperatorDown": {}, "LingWatchStale": {"kind": "pods"}}

SEVERITY = {
    **dict.fromkeys(
        (
            "LingLossNaN",
            "LingLossInf",
            "LingGradientNonFinite",
            "LingRunDiverged",
            "LingRunFailed",
            "LingRunNotPermitted",
            "LingRunStalled",
            "LingOperatorDown",
        ),
        "critical",
    ),
    **dict.fromkeys(
        (
            "LingLossSpike",
            "LingZeroGradients",
            "LingHealthRule",
            "LingMetricsMissing",
            "LingCheckpointOld",
            "LingGoodputLow",
            "LingWatchStale",
        ),
        "warning",
    ),
}


def promtool_file(cases: Sequence[Case]) -> dict[str, Any]:
    """Return the file that `promtool test rules` reads."""
    return {
        "rule_files": list(RULES),
        "evaluation_interval": "15s",
        "tests": [
            {
                "name": case.name,
                "interval": "15s",
                "input_series": [
                    {"series": series, "values": values}
                    for series, values in {
                        **case.series,
                        **(LEADING if case.operator else {}),
                    }.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": 'ALERTS{alertstate="firing"}',
                        "eval_time": f"{round(minutes * 60)}s",
                        "exp_samples": [_alert(name, case) for name in names],
                    }
                    for minutes, names in case.firing.items()
                ],
            }
            for case in cases
        ],
    }


def _alert(name: str, case: Case) -> dict[str, Any]:
    labels = {
        "alertname": name,
        "alertstate": "firing",
        "severity": SEVERITY[name],
        **RUN_LESS.get(name, {"run": "r", "run_namespace": "n"}),
    }
    if name in case.reason:
        labels["reason"] = case.reason[name]
    written = ", ".join(f'{key}="{value}"' for key, value in labels.items())
    return {"labels": f"ALERTS{{{written}}}", "value": 1}
