"""What a Prometheus sees of runs, and which of the chart's alerts fire when: promtool's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RULES = ("training.yaml", "operator.yaml")
RUN = 'run="r",run_namespace="n"'
NAN = f'ling_nonfinite_steps_total{{{RUN},kind="nan",signal="NonFiniteLoss",pod="p"}}'
INF = f'ling_nonfinite_steps_total{{{RUN},kind="inf",signal="NonFiniteLoss",pod="p"}}'
NAN_GRADIENT = f'ling_nonfinite_steps_total{{{RUN},kind="nan",signal="NonFiniteGradient",pod="p"}}'
LEADING = {'ling_operator_leading{pod="a"}': "1x1000"}
ALIVE = {f'ling_heartbeat_timestamp_seconds{{{RUN},pod="p"}}': "0+15x1000"}


def trainer(name: str, **labels: str) -> str:
    """Return a series of the trainer, of pod p."""
    return f"{name}{{{','.join([RUN, 'pod="p"', *(f'{k}="{v}"' for k, v in labels.items())])}}}"


def operator(name: str, **labels: str) -> str:
    """Return a series of a run, of the operator's pod o unless said otherwise."""
    labels = {"pod": "o", **labels}
    return f"{name}{{{','.join([RUN, *(f'{k}="{v}"' for k, v in labels.items())])}}}"


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


PHASE = "ling_run_phase"
HEARTBEAT = trainer("ling_heartbeat_timestamp_seconds")
STEP_TIME = trainer("ling_perf_step_time_seconds")
RUNNING = {**ALIVE, operator(PHASE, phase="Running"): "1x1000"}
GOODPUT = {
    **RUNNING,
    STEP_TIME: "15x1000",
    operator("ling_run_attempt_start_timestamp_seconds"): "0x1000",
}
SAVED = {
    **ALIVE,
    trainer("ling_last_checkpoint_timestamp_seconds"): "1x1000",
    trainer("ling_checkpoint_period_steps"): "100x1000",
}

