"""Does a run still move? Stalls, and hosts that are behind: what is one, and what is not."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from ling_operator.api import HealthPolicy, HealthState
from ling_operator.verdict import HealthSample, Heartbeat, findings, fold, fold_heartbeats

START = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)
DEFAULTS = HealthPolicy()


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def page(step: int, seconds: float, **series: Any) -> HealthSample:
    time = at(seconds)
    moving = {"pod_uid": "pod-0", "lm_loss": 3.0, "last_step_time": time, "heartbeat": time}
    return HealthSample(time=time, step=step, **(moving | series))


def moving_run() -> HealthState:
    """The state of a run whose steps take 5 s, after 29 of them."""
    state = HealthState()
    for step in range(1, 30):
        state = fold(state, page(step, 5.0 * step), DEFAULTS)
    return state


def reasons(state: HealthState) -> list[str]:
    return [str(verdict.reason) for verdict in findings(state, DEFAULTS)]


class Clock:
    """Pages of a process whose steps take 60 s."""

    def __init__(self) -> None:
        self.state = HealthState()

    def see(self, seconds: float, step: int, **series: Any) -> list[str]:
        self.state = fold(self.state, page(step, seconds, **series), DEFAULTS)
        return reasons(self.state)

    def start(self, steps: int = 20) -> float:
        starting = {"lm_loss": None, "last_step_time": None, "heartbeat": START}
        self.see(0, 0, **starting)
        for step in range(1, steps + 1):
            self.see(600 + 60 * step, step)
        return 600 + 60 * steps


STANDING = {"heartbeat": START, "last_step_time": START}


def test_a_run_without_a_step_for_ten_minutes_stalls() -> None:
    clock = Clock()
    end = clock.start()
    assert clock.see(end + 600, 20, **STANDING) == []
    assert clock.see(end + 601, 20, **STANDING) == ["Stalled"]
    assert clock.see(end + 700, 21) == []


def test_the_patience_of_a_run_with_long_steps_is_three_of_them() -> None:
    clock = Clock()
    for step in range(10):
        clock.see(1000 * step, step)
    assert clock.see(9000 + 3000, 9, **STANDING) == []
    assert clock.see(9000 + 3001, 9, **STANDING) == ["Stalled"]


def test_a_process_that_compiles_has_half_an_hour() -> None:
    clock = Clock()
    starting = {"lm_loss": None, "last_step_time": None, "heartbeat": START}
    assert clock.see(0, 0, **starting) == []
    assert clock.see(1000, 500, **starting) == []  # a checkpoint was restored
    assert clock.see(2800, 500, **starting) == []
    assert clock.see(2801, 500, **starting) == ["Stalled"]
    assert clock.see(3000, 501) == []
    clock.see(3060, 502)
    assert clock.state.step_seconds.values == (60.0,), "compiling is no step"


def test_a_new_process_is_judged_anew_whatever_its_clock_says() -> None:
    clock = Clock()
    for step in range(10):
        clock.see(1000 * step, step)
    clock.state = clock.state.model_copy(update={"straggler": "node-3", "straggler_seconds": 999})
    anew = {"pod_uid": "pod-0b"}
    starting = anew | {"lm_loss": None, "last_step_time": None, "heartbeat": at(-3600)}
    assert clock.see(10_000, 0, **starting) == []
    assert clock.see(11_700, 0, **starting) == []  # it compiles
    for step in range(1, 5):
        assert clock.see(11_700 + 10 * step, step, **anew) == []
    standing = anew | STANDING
    assert clock.see(11_740 + 600, 4, **standing) == []
    assert clock.see(11_740 + 601, 4, **standing) == ["Stalled"]


def test_a_validation_that_takes_an_hour_is_no_stall() -> None:
    clock = Clock()
    end = clock.start()
    for seconds in range(60, 3600, 60):
        beat = {"heartbeat": at(end + seconds), "last_step_time": at(end)}
        assert clock.see(end + seconds, 20, **beat) == []


def test_an_operator_that_was_away_takes_its_absence_for_nothing() -> None:
    clock = Clock()
    end = clock.start()
    assert reasons(clock.state) == []
    assert clock.see(end + 36_000, 500) == []


def test_one_host_behind_the_others_is_named() -> None:
    state = moving_run()
    beats = [
        Heartbeat(host=f"node-{i}", pod_uid=f"pod-{i}", read_time=at(300 + i), time=at(299 + i))
        for i in range(4)
    ]
    behind = replace(beats[2], time=at(100))
    late = fold_heartbeats(state, [*beats[:2], behind, beats[3]], DEFAULTS)
    (verdict,) = findings(late, DEFAULTS)
    assert (verdict.reason, verdict.value) == ("StragglerHost", "202 s")
    assert "node-2 is 202 s behind" in verdict.message
    assert verdict.restore_before_step is None
    read_later = replace(beats[3], read_time=at(900))
    beats_then = [*beats[:2], behind, read_later]
    assert reasons(fold_heartbeats(state, beats_then, DEFAULTS)) == ["StragglerHost"]
    assert findings(fold_heartbeats(late, beats, DEFAULTS), DEFAULTS) == ()
    assert fold_heartbeats(late, [], DEFAULTS) == late  # nothing new is nothing


def test_hosts_that_stand_together_or_were_read_earlier_are_not_behind() -> None:
    state = moving_run()
    hang = [
        Heartbeat(host=f"node-{i}", pod_uid=f"pod-{i}", read_time=at(9000), time=at(150 + i))
        for i in range(4)
    ]
    assert reasons(fold_heartbeats(state, hang, DEFAULTS)) == []
    unread = replace(hang[0], read_time=at(160), time=at(155))
    moving = [replace(beat, time=at(8990)) for beat in hang[1:]]
    assert reasons(fold_heartbeats(state, [unread, *moving], DEFAULTS)) == []
