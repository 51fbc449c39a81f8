"""Cross-entropy and z-loss of an output head, of all tokens at once or in chunks of tokens.

The logits of all tokens are the largest array of a step. In chunks, the gradients of the hidden
states and of the head are taken in the forward pass, right after a chunk's logits: token weights
are known before the loss, so the backward pass is one scaling, and nothing of size [b S V] ever
exists. The matrix products stay three: logits, and one for each gradient.

b sequences, S tokens, D hidden width, V vocabulary; R blocks of rows, each on devices of its own.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Shaped

from ling_trainer.sharding import (
    constrain_blocks,
    constrain_rows,
    gather_for_rows,
    row_blocks,
)

type Params = Any

# Parameters, hidden states [b S D] and a depth to float32 logits [b S V]: depth 0 is the language
# model's head, depth d that of the d-th prediction.
type Logits = Callable[[Params, Array, int], Array]


@no_type_check  # a pytree also holds shapes, shardings and NumPy arrays
@struct.dataclass
class HeadLoss:
    """Loss of one head. Only `objective` carries a gradient; the others are for reports."""

    objective: Float[Array, ""]
    xent: Float[Array, "b S"]  # 0 where masked
    z: Float[Array, "b S"]


@no_type_check
@struct.dataclass
class _Tokens:
    """What the loss of a token needs besides its hidden state; leaves [b S]."""

    targets: Int[Array, "..."]
    mask: Bool[Array, "..."]
    weights: Float[Array, "..."]


# Hidden states, tokens and the head's parameters to their loss.
type _Loss = Callable[[Array, _Tokens, list[Array]], HeadLoss]


def head_loss(
    params: Params,
    hidden: Float[Array, "b S D"],
    targets: Int[Array, "b S"],
    mask: Bool[Array, "b S"],
    weights: Float[Array, "b S"],
    *,
    logits: Logits,
    depth: int,
    z_loss_multiplier: float,
    num_vocab_tiling: int,
) -> HeadLoss:
    """Return the weighted cross-entropy (and z-loss) of one head.

        objective = sum(weights * (xent + z_loss_multiplier * logsumexp(logits)^2))

    What is masked is replaced before the head, not multiplied by 0 after it: a NaN there would
    survive the product, and in the backward pass also a `where` that comes after the head.

    Not valid for second derivatives, or for the gradient of the weights, if num_vocab_tiling > 1.

    Args:
      params: of the head.
      hidden: before the head.
      targets: token ids; any value where masked.
      mask: positions with a loss.
      weights: of each token in the objective; known before the loss, so nothing is divided later.
      logits: the output head. In chunks it is given a part of the sequence, so a token's logits
        depend on its own hidden state only.
      depth: which head.
      z_loss_multiplier: coefficient of logsumexp(logits)^2.
      num_vocab_tiling: chunks, of whole tokens, that each sequence is cut into; it need not
        divide S. 1: all tokens at once, by ordinary differentiation.
    """
    hidden = jnp.where(mask[..., None], hidden, 0)
    tokens = _Tokens(jnp.where(mask, targets, 0), mask, weights)

    def head(hidden: Array) -> Array:
        return logits(params, hidden, depth)

    if num_vocab_tiling == 1:
        return _loss(hidden, tokens, [], head=head, z_loss_multiplier=z_loss_multiplier)
    cut = _cut(hidden, num_vocab_tiling)
    # What of `params` the head reads becomes an argument; the rest of the model gets no gradient
    # here, not even zeros.
    example = jax.ShapeDtypeStruct((cut.rows, cut.size, hidden.shape[2]), hidden.dtype)
    pure_head, head_params = jax.closure_convert(head, example)
    loss = functools.partial(_loss, head=pure_head, z_loss_multiplier=z_loss_multiplier)
    vocab = jax.eval_shape(head, example).shape[-1]
    return _in_chunks(loss, cut, vocab, hidden, tokens, head_params)


def cross_entropy(
    logits: Float[Array, "*B V"], targets: Int[Array, "*B"]
) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
    """Return logsumexp(logits) - logits[target], and logsumexp(logits), in float32.

    A target outside the vocabulary gives NaN, never a plausible loss.
    """
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    # A masked sum, not a gather: it stays local when the vocabulary is sharded, and its
    # derivative is no scatter.
    chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
    picked = jnp.where(chosen, logits, 0.0).sum(-1)
    known = (targets >= 0) & (targets < logits.shape[-1])
    return jnp.where(known, log_z - picked, jnp.nan), log_z


def _loss(
    hidden: Float[Array, "b S D"],
    tokens: _Tokens,
    head_params: list[Array],
    *,
    head: Callable[..., Array],
    z_loss_multiplier: float,
) -> HeadLoss:
    xent, log_z = cross_entropy(head(hidden, *head_params), tokens.targets)
    xent = jnp.where(tokens.mask, xent, 0.0)
    z = jnp.zeros_like(xent)
    if z_loss_multiplier:  # 0 * inf would be NaN, and XLA keeps the product
        z = jnp.where(tokens.mask, z_loss_multiplier * jnp.square(log_z), 0.0)
    return HeadLoss(jnp.sum(tokens.weights * (xent + z)), xent, z)


@dataclass(frozen=True)
class _Cut:
    """How [b S ...] is cut: into `blocks` of rows, and into `count` chunks of `size` tokens."""

    blocks: int
    rows: int  # of a block
    count: int
    size: int
    length: int

    def split(self, x: Shaped[Array, "b S ..."]) -> Shaped[Array, "chunks blocks rows size ..."]:
        """Cut the sequences, the last chunk padded with zeros: masked tokens of weight 0."""
        missing = self.count * self.size - self.length
        x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(self.blocks, self.rows, self.count, self.size, *x.shape[2:])
        return jnp.moveaxis(x, 2, 0)

    def join(self, x: Shaped[Array, "chunks blocks rows size ..."]) -> Shaped[Array, "b S ..."]:
        x = jnp.moveaxis(x, 0, 2)
        x = x.reshape(self.blocks * self.rows, self.count * self.size, *x.shape[4:])
        return x[:, : self.length]


def _cut(x: Float[Array, "b S D"], count: int) -> _Cut:
    (rows, length, _), blocks = x.shape, row_blocks(x.shape[0])
    size = -(-length // count)
    return _Cut(blocks, rows // blocks, -(-length // size), size, length)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _in_chunks(
    loss: _Loss,
    cut: _Cut,
    vocab: int,
    hidden: Float[Array, "b S D"],
    tokens: _Tokens,
    head_params: list[Array],
) -> HeadLoss:
    """Return `loss` of all tokens from its values on chunks of them."""
    head_params = [gather_for_rows(p, kept=vocab) for p in head_params]

    def chunk(_: None, xs: tuple[Array, _Tokens]) -> tuple[None, HeadLoss]:
        return None, jax.vmap(loss, in_axes=(0, 0, None))(*xs, head_params)

    _, found = lax.scan(chunk, None, jax.tree.map(cut.split, (hidden, tokens)))
    return _joined(found, tokens, cut)


def _forward(
    loss: _Loss,
    cut: _Cut,
    vocab: int,
    hidden: Float[Array, "b S D"],
    tokens: _Tokens,
    head_params: list[Array],
) -> tuple[HeadLoss, tuple[Array, list[Array]]]:
    """Compute the gradients too, for a cotangent of 1. The head's are summed in float32.

    Each block of rows sums its own, so that devices exchange them once and not once a chunk.
    """

    def objective(hidden: Array, params: list[Array], tokens: _Tokens) -> tuple[Array, HeadLoss]:
        found = loss(hidden, tokens, params)
        return found.objective, found

    keep = functools.partial(constrain_blocks, kept=vocab)
    gathered = [gather_for_rows(p, kept=vocab) for p in head_params]
    gradient = jax.vmap(jax.grad(objective, argnums=(0, 1), has_aux=True), in_axes=(0, None, 0))

    def chunk(sums: list[Array], xs: tuple[Array, _Tokens]) -> Any:
        (d_hidden, d_params), found = gradient(constrain_rows(xs[0]), gathered, xs[1])
        sums = [keep(s + d.astype(s.dtype)) for s, d in zip(sums, d_params, strict=True)]
        return sums, (d_hidden, found)

    zeros = [keep(jnp.zeros((cut.blocks, *p.shape), jnp.float32)) for p in head_params]
    sums, (d_hidden, found) = lax.scan(chunk, zeros, jax.tree.map(cut.split, (hidden, tokens)))
    d_params = [s.sum(0).astype(p.dtype) for s, p in zip(sums, head_params, strict=True)]
    return _joined(found, tokens, cut), (cut.join(d_hidden), d_params)


def _backward(
    loss: _Loss,
    cut: _Cut,
    vocab: int,
    gradients: tuple[Array, list[Array]],
    cotangent: HeadLoss,
) -> tuple[Array, None, list[Array]]:
    """Scale the gradients; reported values have none."""
    del loss, cut, vocab
    d_hidden, d_params = jax.tree.map(
        lambda g: (cotangent.objective * g).astype(g.dtype), gradients
    )
    return d_hidden, None, d_params


_in_chunks.defvjp(_forward, _backward)


def _joined(found: HeadLoss, tokens: _Tokens, cut: _Cut) -> HeadLoss:
    """Put chunks together, and sum the objective in the order that all tokens at once have."""
    xent, z = cut.join(found.xent), cut.join(found.z)
    return HeadLoss(jnp.sum(tokens.weights * (xent + z)), xent, z)
