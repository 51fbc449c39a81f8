"""When a run is evaluated, and on how much of its validation data. No JAX."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from ling_trainer.schema import Schema, require


class EvalConfig(Schema):
    """Loss on held-out data, between steps; it changes nothing of the training."""

    eval_interval: Annotated[int, Field(ge=-1)] = -1
    """Steps between evaluations; the last step is evaluated too. -1 or 0 never evaluates."""
    eval_steps: Annotated[int, Field(ge=-1)] = -1
    """Global batches an evaluation. Each evaluation goes on where the one before ended, as
    Megatron's does; -1 reads the whole validation split once, every time."""

    @property
    def enabled(self) -> bool:
        """Whether the run is evaluated at all."""
        return self.eval_interval > 0

    @property
    def whole_split(self) -> bool:
        """Whether an evaluation reads every validation sample once."""
        return self.eval_steps == -1

    def is_due(self, step: int, *, last_step: int) -> bool:
        """Tell whether to evaluate after a step, the first being 1."""
        return self.enabled and (step % self.eval_interval == 0 or step == last_step)

    def first_batch(self, step: int) -> int:
        """Return the validation batch that the evaluation after a step begins with.

        A closed form of the step: a resumed run reads the same batches at the same step. An
        evaluation at the last step takes the number that the next multiple of eval_interval has.
        """
        return 0 if self.whole_split else (step - 1) // self.eval_interval * self.eval_steps

    def num_samples(self, *, steps: int, global_batch_size: int) -> int | None:
        """Return how many samples the validation split is made for; None for the split as it is.

        Source: Megatron-LM megatron/training/training.py@d98e8a64
        (build_train_valid_test_datasets): (train_iters // eval_interval + 1) * eval_iters batches.
        """
        if not self.enabled or self.whole_split:
            return None
        return (steps // self.eval_interval + 1) * self.eval_steps * global_batch_size

    @model_validator(mode="after")
    def _check(self) -> Self:
        require(
            (
                (
                    not self.enabled or self.eval_steps != 0,
                    f"eval_steps=0 with eval_interval={self.eval_interval} evaluates nothing; use "
                    "a positive number, -1 for the whole split, or eval_interval=-1",
                ),
            )
        )
        return self
