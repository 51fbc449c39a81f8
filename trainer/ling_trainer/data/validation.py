"""Validation samples of a run: which an evaluation reads, and from where."""

from collections.abc import Sequence
from dataclasses import dataclass

from ling_trainer.data.index_file import DataError
from ling_trainer.data.loader import Loader
from ling_trainer.data.order import SampleOrder
from ling_trainer.data.source import Samples, open_dataset, open_source
from ling_trainer.data_config import DataConfig
from ling_trainer.eval_config import EvalConfig


@dataclass(frozen=True, kw_only=True)
class ValidationSplit:
    """What a run is evaluated on.

    Attributes:
      samples: of the split.
      num_samples: how many; None where no evaluation comes to their end.
      evaluation: how many batches an evaluation reads.
      data: end-of-document and padding rules, and how to read ahead.
      global_batch_size: B, rows of a validation batch over all processes: that of a step.
      num_microbatches: K, as in training.
    """

    samples: Samples
    num_samples: int | None
    evaluation: EvalConfig
    data: DataConfig
    global_batch_size: int
    num_microbatches: int

    @property
    def num_batches(self) -> int:
        """Batches of one evaluation."""
        if self.num_samples is None:
            return self.evaluation.eval_steps
        return -(-self.num_samples // self.global_batch_size)

    def batches(self, step: int, *, rows: Sequence[int]) -> Loader:
        """Read this process's rows of the evaluation after a step, ahead of their use.

        They depend on the step alone, so a resumed run reads the same. The last batch of a whole
        split is filled up with padding rows. Close what is returned.

        Args:
          step: the step just finished; the first is 1.
          rows: this process's rows of the global batch, in order.
        """
        first = self.evaluation.first_batch(step)
        return Loader(
            self.samples,
            # Worker processes need seconds to start, and would for every evaluation.
            self.data.model_copy(update={"grain_worker_count": 0}),
            rows=rows,
            global_batch_size=self.global_batch_size,
            num_microbatches=self.num_microbatches,
            start_step=first,
            num_steps=first + self.num_batches,
            num_samples=self.num_samples,
        )


def validation_order(
    evaluation: EvalConfig,
    saved: SampleOrder | None,
    *,
    steps: int,
    global_batch_size: int,
) -> SampleOrder | None:
    """Pin how many samples the validation split is made for, as it is done for training.

    Args:
      evaluation: how much is read, and when.
      saved: the order of the checkpoint that the run goes on from; None without one.
      steps: of the whole run.
      global_batch_size: B.

    Returns:
      What the next checkpoint says; None where nothing is read in an order that needs it.
    """
    needed = evaluation.num_samples(steps=steps, global_batch_size=global_batch_size)
    if needed is None:
        return saved
    return saved.extended(needed) if saved else SampleOrder((needed,))


def open_validation(
    data: DataConfig,
    evaluation: EvalConfig,
    *,
    vocab_size: int,
    order: SampleOrder | None,
    global_batch_size: int,
    num_microbatches: int,
) -> ValidationSplit:
    """Open the validation split that the configuration names.

    Args:
      data: type and path of the data, split, seed, sequence length.
      evaluation: how many batches an evaluation reads.
      vocab_size: token ids must be below it.
      order: how many samples the split is made for, as pinned in the checkpoint; not used for a
        whole split.
      global_batch_size: B.
      num_microbatches: K.

    Raises:
      DataError: files that are missing, damaged or too small; or a whole split is asked of data
        that are blended by weight and have no end.
    """
    try:
        samples, num_samples = _open(data, vocab_size, None if evaluation.whole_split else order)
    except DataError as error:
        raise DataError(f"{error}; evaluation.eval_interval=-1 does without evaluation") from error
    return ValidationSplit(
        samples=samples,
        num_samples=num_samples,
        evaluation=evaluation,
        data=data,
        global_batch_size=global_batch_size,
        num_microbatches=num_microbatches,
    )


def _open(
    data: DataConfig, vocab_size: int, order: SampleOrder | None
) -> tuple[Samples, int | None]:
    if order is not None:
        source = open_source(data, vocab_size=vocab_size, order=order, split_name="valid")
        return source, None
    whole = open_dataset(data, vocab_size=vocab_size, num_samples=None, split_name="valid")
    return whole, len(whole)
