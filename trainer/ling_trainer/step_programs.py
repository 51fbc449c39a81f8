"""The compiled steps of a run: one, or one for each batch size while it ramps up."""

import logging

from ling_trainer.batch import Batch
from ling_trainer.startup import CompiledStep, Program

log = logging.getLogger("ling_trainer")


class StepPrograms:
    """The compiled step of the batch size at hand; another one when its first batch comes.

    Only one is kept: code of a program that does not run takes memory of the devices all the same.
    """

    def __init__(self, program: Program, *, with_poison: bool, batch_size: int) -> None:
        """Compile the step of the batch size that the run begins with, or goes on with."""
        self._program = program
        self._with_poison = with_poison
        self._batch_size = batch_size
        self._step = program.compile(with_poison=with_poison, batch_size=batch_size)

    def of(self, batch: Batch) -> CompiledStep:
        """Return the step of this batch."""
        rows = batch.loss_mask.shape[0]
        if rows != self._batch_size:
            log.info("global_batch_size=%d after %d; compiling its step", rows, self._batch_size)
            del self._step
            self._step = self._program.compile(with_poison=self._with_poison, batch_size=rows)
            self._batch_size = rows
        return self._step
