"""The order of a run's samples, pinned: raising `steps` must not reshuffle what came before.

Megatron's order depends on the number of samples asked for: more of them may add an epoch, or
cross the 80 % rule, and then every sample from the first on changes. So the number is part of the
checkpoint, and samples past it come from a further index over the same data.
"""

import json
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class SampleOrder:
    """How many samples each index of a run was built for.

    Segment j holds `sizes[j]` samples and is shuffled with data_shuffle_seed + j. A run that was
    never extended has one segment, in Megatron's own order.

    Attributes:
      sizes: samples of each segment, all positive.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
          ValueError: no segment, or one that is not a positive integer.
        """
        if not self.sizes or not all(type(size) is int and size > 0 for size in self.sizes):
            raise ValueError(
                f"sizes={self.sizes!r} of a sample order must be one or more positive integers; "
                "the checkpoint's data state is damaged, restore an older one"
            )

    @property
    def num_samples(self) -> int:
        """Samples of all segments."""
        return sum(self.sizes)

    def extended(self, num_samples: int) -> Self:
        """Make room for num_samples; what is there stays, so a lower number changes nothing."""
        missing = num_samples - self.num_samples
        return type(self)((*self.sizes, missing)) if missing > 0 else self

    def locate(self, sample: int) -> tuple[int, int]:
        """Find a sample: its segment, and its number there.

        Raises:
          IndexError: the order has no such sample.
        """
        left = sample
        for segment, size in enumerate(self.sizes):
            if 0 <= left < size:
                return segment, left
            left -= size
        raise IndexError(
            f"sample {sample} is not one of the {self.num_samples} of the run; raise steps"
        )

    def to_json(self) -> str:
        """Write the form a checkpoint keeps."""
        return json.dumps({"sizes": list(self.sizes)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what to_json wrote.

        Raises:
          ValueError: the text is something else.
        """
        state = json.loads(text)
        if not isinstance(state, dict) or not isinstance(state.get("sizes"), list):
            raise ValueError(
                f"{text!r} is not a sample order; the checkpoint's data state is damaged, restore "
                "an older one"
            )
        return cls(tuple(state["sizes"]))
