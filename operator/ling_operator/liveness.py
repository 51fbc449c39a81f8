"""Does the run still move? Stalls and stragglers. Pure.

Silence is measured from page to page, never up to now: while no page can be read, or the operator
is away, nothing is known of the trainer.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from statistics import median

from ling_operator.api import HealthPolicy, HealthState, Reason
from ling_operator.health import Health, HealthSample, Heartbeat, Verdict
from ling_operator.health_state import Window

_CLOCK_ERROR = timedelta(minutes=1)
STEP_TIMES_KEPT = 20
"""Times of a step that the median is of."""


def fold_liveness(before: HealthState, sample: HealthSample, *, step: int) -> dict[str, object]:
    """Return what a new page changes of the signs of life.

    Args:
      before: of the same process; see verdict.fold.
      sample: a page that was not folded yet.
      step: on the page, or the last one known.
    """
    is_first = before.pod_uid is None
    advanced = step > before.step or is_first
    beat = sample.heartbeat or before.heartbeat_time
    heard = beat is not None and beat > (before.heartbeat_time or beat)
    # A step number that rises from 0 may be the checkpoint's; the loss appears with a step.
    has_loss = sample.lm_loss is not None or sample.loss is not None
    stepped = advanced and not is_first and (has_loss or before.step > 0)
    update: dict[str, object] = {
        "progress_time": sample.time if advanced else before.progress_time,
        "alive_time": sample.time if advanced or heard else before.alive_time,
        "heartbeat_time": beat,
        "stepping": before.stepping or stepped or sample.last_step_time is not None,
    }
    if stepped and before.stepping and before.progress_time is not None:
        seconds = (sample.time - before.progress_time).total_seconds() / (step - before.step)
        update["step_seconds"] = _appended(before.step_seconds, step, seconds)
    return update


def is_ahead(moment: datetime, now: datetime) -> bool:
    """Tell whether a moment lies so far ahead that the clock was wrong when it was noted."""
    return moment - now >= _CLOCK_ERROR


def brought_back(state: HealthState, sample: HealthSample, now: datetime) -> HealthState:
    """Return the state with no time that lies ahead of a page.

    A clock that was wrong has been set back, or another replica's was. Every page would be older
    than the last one, and count for nothing, until the clock gets there again.
    """
    if state.sample_time is None or not is_ahead(state.sample_time, now):
        return state
    times = {"progress_time": state.progress_time, "alive_time": state.alive_time}
    earlier = {k: min(time, sample.time) for k, time in times.items() if time is not None}
    return state.model_copy(update={"sample_time": None, **earlier})


def fold_heartbeats(
    state: HealthState, heartbeats: Iterable[Heartbeat], policy: HealthPolicy
) -> HealthState:
    """Note the host that is furthest behind; without at least two hosts nothing changes.

    A host is behind the newest heartbeat of all, as far as that was due when its own was read.
    """
    beats = tuple(heartbeats)
    if len(beats) < 2:
        return state
    newest = max(beat.time for beat in beats)
    worst = max(beats, key=lambda beat: min(newest, beat.read_time) - beat.time)
    behind = min(newest, worst.read_time) - worst.time
    rule = policy.straggler
    late = behind > _patience(state, rule.factor, rule.floor_seconds)
    return state.model_copy(
        update={
            "straggler": worst.host if late else None,
            "straggler_seconds": round(behind.total_seconds()) if late else None,
        }
    )


def judge_stall(state: HealthState, policy: HealthPolicy) -> Verdict | None:
    """Return the verdict of stall if it holds."""
    rule = policy.stall
    if state.sample_time is None or state.alive_time is None:
        return None
    silence, patience = state.sample_time - state.alive_time, stall_patience(state, policy)
    if silence <= patience:
        return None
    where = f"after step {state.step}" if state.stepping else "before the process's first step"
    seconds = f"{silence.total_seconds():.0f} s"
    return Verdict(
        health=Health.STALLED,
        reason=Reason.STALLED,
        message=(
            f"No sign of life for {seconds} {where}; "
            f"spec.health.stall allows {patience.total_seconds():.0f} s."
        ),
        action=rule.action,
        step=state.step,
        value=seconds,
    )


def stall_patience(state: HealthState, policy: HealthPolicy) -> timedelta:
    """Return how long process 0 may be silent; before its first step it starts and compiles."""
    rule = policy.stall
    if not state.stepping:
        return timedelta(seconds=rule.compile_grace_seconds)
    return _patience(state, rule.factor, rule.floor_seconds)


def judge_straggler(state: HealthState, policy: HealthPolicy) -> Verdict | None:
    """Return the verdict of straggler if it holds."""
    if state.sample_time is None or state.straggler is None:
        return None
    seconds = f"{state.straggler_seconds or 0} s"
    return Verdict(
        health=Health.STALLED,
        reason=Reason.STRAGGLER_HOST,
        message=f"The heartbeat of {state.straggler} is {seconds} behind the other hosts'.",
        action=policy.straggler.action,
        step=state.step,
        value=seconds,
    )


def _patience(state: HealthState, factor: float, floor_seconds: int) -> timedelta:
    """Return max(factor x median time of a step, floor)."""
    times = state.step_seconds.values
    usual = factor * median(times) if times else 0.0
    return timedelta(seconds=max(usual, floor_seconds))


def _appended(window: Window, step: int, seconds: float) -> Window:
    kept = slice(-STEP_TIMES_KEPT, None)
    rounded = float(f"{seconds:.4g}")
    return Window(steps=(*window.steps, step)[kept], values=(*window.values, rounded)[kept])
