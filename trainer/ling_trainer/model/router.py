"""Which experts each token goes to, and what is measured of it.

B sequences, S tokens a sequence, T = B S tokens, E experts, k experts a token, R loss groups.
Source: DeepSeek-V3 (arXiv 2412.19437) section 2.1.2; Megatron-LM
megatron/core/transformer/moe/{moe_utils,router}.py@d98e8a64 for losses and counts.
"""

import functools
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from ling_trainer.model.layers import Tokens
from ling_trainer.model.outputs import RouterStats
from ling_trainer.model_config import ModelConfig


@no_type_check
@struct.dataclass
class Routing:
    """Which experts each token goes to, and with what weight."""

    indices: Int[Array, "T k"]  # best first
    weights: Float[Array, "T k"]  # float32, scaled


@no_type_check
@struct.dataclass
class LayerStats:
    """One router's statistics; see outputs.RouterStats, whose names these are."""

    aux: Float[Array, "*layers R"]
    seq_aux: Float[Array, "*layers R"]
    z: Float[Array, "*layers R"]
    loads: Int[Array, "*layers E"]
    mean_scores: Float[Array, "*layers R E"]
    expert_counts: Int[Array, "*layers E"]
    topk_weight: Float[Array, "*layers"]
    probs_std: Float[Array, "*layers"]


def route(
    scores: Float[Array, "T E"], expert_bias: Float[Array, " E"], *, config: ModelConfig
) -> Routing:
    """Choose experts by biased scores within the best groups; weigh by unbiased ones.

    A group counts by the sum of its best (num_experts_per_tok / topk_group) biased scores; the
    best topk_group groups stay. The bias takes part in the choice only, and gets no gradient.

        sigmoid: s = sigmoid(x), choice by s + bias, weight s / sum of the chosen s
        softmax: choice by x; weight softmax of the chosen x, or with moe_router_pre_softmax the
          chosen of softmax(x). No bias: Megatron refuses one, and so is it left out here

    Args:
      scores: the router's raw logits x, float32.
      expert_bias: added to sigmoid(x) for the choice.
      config: numbers of experts and groups, score_function, and routed_scaling_factor.
    """
    c = config
    if c.score_function == "sigmoid":
        shares = jax.nn.sigmoid(scores)
        indices = _choose(lax.stop_gradient(shares + expert_bias), config=c)
        weights = jnp.take_along_axis(shares, indices, axis=-1)
        if c.num_experts_per_tok > 1:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    elif c.moe_router_pre_softmax:
        shares = jax.nn.softmax(scores, axis=-1)
        indices = _choose(lax.stop_gradient(shares), config=c)
        weights = jnp.take_along_axis(shares, indices, axis=-1)
    else:
        indices = _choose(lax.stop_gradient(scores), config=c)
        weights = jax.nn.softmax(jnp.take_along_axis(scores, indices, axis=-1), axis=-1)
    return Routing(indices, weights * c.routed_scaling_factor)


