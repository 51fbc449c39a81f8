"""Random text from a seed, for runs without data: dry runs, benchmarks, tests."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_END_PROBABILITY = 1 / 128


@dataclass(frozen=True)
class SyntheticDataset:
    """Samples that depend on the seed and their own number only, whoever reads them.

    Low token ids are frequent and high ones rare (id = V u**3 for uniform u), so a model can learn
    something: the loss falls from ln(V) towards the entropy of that distribution. Documents end at
    random, every 128 tokens on average; the padding token does not occur unless it is eod_id.

    Attributes:
      seed: of the text.
      sequence_length: S.
      vocab_size: V; ids are in [0, V).
      eod_id: token that ends a document.
      pad_id: the padding token.
    """

    seed: int
    sequence_length: int
    vocab_size: int
    eod_id: int
    pad_id: int

    def sample(self, i: int) -> npt.NDArray[np.int64]:
        """Make sample i, i >= 0.

        Returns:
          int64 [S + 1].
        """
        random = np.random.default_rng([self.seed, i])
        uniform = random.random(self.sequence_length + 1)
        ids = (self.vocab_size * uniform**3).astype(np.int64)
        ends = random.random(self.sequence_length + 1) < _END_PROBABILITY
        return np.where(ends | (ids == self.pad_id), self.eod_id, ids)
