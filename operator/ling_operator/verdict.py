"""Is this run healthy? A fold over samples, and a judgement of the fold. Pure.

What the fold keeps is in the object's status, so that a restarted operator goes on where the last
one was. Rules: nonfinite.py, series_rules.py, liveness.py; thresholds: health_policy.py.
"""

from ling_operator.api import HealthPolicy, HealthState, Reason
from ling_operator.health import Health, HealthSample, Heartbeat, Verdict
from ling_operator.health_state import Window
from ling_operator.liveness import (
    brought_back,
    fold_heartbeats,
    fold_liveness,
    is_ahead,
    judge_stall,
    judge_straggler,
)
from ling_operator.nonfinite import fold_nonfinite, judge_nonfinite
from ling_operator.series_rules import fold_series, judge_series, series_missing
from ling_trainer.health_metrics import HEARTBEAT, IS_NAN, STEP

__all__ = [
    "Health",
    "HealthSample",
    "Heartbeat",
    "Verdict",
    "brought_back",
    "findings",
    "fold",
    "fold_heartbeats",
    "is_ahead",
    "judge",
]


def fold(state: HealthState, sample: HealthSample, policy: HealthPolicy) -> HealthState:
    """Take one page into account; the same page again, or an older one, changes nothing.

    A process that started anew (another pod, or a counter or step that fell) starts a new row of
    non-finite steps: it goes on from a checkpoint, and its own counters say what it has seen.
    The attempt's sums and its highest step go on, and so do the windows of the series, less the
    steps that are done again.

    Args:
      state: as stored.
      sample: one page of the attempt's process 0.
      policy: thresholds that say which steps are suspicious.
    """
    if state.sample_time is not None and sample.time <= state.sample_time:
        return state
    before = _of_this_process(state, sample)
    step = before.step if sample.step is None else sample.step
    update: dict[str, object] = {
        "pod_uid": sample.pod_uid,
        "sample_time": sample.time,
        "step": step,
        "highest_step": max(before.highest_step, step),
        "shows_step": sample.step is not None,
    }
    update |= fold_nonfinite(before, sample)
    update |= fold_liveness(before, sample, step=step)
    if step > before.step and update["stepping"]:
        update |= fold_series(before, sample, policy, step=step)
    if update["stepping"] or sample.step is None:  # a first step brings most series
        update["missing"] = missing_series(sample, policy)
    return before.model_copy(update=update)


def missing_series(sample: HealthSample, policy: HealthPolicy) -> tuple[str, ...]:
    """Name the rules, less those that are ignored, whose series the page lacks, and the series."""
    without_step = (STEP.name,) if sample.step is None else ()
    row = policy.non_finite.consecutive_steps > 1 and sample.consecutive_max is None
    signal = () if sample.shows_nonfinite else (IS_NAN.name,)
    beat = (HEARTBEAT.name,) if sample.heartbeat is None else ()
    lacking = {
        "nonFinite": signal + (without_step if row else ()),
        **series_missing(sample),
        "stall": without_step if sample.heartbeat is None else (),
        "straggler": beat,
    }
    ignored = policy.ignored
    return tuple(
        f"{rule} ({', '.join(names)})"
        for rule, names in lacking.items()
        if names and rule not in ignored
    )


def findings(state: HealthState, policy: HealthPolicy) -> tuple[Verdict, ...]:
    """Return the verdicts of every rule that holds and is not ignored; the gravest first."""
    if state.sample_time is None:
        return ()
    found = (
        judge_nonfinite(state, policy),
        *judge_series(state, policy),
        judge_stall(state, policy),
        judge_straggler(state, policy),
    )
    told = [verdict for verdict in found if verdict is not None and verdict.action != "Ignore"]
    return tuple(sorted(told, key=lambda verdict: verdict.action != "Halt"))


def judge(state: HealthState, policy: HealthPolicy) -> Verdict:
    """Read the gravest verdict off the state; without a page there is none."""
    if state.sample_time is None:
        return Verdict(
            health=Health.UNKNOWN, reason=Reason.NO_SAMPLE_YET, message="No metrics were read yet."
        )
    for verdict in findings(state, policy):
        return verdict
    return Verdict(
        health=Health.HEALTHY,
        reason=Reason.HEALTHY,
        message=f"{state.nonfinite_steps} non-finite steps so far.",
    )


def _of_this_process(state: HealthState, sample: HealthSample) -> HealthState:
    """Return the state with the per-process part cleared if the process is a new one."""
    counted = sum(count for _, count in sample.nonfinite_steps)
    restarted = state.pod_uid is not None and (
        state.pod_uid != sample.pod_uid
        or (sample.step is not None and sample.step < state.step)
        or (bool(sample.nonfinite_steps) and counted < state.process_nonfinite_steps)
    )
    if not restarted:
        return state
    return state.model_copy(
        update={
            "pod_uid": None,
            "step": 0,
            "process_nonfinite_steps": 0,
            "nonfinite_row": 0,
            "longest_nonfinite_row": 0,
            "last_finite_step": 0,
            "stepping": False,
            "step_seconds": Window(),
            "straggler": None,
            "straggler_seconds": None,
        }
    )
