"""Batch: what one optimizer step consumes. B sequences, S tokens, K micro-batches of b = B / K."""

from typing import Any, no_type_check

import jax
from flax import struct
from jax import Array
from jaxtyping import Bool, Int


@no_type_check  # a pytree also holds shapes, shardings and NumPy arrays
@struct.dataclass
class Batch:
    """One batch of packed documents.

    `segment_ids` are the documents, numbered from 1 in each row; 0 is padding. `loss_mask` says
    which positions have a target that counts; it is no subset of the segments' rule.
    """

    inputs: Int[Array, "*B S"]
    targets: Int[Array, "*B S"]
    positions: Int[Array, "*B S"]
    segment_ids: Int[Array, "*B S"]
    loss_mask: Bool[Array, "*B S"]


def split_microbatches(tree: Any, *, num_microbatches: int) -> Any:
    """Reshape every leaf [B, ...] to [K, B / K, ...]; row i goes to micro-batch i mod K.

    The strided order keeps each data shard's rows local (MaxText, optax).

    Args:
      tree: arrays whose first dimension is B.
      num_microbatches: K.

    Raises:
      ValueError: K does not divide B.
    """

    def split(x: Array) -> Array:
        rows = x.shape[0]
        if rows % num_microbatches:
            msg = (
                f"{rows} rows do not split into {num_microbatches} micro-batches; choose a divisor"
            )
            raise ValueError(msg)
        return x.reshape(rows // num_microbatches, num_microbatches, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(split, tree)
