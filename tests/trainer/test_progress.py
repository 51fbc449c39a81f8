"""What a run has been through, folded step by step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ling_trainer.health_metrics import NonFinite, Signal
from ling_trainer.progress import Progress, fold, may_be_saved, resumed_at
from ling_trainer.report import NonFiniteStep

BAD = NonFiniteStep(signal=Signal.NON_FINITE_GRADIENT, kind=NonFinite.INF, value=math.inf)


def run(pattern: list[bool], start: Progress = Progress()) -> Progress:  # noqa: B008
    """Fold a step for each entry, True for a finite one."""
    progress = start
    for offset, finite in enumerate(pattern, start=1):
        bad = None if finite else BAD
        progress = fold(progress, step=start.step + offset, tokens=5, bad=bad, now=float(offset))
    return progress


@given(st.lists(st.booleans(), max_size=30))
def test_counters_never_fall_and_add_up(pattern):
    before = Progress()
    for end in range(len(pattern) + 1):
        after = run(pattern[:end])
        assert after.steps_total == end
        assert sum(after.nonfinite_steps.values()) == pattern[:end].count(False)
        assert after.longest_nonfinite_row >= before.longest_nonfinite_row
        assert after.nonfinite_row <= after.longest_nonfinite_row
        before = after


def test_a_finite_step_ends_a_row_but_not_the_record_of_it():
    progress = run([True, False, False, True, False])
    assert (progress.nonfinite_row, progress.longest_nonfinite_row) == (1, 2)
    assert (progress.last_finite_step, progress.last_nonfinite_step) == (4, 5)


def test_a_resumed_run_counts_steps_of_this_process_and_numbers_steps_of_the_run():
    progress = run([True, True], resumed_at(40))
    assert (progress.step, progress.last_finite_step, progress.steps_total) == (42, 42, 2)


def test_a_step_without_tokens_is_empty_and_finite():
    progress = fold(Progress(), step=1, tokens=0, bad=None, now=1.0)
    assert (progress.empty_steps_total, progress.last_finite_step) == (1, 1)


@pytest.mark.parametrize(
    ("bad", "norm", "saved"),
    [(None, 1.0, True), (BAD, 1.0, False), (None, math.nan, False), (None, math.inf, False)],
)
def test_only_a_finite_step_with_a_finite_result_may_be_saved(bad, norm, saved):
    assert may_be_saved(bad, norm) is saved
