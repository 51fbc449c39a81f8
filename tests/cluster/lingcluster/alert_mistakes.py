"""Plausible mistakes in the chart's alert rules, and the case that notices each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mutation:
    """A plausible mistake in a rule, and the case that must notice it.

    Attributes:
      alert: the rule's name.
      noticed: the case's name.
      replace: text of expr -> what stands there instead.
      fields: fields that differ; None removes one.
    """

    alert: str
    noticed: str
    replace: Mapping[str, str] = field(default_factory=dict[str, str])
    fields: Mapping[str, str | None] = field(default_factory=dict[str, str | None])


FIRST_NAN = "a NaN of one step, between two scrapes, the gauge long back at 0"
_SEEN_BEFORE = (
    'ling_nonfinite_steps_total{kind="nan", signal="NonFiniteLoss"} > 0\n'
    '    unless ling_nonfinite_steps_total{kind="nan", signal="NonFiniteLoss"} offset 10m'
)
_NEVER = "ling_learning_is_nan == 2"
_IGNORES_NAN = "nothing finite, of a run that ignores it, while another replica takes the lead"
MUTATIONS = {
    "waits five minutes": Mutation("LingLossNaN", FIRST_NAN, fields={"for": "5m"}),
    "looks at the gauge only": Mutation(
        "LingLossNaN",
        FIRST_NAN,
        fields={"expr": "max by (run_namespace, run) (ling_learning_is_nan) == 1"},
    ),
    "compares the loss": Mutation(
        "LingLossNaN",
        FIRST_NAN,
        fields={"expr": "max by (run_namespace, run) (ling_learning_lm_loss > 100)"},
    ),
    "does not keep firing": Mutation(
        "LingLossNaN", "a pod that dies right after its NaN", fields={"keep_firing_for": None}
    ),
    "forgets a first value of 1": Mutation(
        "LingLossNaN", "a NaN before the first scrape", {_SEEN_BEFORE: _NEVER}
    ),
    "forgets the gauge": Mutation(
        "LingLossNaN", "a loss that stays NaN", {"ling_learning_is_nan == 1": _NEVER}
    ),
    "finds NaN where a series is": Mutation(
        "LingLossNaN",
        "a NaN in the loss gauge alone, as a stale marker becomes one in other stores",
        fields={"expr": "max by (run_namespace, run) (ling_learning_lm_loss) != 2"},
    ),
    "keeps the pod's label": Mutation(
        "LingLossNaN", FIRST_NAN, {"(run_namespace, run)": "(run_namespace, run, pod)"}
    ),
    "takes NaN for Inf": Mutation(
        "LingLossInf",
        "an infinite loss, whose gradients are not finite either",
        {'"inf"': '"nan"', "_inf": "_nan"},
    ),
    "repeats itself for gradients": Mutation(
        "LingGradientNonFinite",
        "an infinite loss, whose gradients are not finite either",
        {"unless ling_learning_is_inf == 1": ""},
    ),
    "sees gradients by the gauge only": Mutation(
        "LingGradientNonFinite",
        "NaN gradients of a finite loss, in one step",
        fields={"expr": "max by (run_namespace, run) (ling_learning_grad_is_nonfinite) == 1"},
    ),
    **{
        f"{alert} pages for what is ignored": Mutation(
            alert, case, {"ling_run_rule_ignored": "ling_no_such_series"}
        )
        for alert, case in (
            ("LingLossNaN", _IGNORES_NAN),
            ("LingLossInf", _IGNORES_NAN),
            ("LingGradientNonFinite", _IGNORES_NAN),
            ("LingRunStalled", "no step for hours, of a run that ignores a stall"),
            (
                "LingMetricsMissing",
                "a run is Running, nobody reads its page, and it ignores that",
            ),
        )
    },
    "pages when the lead changes": Mutation(
        "LingLossNaN",
        _IGNORES_NAN,
        {
            'max_over_time(ling_run_rule_ignored{rule="nonFinite"}[10m])': (
                'ling_run_rule_ignored{rule="nonFinite"}'
            )
        },
    ),
    "is silent for long after the operator went": Mutation(
        "LingLossNaN",
        "a NaN of a run that ignores it, as far as is known: the operator is long away",
        {'rule="nonFinite"}[10m]': 'rule="nonFinite"}[1h]'},
    ),
    "needs the operator": Mutation(
        "LingLossNaN",
        FIRST_NAN,
        {"unless on (run_namespace, run)": "and on (run_namespace, run) ling_run_phase unless"},
    ),
    "takes a namesake for the run": Mutation(
        "LingLossNaN",
        "a NaN of a run whose namesake in another namespace ignores it, and which ignores a stall",
        {"unless on (run_namespace, run)": "unless on (run)"},
    ),
    "takes one ignored rule for another": Mutation(
        "LingLossNaN",
        "a NaN of a run whose namesake in another namespace ignores it, and which ignores a stall",
        {'{rule="nonFinite"}': ""},
    ),
    "takes a latch for a counter": Mutation(
        "LingRunDiverged",
        "a halt, latched from the first sample on, while another replica takes the lead",
        fields={
            "expr": "max by (run_namespace, run, reason) "
            "(increase(ling_run_halted_timestamp_seconds[10m])) > 0"
        },
    ),
    "resolves while the lead changes": Mutation(
        "LingRunDiverged",
        "a halt, latched from the first sample on, while another replica takes the lead",
        fields={"keep_firing_for": None},
    ),
    "pages for ever": Mutation(
        "LingRunFailed", "a run that failed, and whose object is kept", {"offset 1h": "offset 10h"}
    ),
    "forgets that a run may fail twice": Mutation(
        "LingRunFailed",
        "a run that failed half an hour ago fails again",
        {'phase!="Failed"': 'phase="None"'},
    ),
    "knows no slow steps": Mutation(
        "LingRunStalled",
        "steps of a hundred seconds take no ten minutes to be late",
        {"10 * max": "0 * max"},
    ),
    "takes a slow step for the start": Mutation(
        "LingRunStalled",
        "steps of four minutes are not late after half an hour",
        {"unless on (run_namespace, run) ling_perf_step_time_seconds": ""},
    ),
    "has no patience with compilers": Mutation(
        "LingRunStalled",
        "a process that compiles may take half an hour to its first step",
        {"1800": "600"},
    ),
    "knows no patience but its own": Mutation(
        "LingRunStalled",
        "no step for as long as the run's own rule stall allows",
        {"ling_run_stall_patience_seconds": "ling_no_such_series"},
    ),
    "has patience for ever": Mutation(
        "LingRunStalled",
        "no step for as long as the run's own rule stall allows",
        {"<= on (run_namespace, run)": "> bool on (run_namespace, run)"},
    ),
    "believes that the series of a NaN are always there": Mutation(
        "LingHealthRule",
        "the operator finds a NaN of which Prometheus has no series",
        {"unless on": "and on"},
    ),
    "says a NaN twice": Mutation(
        "LingHealthRule",
        "the operator's rules for loss and zeros have alerts of their own",
        {"ling_nonfinite_steps_total": "ling_no_such_series"},
    ),
    "takes one series for the page": Mutation(
        "LingMetricsMissing",
        "a run is Running and its page has one series of the contract",
        {" or ling_step or ling_learning_is_nan": ""},
    ),
    "misses what is missing": Mutation(
        "LingMetricsMissing", "a run is Running and nobody reads its page", {"unless on": "and on"}
    ),
    "does not see checkpoints turned off": Mutation(
        "LingCheckpointOld",
        "checkpoints are off, or the process has only just started",
        {"ling_checkpoint_period_steps > 0": "ling_checkpoint_period_steps"},
    ),
    "knows no period": Mutation(
        "LingCheckpointOld",
        "no checkpoint for twice the time that a hundred steps take",
        {"2 * max": "0 * max"},
    ),
    "counts repeated steps": Mutation(
        "LingGoodputLow",
        "steps are made all the time, and a restart repeats them",
        {"delta(": "increase("},
    ),
    "judges a pause": Mutation(
        "LingGoodputLow",
        "an hour with a pause is not judged",
        {"Pending|Queued|Suspended": "Pending|Queued"},
    ),
    "takes a standby for a leader": Mutation(
        "LingOperatorDown", "nobody leads", {"ling_operator_leading == 1": "ling_operator_leading"}
    ),
    "zero stands for nothing": Mutation(
        "LingOperatorDown",
        "no operator is there",
        fields={"expr": "(max(ling_operator_leading) or vector(1)) == 0"},
    ),
}
