"""What a Prometheus sees of runs, and which of the chart's alerts fire when."""

from __future__ import annotations

from lingcluster.promtool import Case

RUN = 'run="r",run_namespace="n"'
NAN = f'ling_nonfinite_steps_total{{{RUN},kind="nan",signal="NonFiniteLoss",pod="p"}}'
INF = f'ling_nonfinite_steps_total{{{RUN},kind="inf",signal="NonFiniteLoss",pod="p"}}'
NAN_GRADIENT = f'ling_nonfinite_steps_total{{{RUN},kind="nan",signal="NonFiniteGradient",pod="p"}}'
ALIVE = {f'ling_heartbeat_timestamp_seconds{{{RUN},pod="p"}}': "0+15x1000"}


def trainer(name: str, **labels: str) -> str:
    """Return a series of the trainer, of pod p."""
    return f"{name}{{{','.join([RUN, 'pod="p"', *(f'{k}="{v}"' for k, v in labels.items())])}}}"


def operator(name: str, **labels: str) -> str:
    """Return a series of a run, of the operator's pod o unless said otherwise."""
    labels = {"pod": "o", **labels}
    return f"{name}{{{','.join([RUN, *(f'{k}="{v}"' for k, v in labels.items())])}}}"


PHASE = "ling_run_phase"
IGNORED = "ling_run_rule_ignored"
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
        "nothing finite, of a run that ignores it, while another replica takes the lead",
        {
            NAN: "0x19 1x200",
            INF: "0x19 1x200",
            NAN_GRADIENT: "0x19 1x200",
            trainer("ling_learning_is_nan"): "0x19 1x200",
            operator(IGNORED, rule="nonFinite"): "1x16 stale",
            operator(IGNORED, rule="nonFinite", pod="o2"): "_x24 1x200",
        },
        {4.5: [], 5: [], 6: [], 14: [], 40: []},
    ),
    Case(
        "a NaN of a run that ignores it, as far as is known: the operator is long away",
        {NAN: "0x79 1x200", operator(IGNORED, rule="nonFinite"): "1x20 stale"},
        {19.75: [], 20: ["LingLossNaN"]},
    ),
    Case(
        "a NaN of a run whose namesake in another namespace ignores it, and which ignores a stall",
        {
            NAN: "0x19 1x200",
            operator(IGNORED, rule="stall"): "1x220",
            f'{IGNORED}{{run="r",run_namespace="other",rule="nonFinite",pod="o"}}': "1x220",
        },
        {4.75: [], 5: ["LingLossNaN"]},
    ),
    Case(
        "a halt, latched from the first sample on, while another replica takes the lead",
        {
            operator("ling_run_halted_timestamp_seconds", reason="ZeroLoss"): "_x4 60x16 stale",
            operator(
                "ling_run_halted_timestamp_seconds", reason="ZeroLoss", pod="o2"
            ): "_x32 60x40 stale",
        },
        {
            0.75: [],
            1.25: ["LingRunDiverged"],
            7: ["LingRunDiverged"],
            18: ["LingRunDiverged"],
            30: [],
        },
        reason={"LingRunDiverged": "ZeroLoss"},
    ),
    Case(
        "a run that failed, and whose object is kept",
        {operator(PHASE, phase="Failed"): "_x4 1x1000"},
        {0.75: [], 1.25: ["LingRunFailed"], 55: ["LingRunFailed"], 90: []},
    ),
    Case(
        "a run that failed half an hour ago fails again",
        {
            operator(PHASE, phase="Failed"): "1x119 stale _x139 1x1000",
            operator(PHASE, phase="Pending"): "_x121 1x138 stale",
        },
        {1: ["LingRunFailed"], 64: [], 66: ["LingRunFailed"], 180: []},
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
        "no step for hours, of a run that ignores a stall",
        {HEARTBEAT: "0x600", STEP_TIME: "2x600", operator(IGNORED, rule="stall"): "1x600"},
        {12: [], 140: []},
    ),
    Case(
        "no step for as long as the run's own rule stall allows",
        {
            HEARTBEAT: "0x300",
            STEP_TIME: "2x300",
            operator("ling_run_stall_patience_seconds"): "3600x300",
        },
        {12: [], 59: [], 62: ["LingRunStalled"]},
    ),
    Case(
        "a process that compiles for as long as the run's own rule stall allows",
        {HEARTBEAT: "0x600", operator("ling_run_stall_patience_seconds"): "7200x600"},
        {32: [], 119: [], 122: ["LingRunStalled"]},
    ),
    Case(
        "no step for ten minutes, where the run's own rule stall allows less",
        {
            HEARTBEAT: "0x200",
            STEP_TIME: "2x200",
            operator("ling_run_stall_patience_seconds"): "60x200",
        },
        {10: [], 11.5: ["LingRunStalled"]},
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
            NAN: "0x16 stale",
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
        "the operator finds a NaN of which Prometheus has no series",
        {operator("ling_run_alert", reason="NonFiniteLoss"): "1x20"},
        {0: ["LingHealthRule"]},
        reason={"LingHealthRule": "NonFiniteLoss"},
    ),
    Case(
        "a run is Running and nobody reads its page",
        {operator(PHASE, phase="Running"): "1x100"},
        {9: [], 11: ["LingMetricsMissing"]},
    ),
    Case(
        "a run is Running, nobody reads its page, and it ignores that",
        {
            operator(PHASE, phase="Running"): "1x100",
            operator(IGNORED, rule="metricsMissing"): "1x100",
        },
        {11: [], 24: []},
    ),
    Case(
        "a run is Running and its page has one series of the contract",
        {
            operator(PHASE, phase="Running"): "1x100",
            trainer("ling_learning_is_nan"): "0x100",
        },
        {11: [], 24: []},
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
