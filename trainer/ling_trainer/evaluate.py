"""Evaluation between two steps: validation batches through the model, and nothing else changed."""

import logging
from dataclasses import dataclass

import jax

from ling_trainer.data.validation import ValidationSplit
from ling_trainer.distributed import peers_alive
from ling_trainer.eval_step import EvalSums, eval_log
from ling_trainer.reporter import Reporter
from ling_trainer.startup import CompiledEvalStep, Program
from ling_trainer.step import TrainState
from ling_trainer.stop_signal import StopSignal

log = logging.getLogger("ling_trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What evaluates a run.

    Attributes:
      program: places batches and flags on devices.
      step: the compiled forward pass.
      split: validation samples.
    """

    program: Program
    step: CompiledEvalStep
    split: ValidationSplit


def evaluate(
    evaluation: Evaluation,
    state: TrainState,
    number: int,
    *,
    reporter: Reporter,
    signals: StopSignal,
) -> dict[str, float]:
    """Run the model forward on the validation batches of a step.

    State and training data are left alone. After each batch the processes agree whether to go on:
    an evaluation gives way to a signal, and the step after it makes the checkpoint.

    Args:
      evaluation: everything but the state.
      state: after the step; not donated.
      number: of the step just finished.
      reporter: hears of each batch, so that a long evaluation does not look like a stall.
      signals: asked whether to stop.

    Returns:
      Log keys and values, see eval_log; empty where it gave way. A value that is not finite is
      told like any other: it stops no run.

    Raises:
      EndRun: a peer was lost.
      DataError: a validation sample cannot be read.
    """
    program, done, count = evaluation.program, list[EvalSums](), evaluation.split.num_batches
    with evaluation.split.batches(number, rows=program.local_rows()) as batches:
        for place in range(1, count + 1):
            batch = program.place(next(batches)._asdict())
            flag = program.flag(stop=signals.requested)
            with peers_alive(f"evaluating step {number}, batch {place}"):
                result = evaluation.step(state.params, state.router_bias, batch, flag)
                sums, stop = jax.device_get(result)
            done.append(sums)
            reporter.beat()
            if stop and place < count:
                log.warning("the evaluation of step %d gives way to a signal", number)
                return {}
    per_layer = program.config.loss.mtp_per_layer_loss_norm
    return eval_log(done, mtp_per_layer_loss_norm=per_layer)
