"""The `for` over steps: when to save, when to stop, and why."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from ling_trainer.checkpoint import Checkpoints
from ling_trainer.config import RunConfig
from ling_trainer.data.packing import PackedBatch
from ling_trainer.distributed import peers_alive
from ling_trainer.ends import Ending, ExitCode
from ling_trainer.evaluate import Evaluation, evaluate
from ling_trainer.faults import poison_of, strike
from ling_trainer.progress import Progress, may_be_saved
from ling_trainer.report import NonFiniteStep, StepReport
from ling_trainer.reporter import Reporter
from ling_trainer.run_record import RunRecord
from ling_trainer.startup import Program
from ling_trainer.step import TrainState
from ling_trainer.step_programs import StepPrograms
from ling_trainer.stop_signal import StopSignal

log = logging.getLogger("ling_trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the loop works with.

    Attributes:
      config: of the run.
      program: places batches and flags on devices.
      steps: the compiled step; it takes a poison exactly if config.fault.enabled.
      batches: this process's rows, from the first step to do.
      record: what every checkpoint says about the run.
      checkpoints: None where checkpointing is off.
      evaluation: None where the run is not evaluated.
      reporter: told about every step.
      signals: asked whether to stop.
    """

    config: RunConfig
    program: Program
    steps: StepPrograms
    batches: Iterator[PackedBatch]
    record: RunRecord
    checkpoints: Checkpoints | None
    evaluation: Evaluation | None
    reporter: Reporter
    signals: StopSignal


@dataclass(frozen=True, slots=True)
class _Done:
    """A finished step, on the host."""

    report: StepReport
    stop: bool
    tokens: int  # of the batch, padding included


def train(run: Run, state: TrainState) -> Ending:
    """Do the steps that are left; every process returns at the same step, for the same reason.

    Args:
      run: everything but the state.
      state: after `state.step` steps; donated.

    Returns:
      FINISHED, DIVERGED or STOPPED. A save may still be under way.

    Raises:
      EndRun: a peer was lost or storage failed.
      DataError: the data of a step cannot be read.
    """
    config, signals = run.config, run.signals
    save_due = False
    for number in range(int(state.step) + 1, config.steps + 1):
        strike(config.fault, number)
        began = time.monotonic()
        state, done = _one_step(run, state, number)
        seconds = time.monotonic() - began
        bad = run.reporter.finish_step(done.report, seconds=seconds, tokens=done.tokens)
        if bad and _diverged(config, run.reporter.progress):
            run.reporter.record_step({})
            signals.phase = "leaving"
            return _divergence(bad, run.reporter.progress)
        signals.phase = "training"
        _evaluate_and_record(run, state, number, give_way=done.stop)
        last = number == config.steps
        save_due |= last or done.stop or number % config.checkpoint.checkpoint_period == 0
        if save_due and run.checkpoints and may_be_saved(bad, float(done.report.param_norm)):
            with peers_alive(f"saving step {number}"):
                run.checkpoints.save(number, state, run.record)
            save_due = False
        if run.checkpoints:
            run.reporter.checkpoint_committed(run.checkpoints.newest_committed)
        if done.stop and not last:
            return _stopped(number, run.reporter.progress)
    return finished(config.steps, run.reporter.progress)


def finished(steps: int, progress: Progress) -> Ending:
    """Build the ending of a run whose steps are all done."""
    return Ending(
        code=ExitCode.FINISHED,
        reason="Finished",
        message=f"all {steps} steps are done",
        step=steps,
        last_finite_step=progress.last_finite_step,
    )


def _one_step(run: Run, state: TrainState, number: int) -> tuple[TrainState, _Done]:
    """Do one step and read its report.

    The report is read before the next step starts: what may be saved and who has to stop is
    decided from it, and on a state that a later step has not yet replaced.
    """
    program, fault = run.program, run.config.fault
    batch = program.place(next(run.batches)._asdict())
    step = run.steps.of(batch)
    poison = [program.poison(poison_of(fault, number))] if fault.enabled else []
    flag = program.flag(stop=run.signals.requested)
    with peers_alive(f"step {number}"):
        result = step(state, batch, flag, *poison)
        report, stop = jax.device_get((result.report, result.stop))
    return result.state, _Done(report, bool(stop), batch.inputs.size)


def _evaluate_and_record(run: Run, state: TrainState, number: int, *, give_way: bool) -> None:
    """Evaluate if it is the turn of the step, then write the step's line, whatever happens.

    Before the save: a checkpoint of a step says that the step's evaluation is on record, so that
    a restart neither misses nor repeats one. What gives way to a signal is not made up for.
    """
    config, values = run.config, dict[str, float]()
    due = config.evaluation.is_due(number, last_step=config.steps)
    try:
        if run.evaluation and due and not give_way:
            values = evaluate(
                run.evaluation, state, number, reporter=run.reporter, signals=run.signals
            )
    finally:
        run.reporter.record_step(values)


def _diverged(config: RunConfig, progress: Progress) -> bool:
    health = config.health
    return health.trainer_stops and progress.nonfinite_row >= health.non_finite_consecutive_steps


def _divergence(bad: NonFiniteStep, progress: Progress) -> Ending:
    return Ending(
        code=ExitCode.DIVERGED,
        reason=str(bad.signal),
        message=f"step {progress.step}: {bad.signal} ({bad.kind}) for {progress.nonfinite_row} "
        f"steps in a row; the last finite step is {progress.last_finite_step}",
        step=progress.step,
        last_finite_step=progress.last_finite_step,
        value=str(bad.kind),
        signal=str(bad.signal),
    )


def _stopped(number: int, progress: Progress) -> Ending:
    return Ending(
        code=ExitCode.STOPPED,
        reason="Stopped",
        message=f"stopped by a signal after step {number}",
        step=number,
        last_finite_step=progress.last_finite_step,
    )
