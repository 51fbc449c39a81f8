"""Batch-size ramp-up: how many samples each step reads, as Megatron's --rampup-batch-size. No JAX.

B is the full batch size, K its micro-batches. A smaller batch has fewer micro-batches of the same
B / K rows, so samples stay in their order and only the ends of steps move.
"""

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ling_trainer.schema import Rules

MAX_SAMPLES = 2**30
"""Samples of a ramp-up stay below; the position in it is an int32."""

type RampUp = tuple[int, ...]
"""start, increment, samples."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps in a row that have the same batch size.

    Attributes:
      first_step: steps before it.
      first_sample: samples that those read.
      batch_size: samples of each of its steps.
      num_microbatches: of each of its steps.
    """

    first_step: int
    first_sample: int
    batch_size: int
    num_microbatches: int


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The stages of a run, in order. The last has the full batch and no end."""

    stages: tuple[Stage, ...]

    @property
    def full(self) -> Stage:
        """The stage of the full batch."""
        return self.stages[-1]

    def stage_at(self, step: int) -> Stage:
        """Return the stage of the step that comes after `step` finished ones."""
        place = bisect.bisect_right(self.stages, step, key=lambda stage: stage.first_step)
        return self.stages[place - 1]

    def samples_before(self, step: int) -> int:
        """Return the samples that the first `step` steps read."""
        stage = self.stage_at(step)
        return stage.first_sample + (step - stage.first_step) * stage.batch_size

    def spans(self, start: int, stop: int) -> Iterator[tuple[Stage, int, int]]:
        """Cut steps start to stop - 1 by stages: (stage, its first of them, its last plus one)."""
        while start < stop:
            stage = self.stage_at(start)
            later = (s.first_step for s in self.stages if s.first_step > start)
            end = min(stop, next(later, stop))
            yield stage, start, end
            start = end


def constant_batch(batch_size: int, *, num_microbatches: int) -> BatchSizes:
    """Return the one stage of a run that does not ramp up."""
    return BatchSizes((Stage(0, 0, batch_size, num_microbatches),))


def ramp_up_stages(rampup: RampUp, *, batch_size: int, num_microbatches: int) -> BatchSizes:
    """Lay out the stages of a ramp-up.

    After c samples a step has start + int(c / (samples / n)) * increment of them, with
    n = (B - start) / increment; B once c is above `samples`. Each step is of one size, so a stage
    ends with the first step that begins past its last sample.

    Args:
      rampup: start, increment, samples; ramp_up_rules must hold for it.
      batch_size: B.
      num_microbatches: K.

    Source: Megatron-LM megatron/core/num_microbatches_calculator.py@00caa53a,
      RampupBatchsizeNumMicroBatchesCalculator (core 0.13 has it; core 0.19 ignores the flag).
    """
    start, increment, samples = rampup
    # A float that is divided by, as in Megatron, so that both round alike.
    samples_per_increment = samples / ((batch_size - start) // increment)

    def size_after(consumed: int) -> int:
        if consumed > samples:
            return batch_size
        return start + int(consumed / samples_per_increment) * increment

    rows = batch_size // num_microbatches
    stages = [Stage(0, 0, start, start // rows)]
    while (last := stages[-1]).batch_size < batch_size:
        step, consumed = _first_larger(last, size_after, within=samples)
        size = size_after(consumed)
        stages.append(Stage(step, consumed, size, size // rows))
    return BatchSizes(tuple(stages))


def ramp_up_rules(rampup: RampUp, *, batch_size: int, num_microbatches: int) -> Rules:
    """Return what must hold for a ramp-up to B samples in K micro-batches; K divides B."""
    start, increment, samples = rampup
    given = f"data.rampup_batch_size={list(rampup)}"
    rows = batch_size // num_microbatches
    return (
        (
            start < batch_size,
            f"{given} starts at {start} and data.global_batch_size={batch_size}; start below it, "
            "or leave the ramp-up out",
        ),
        (
            (batch_size - start) % increment == 0,
            f"{given} does not reach data.global_batch_size={batch_size} in increments of "
            f"{increment}; choose an increment that divides {batch_size - start}",
        ),
        (
            increment % rows == 0,  # and so is start, by the rule before
            f"{given} has an increment that is no multiple of the {rows} rows of a micro-batch "
            f"(data.global_batch_size={batch_size} / gradient_accumulation_steps="
            f"{num_microbatches}); choose a multiple, or more micro-batches",
        ),
        (
            samples < MAX_SAMPLES,
            f"{given} ramps up over {samples} samples; stay below {MAX_SAMPLES}",
        ),
    )


def _first_larger(
    stage: Stage, size_after: Callable[[int], int], *, within: int
) -> tuple[int, int]:
    """Find the first step after a stage, and the samples before it; sizes never fall."""

    def is_larger(steps: int) -> bool:
        return size_after(stage.first_sample + steps * stage.batch_size) > stage.batch_size

    longest = (within - stage.first_sample) // stage.batch_size + 1
    steps = 1 + bisect.bisect_left(range(1, longest + 1), True, key=is_larger)
    return stage.first_step + steps, stage.first_sample + steps * stage.batch_size
