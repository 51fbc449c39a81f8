"""Random text from a seed, for runs without data: dry runs, benchmarks, tests."""

from dataclasses import dataclass

import numpy as np

from ling_trainer.data.samples import Sample

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
      extra_token: whether a sample has S + 1 tokens, not S.
      held_out: text of another random stream, which training never sees.
    """

    seed: int
    sequence_length: int
    vocab_size: int
    eod_id: int
    pad_id: int
    extra_token: bool = True
    held_out: bool = False

    @property
    def content(self) -> tuple[str, ...]:
        """Nothing: the seed and the number are all there is."""
        return ()

    def read(self, i: int) -> Sample:
        """Make sample i, i >= 0."""
        random = np.random.default_rng([self.seed, i, *([1] if self.held_out else [])])
        size = self.sequence_length + int(self.extra_token)
        uniform = random.random(size)
        ids = (self.vocab_size * uniform**3).astype(np.int64)
        ends = random.random(size) < _END_PROBABILITY
        text = np.where(ends | (ids == self.pad_id), self.eod_id, ids)
        bounds = np.unique(np.append(np.flatnonzero(text == self.eod_id) + 1, (0, size)))
        none = np.empty(0, np.int64)
        return Sample(text, documents=none, offsets=none, lengths=np.diff(bounds))