CASES = (
    Case(
        "a NaN of one step, between two scrapes, the gauge long back at 0",
        {NAN: "0x19 1x200", trainer("ling_learning_is_nan"): "0x220"},
        {4.75: [], 5: ["LingLossNaN"], 14: ["LingLossNaN"], 28: ["LingLossNaN"], 31: []},
    ),
    Case(
        "a NaN before the first scrape",
        {NAN: "_x20 1x200"},
        {4.75: [], 5: ["LingLossNaN"], 31: []},
    ),
    Case(
        "a loss that stays NaN",
        {NAN: "0x19 1x300", trainer("ling_learning_is_nan"): "0x19 1x300"},
        {5: ["LingLossNaN"], 60: ["LingLossNaN"]},
    ),
    Case(
        "a pod that dies right after its NaN",
        {NAN: "0x19 1 1 stale", trainer("ling_learning_is_nan"): "0x19 1 1 stale"},
        {5: ["LingLossNaN"], 20: ["LingLossNaN"], 32: []},
    ),
    Case(
        "counters that stay 0, and start at 0 again after a restart",
        {NAN: "0x40 stale", NAN.replace('pod="p"', 'pod="q"'): "_x60 0x60", INF: "0x100"},
        {5: [], 16: [], 20: []},
    ),
    Case(
        "a NaN in the loss gauge alone, as a stale marker becomes one in other stores",
        {trainer("ling_learning_lm_loss"): "2 2 2 NaN NaN NaN NaN NaN NaN NaN NaN"},
        {1: [], 2: []},
    ),
    Case(
        "an infinite loss, whose gradients are not finite either",
        {
            INF: "0x19 1x100",
            trainer("ling_learning_is_inf"): "0x19 1x100",
            trainer("ling_learning_grad_is_nonfinite"): "0x19 1x100",
            NAN_GRADIENT: "0x120",
        },
        {4.75: [], 5: ["LingLossInf"], 25: ["LingLossInf"]},
    ),
    Case(
        "NaN gradients of a finite loss, in one step",
        {NAN_GRADIENT: "0x19 1x200", trainer("ling_learning_grad_is_nonfinite"): "0x220"},
        {4.75: [], 5: ["LingGradientNonFinite"], 28: ["LingGradientNonFinite"], 31: []},
    ),
    Case(
        "gradients that stay non-finite",
        {
            NAN_GRADIENT: "1x300",
            trainer("ling_learning_grad_is_nonfinite"): "1x300",
            trainer("ling_learning_is_nan"): "0x300",
            trainer("ling_learning_is_inf"): "0x300",
        },
        {0: ["LingGradientNonFinite"], 60: ["LingGradientNonFinite"]},
    ),
    Case(
        "a halt, latched from the first sample on, while another replica takes the lead",
        {
            operator("ling_run_halted"): "_x4 1x16 stale",
            operator("ling_run_halted", pod="o2"): "_x32 1x40 0x60",
        },
        {
            0.75: [],
            1.25: ["LingRunDiverged"],
            7: ["LingRunDiverged"],
            18: ["LingRunDiverged"],
            30: [],
        },
    ),
    Case(
        "a run that failed, and whose object is kept",
        {operator(PHASE, phase="Failed"): "_x4 1x1000"},
        {0.75: [], 1.25: ["LingRunFailed"], 55: ["LingRunFailed"], 90: []},
    ),
    Case(
        "no step for ten minutes, at two seconds a step",
        {HEARTBEAT: "0x200", STEP_TIME: "2x200"},
        {10: [], 11.5: ["LingRunStalled"]},
    ),
    Case(
        "steps of a hundred seconds take no ten minutes to be late",
        {HEARTBEAT: "0x200", STEP_TIME: "100x200"},
        {16: [], 18.5: ["LingRunStalled"]},
    ),
    Case(
        "steps of four minutes are not late after half an hour",
        {HEARTBEAT: "0x300", STEP_TIME: "240x300"},
        {35: [], 42: ["LingRunStalled"]},
    ),
    Case(
        "a process that compiles may take half an hour to its first step",
        {HEARTBEAT: "0x200"},
        {25: [], 31.5: ["LingRunStalled"]},
    ),
    Case(
        "the operator finds a run stalled, and metrics missing",
        {
            operator("ling_run_alert", reason="Stalled"): "1x60",
            operator("ling_run_alert", reason="MetricsMissing"): "1x60",
        },
        {0.5: [], 1.5: ["LingRunStalled"], 10.5: ["LingMetricsMissing", "LingRunStalled"]},
    ),
    Case(
        "the operator's rules for loss and zeros have alerts of their own",
        {
            operator("ling_run_alert", reason="LossSpike"): "_x4 1x20 stale",
            operator("ling_run_alert", reason="ZeroGradients"): "_x4 1x20 stale",
            operator("ling_run_alert", reason="NonFiniteLoss"): "_x4 1x20 stale",
        },
        {0.75: [], 1: ["LingLossSpike", "LingZeroGradients"], 30: []},
    ),
    Case(
        "the operator's other rules share one alert",
        {operator("ling_run_alert", reason="StragglerHost"): "1x20"},
        {0: ["LingHealthRule"]},
        reason={"LingHealthRule": "StragglerHost"},
    ),
    Case(
        "a run is Running and nobody reads its page",
        {operator(PHASE, phase="Running"): "1x100"},
        {9: [], 11: ["LingMetricsMissing"]},
    ),
    Case("a run is Running and its page is read", RUNNING, {11: [], 60: []}),
    Case(
        "a run that waits has no page",
        {operator(PHASE, phase="Queued"): "1x100"},
        {20: []},
    ),
    Case(
        "no checkpoint for twice the time that a hundred steps take",
        {**SAVED, STEP_TIME: "12x1000"},
        {41: [], 46: ["LingCheckpointOld"]},
    ),
    Case(
        "no checkpoint for half an hour, however quick the steps",
        {**SAVED, STEP_TIME: "0.1x1000"},
        {30: [], 36: ["LingCheckpointOld"]},
    ),
    Case(
        "checkpoints are off, or the process has only just started",
        {
            **SAVED,
            STEP_TIME: "0.1x1000",
            trainer("ling_checkpoint_period_steps"): "0x1000",
        },
        {60: []},
    ),
    Case(
        "each step takes its time and the next begins at once",
        {**GOODPUT, trainer("ling_step"): "0+1x1000"},
        {100: [], 200: []},
    ),
    Case(
        "half the time no step is made",
        {**GOODPUT, trainer("ling_step"): "0+0.5x1000"},
        {80: [], 100: ["LingGoodputLow"]},
    ),
    Case(
        "steps are made all the time, and a restart repeats them",
        {
            **GOODPUT,
            trainer("ling_step"): "0+1x100 0+1x100 0+1x100 0+1x100 0+1x100 0+1x100 0+1x100",
        },
        {100: ["LingGoodputLow"]},
    ),
    Case(
        "an hour with a pause is not judged",
        {
            **GOODPUT,
            trainer("ling_step"): "0+0.5x1000",
            operator(PHASE, phase="Suspended"): "_x200 1x20 _x780",
        },
        {80: [], 100: [], 105: []},
    ),
    Case(
        "nobody leads",
        {'ling_operator_leading{pod="a"}': "0x100", 'ling_operator_leading{pod="b"}': "0x100"},
        {4: [], 6: ["LingOperatorDown"]},
        operator=False,
    ),
    Case("no operator is there", {}, {4: [], 6: ["LingOperatorDown"]}, operator=False),
    Case(
        "one replica leads and the other waits",
        {'ling_operator_leading{pod="a"}': "0x100", 'ling_operator_leading{pod="b"}': "1x100"},
        {6: []},
        operator=False,
    ),
    Case(
        "a watch hears nothing for five minutes",
        {
            'ling_operator_watch_age_seconds{kind="pods",pod="a"}': "0+15x100",
            'ling_operator_watch_age_seconds{kind="jobs",pod="a"}': "60x100",
        },
        {5: [], 6.5: ["LingWatchStale"]},
    ),
    Case(
        "a watch is refused",
        {'ling_operator_watch_refused{kind="pods",pod="a"}': "1x100"},
        {0: [], 1.5: ["LingWatchStale"]},
    ),
    Case(
        "the API server refuses what a run needs, and then allows it",
        {operator("ling_run_permitted"): "0x30 1x100"},
        {4: [], 6: ["LingRunNotPermitted"], 20: []},
    ),
)
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