def _choose(scores: Float[Array, "T E"], *, config: ModelConfig) -> Int[Array, "T k"]:
    """Return the best experts of the best groups."""
    c, (count, experts) = config, scores.shape
    if c.n_group == 1:
        return lax.top_k(scores, c.num_experts_per_tok)[1]
    grouped = scores.reshape(count, c.n_group, experts // c.n_group)
    best, _ = lax.top_k(grouped, c.num_experts_per_tok // c.topk_group)
    _, groups = lax.top_k(best.sum(axis=-1), c.topk_group)
    stays = jax.nn.one_hot(groups, c.n_group, dtype=jnp.bool_).any(axis=1)
    masked = jnp.where(stays[:, :, None], grouped, -jnp.inf).reshape(count, experts)
    return lax.top_k(masked, c.num_experts_per_tok)[1]


def balance_scores(scores: Float[Array, "*B E"], *, config: ModelConfig) -> Float[Array, "*B E"]:
    """Return q, the normalised scores that a balance loss spreads: they sum to 1 over experts."""
    if config.score_function == "softmax":
        return jax.nn.softmax(scores, axis=-1)
    shares = jax.nn.sigmoid(scores)
    return shares / (shares.sum(axis=-1, keepdims=True) + 1e-20)


def router_stats(
    scores: Float[Array, "T E"],
    routing: Routing,
    expert_bias: Float[Array, " E"],
    tokens: Tokens,
    *,
    config: ModelConfig,
) -> LayerStats:
    """Measure a router over the valid tokens; aux, seq_aux, z and mean_scores per loss group.

        aux = E / (k T^2) sum_i count_i sum_t q_ti

    with counts of a plain top-k of q, as Megatron has it: neither bias nor groups. seq_aux is
    the mean, over the sequences that have a valid token, of aux of each alone. The loss groups
    are equal blocks of rows.

    Args:
      scores: the router's raw logits.
      routing: what `route` made of them; expert_counts and topk_weight are of its choice.
      expert_bias: of this router.
      tokens: which are valid, and the number of loss groups.
      config: number of experts a token, and score_function.
    """
    groups, experts, top_k = tokens.loss_groups, scores.shape[-1], config.num_experts_per_tok
    valid = tokens.valid
    rows = scores.reshape(*valid.shape, experts)
    shares = balance_scores(rows, config=config)
    _, plain = lax.top_k(lax.stop_gradient(shares), top_k)
    loads = _counts(plain, valid, experts)  # [B E]
    sums = jnp.where(valid[..., None], shares, 0.0).sum(axis=1)  # [B E]
    counts = valid.sum(axis=1, dtype=jnp.int32)  # [B]
    by_group = counts.reshape(groups, -1)
    total = jnp.maximum(by_group.sum(axis=-1), 1).astype(jnp.float32)
    group_loads, group_sums = (x.reshape(groups, -1, experts).sum(axis=1) for x in (loads, sums))
    each = _aux(loads, sums, counts, top_k=top_k).reshape(groups, -1).sum(axis=-1)
    z = jnp.where(valid, jnp.square(jax.nn.logsumexp(rows, axis=-1)), 0.0)
    chosen = routing.indices.reshape(*valid.shape, top_k)
    topk_weight, probs_std = _diagnostics(rows, chosen, expert_bias, valid, config=config)
    return LayerStats(
        aux=_aux(group_loads, group_sums, by_group.sum(axis=-1), top_k=top_k),
        seq_aux=each / jnp.maximum((by_group > 0).sum(axis=-1), 1),
        z=z.reshape(groups, -1).sum(axis=-1) / total,
        loads=loads.sum(axis=0),
        mean_scores=group_sums / jnp.maximum(counts.sum(), 1),
        expert_counts=_counts(chosen, valid, experts).sum(axis=0),
        topk_weight=topk_weight,
        probs_std=probs_std,
    )


def join_layers(parts: list[LayerStats], *, config: ModelConfig, loss_groups: int) -> RouterStats:
    """Join statistics whose leaves lead with layers, in the order of the routers.

    Without a router every array has L = 0, and what would be a mean over routers is None.
    """
    if not parts:
        by_group = jnp.zeros((loss_groups, 0), jnp.float32)
        none = jnp.zeros((0, config.num_experts), jnp.int32)
        mean_scores = jnp.zeros((loss_groups, *none.shape), jnp.float32)
        return RouterStats(by_group, by_group, none, by_group, none, mean_scores)
    joined = jax.tree.map(lambda *layers: jnp.concatenate(layers), *parts)
    return RouterStats(
        aux=joined.aux.T,
        z=joined.z.T,
        expert_counts=joined.expert_counts,
        seq_aux=joined.seq_aux.T,
        loads=joined.loads,
        mean_scores=jnp.swapaxes(joined.mean_scores, 0, 1),
        topk_weight=joined.topk_weight,
        probs_std=joined.probs_std,
    )


def _aux(
    loads: Int[Array, "N E"], sums: Float[Array, "N E"], tokens: Int[Array, " N"], *, top_k: int
) -> Float[Array, " N"]:
    """Return the balance loss of N sets of tokens, 0 for an empty one."""
    total = jnp.maximum(tokens, 1).astype(jnp.float32)
    return loads.shape[-1] / (top_k * total**2) * (loads * sums).sum(axis=-1)


def _diagnostics(
    scores: Float[Array, "B S E"],
    chosen: Int[Array, "B S k"],
    expert_bias: Float[Array, " E"],
    valid: Bool[Array, "B S"],
    *,
    config: ModelConfig,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return topk_weight and probs_std of p, the softmax of what the choice is made by.

    Neither depends on routed_scaling_factor, nor, unlike the experts' weights, sums to a constant.

    Source: Garrybest/maxtext src/maxtext/layers/moe.py@0fb0b093, router_stats.
    """
    scores = lax.stop_gradient(scores)
    sigmoid = config.score_function == "sigmoid"
    p = jax.nn.softmax(jax.nn.sigmoid(scores) + expert_bias if sigmoid else scores, axis=-1)
    picked = jnp.take_along_axis(p, chosen, axis=-1).mean(axis=-1)
    total = jnp.maximum(valid.sum(), 1)
    means = (jnp.where(valid, x, 0.0).sum() / total for x in (picked, p.std(axis=-1)))
    return next(means), next(means)


@functools.partial(jax.vmap, in_axes=(0, 0, None))
def _counts(indices: Int[Array, "T k"], valid: Bool[Array, " T"], experts: int) -> Array:
    """Return int32 [E]: valid tokens routed to each expert, exact for any number of them."""
    weights = jnp.broadcast_to(valid[:, None], indices.shape).astype(jnp.int32)
    return jnp.zeros(experts, jnp.int32).at[indices].add(weights)
