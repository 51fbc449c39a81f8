"""What a model returns. Auxiliaries are values, never looked up by name.

B sequences, S tokens, D hidden width; R loss groups (virtual Megatron ranks; the rows of a
micro-batch are R consecutive equal blocks); L MoE layers then MTP blocks; E experts.
"""

from typing import no_type_check

from flax import struct
from jax import Array
from jaxtyping import Float, Int


@no_type_check  # a pytree also holds shapes, shardings and NumPy arrays
@struct.dataclass
class RouterStats:
    """Statistics of every router over the valid tokens (segment_ids != 0) of one micro-batch.

    What a model does not measure is None: it is then not reported, and asking for it an error.
    """

    aux: Float[Array, "R L"]  # balance loss, no coefficient: E / (k T^2) sum_i count_i sum_t q_ti
    z: Float[Array, "R L"]  # mean over tokens of logsumexp(raw logits)^2, no coefficient
    expert_counts: Int[Array, "L E"]  # tokens routed to each expert
    seq_aux: Float[Array, "R L"] | None = None  # aux of each sequence alone, averaged over them
    loads: Int[Array, "L E"] | None = None  # tokens each expert has in a plain top-k of q
    mean_scores: Float[Array, "R L E"] | None = None  # sum_t q_ti / T: a group's tokens, all T
    topk_weight: Float[Array, " L"] | None = None  # mean of p over chosen experts and tokens
    probs_std: Float[Array, " L"] | None = None  # mean over tokens of p's deviation over experts


@no_type_check  # a pytree also holds shapes, shardings and NumPy arrays
@struct.dataclass
class ModelOutputs:
    """Hidden states before the output head, after the final norm, and auxiliaries."""

    hidden: Float[Array, "B S D"]
    mtp_hidden: tuple[Float[Array, "B S D"], ...]  # one for each prediction depth
    router: RouterStats
    indexer_loss: Float[Array, " R"] | None = None  # of sparse attention's indexers, a layer
