"""Mixture of experts: router, balance statistics, dispatch, experts, combine.

T tokens, D hidden width, E experts, k experts a token, F expert width, R loss groups.
Source: DeepSeek-V3 (arXiv 2412.19437) section 2.1.2; Megatron-LM
megatron/core/transformer/moe/{moe_utils,router}.py@d98e8a64 for the statistics.
"""

import functools
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from ling_trainer.model.layers import SwiGLU, Tokens, normal, precision, swiglu, weight
from ling_trainer.model_config import ModelConfig

# Above this many experts, computing every expert for every token costs more than sorting.
_MOST_DENSE_EXPERTS = 32


@no_type_check
@struct.dataclass
class Routing:
    """Which experts each token goes to, and with what weight."""

    indices: Int[Array, "T k"]  # best first
    weights: Float[Array, "T k"]  # float32, scaled


@no_type_check
@struct.dataclass
class LayerStats:
    """One router's statistics; see outputs.RouterStats."""

    aux: Float[Array, "*layers R"]
    z: Float[Array, "*layers R"]
    expert_counts: Int[Array, "*layers E"]


@no_type_check
@struct.dataclass
class Dispatched:
    """Token rows sorted by expert, and the way back."""

    rows: Float[Array, "Tk D"]
    order: Int[Array, " Tk"]  # row r is assignment order[r] of the flattened [T, k]
    places: Int[Array, "T k"]  # assignment (t, j) is row places[t, j]
    group_sizes: Int[Array, " E"]


class MixtureOfExperts(nnx.Module):
    """Routed experts and shared experts: sum_k w_k expert_k(x) + shared(x).

    Dropless: every assignment is computed. Parameters: router [D, E]; experts.gate_up [E, D, 2F]
    (gate first) and experts.down [E, F, D]; shared, a SwiGLU, if there are shared experts.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        c, std = config, config.initializer_range
        self.router = normal(rngs, (c.hidden_size, c.num_experts), std=std)
        self.experts = Experts(config, rngs=rngs)
        if c.num_shared_experts:
            self.shared = SwiGLU(c.hidden_size, c.shared_expert_width, std=std, rngs=rngs)
        self.config = config

    def __call__(
        self, x: Float[Array, "B S D"], tokens: Tokens, expert_bias: Float[Array, " E"]
    ) -> tuple[Float[Array, "B S D"], LayerStats]:
        """Apply to every token; padding is computed but not counted."""
        flat = x.reshape(-1, x.shape[-1])
        # Float32 operands and products whatever the compute type: selection is discontinuous.
        scores = jnp.einsum(
            "td,de->te",
            flat.astype(jnp.float32),
            self.router[...],
            precision=lax.Precision.HIGHEST,
        )
        routing = route(scores, expert_bias, config=self.config)
        y = self.experts(flat, routing)
        if self.config.num_shared_experts:
            y = y + self.shared(flat)
        return y.reshape(x.shape), router_stats(scores, routing, tokens, config=self.config)


class Experts(nnx.Module):
    """The routed experts' weights: gate_up [E, D, 2F] and down [E, F, D]."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        c, std = config, config.initializer_range
        inner = c.moe_intermediate_size
        self.gate_up = normal(rngs, (c.num_experts, c.hidden_size, 2 * inner), std=std)
        self.down = normal(rngs, (c.num_experts, inner, c.hidden_size), std=std)

    def __call__(self, x: Float[Array, "T D"], routing: Routing) -> Float[Array, "T D"]:
        """Return the weighted sum of each token's experts.

        XLA's CPU back end expands a ragged product to one dense product per expert, so on a CPU
        few experts are computed densely (10 times faster for 16 experts).
        """
        gate_up, down = weight(self.gate_up, x.dtype), weight(self.down, x.dtype)
        dense = jax.default_backend() == "cpu" and gate_up.shape[0] <= _MOST_DENSE_EXPERTS
        return (dense_experts if dense else sorted_experts)(x, routing, gate_up, down)


def route(
    scores: Float[Array, "T E"], expert_bias: Float[Array, " E"], *, config: ModelConfig
) -> Routing:
    """Choose experts by biased sigmoid scores within the best groups; weigh by unbiased ones.

    A group counts by the sum of its best (num_experts_per_tok / topk_group) biased scores; the
    best topk_group groups stay. The bias takes part in the choice only, and gets no gradient.

    Args:
      scores: the router's raw logits, float32.
      expert_bias: added to sigmoid(scores) for the choice.
      config: numbers of experts and groups, and routed_scaling_factor.
    """
    c, (count, experts) = config, scores.shape
    shares = jax.nn.sigmoid(scores)
    biased = lax.stop_gradient(shares + expert_bias)
    grouped = biased.reshape(count, c.n_group, experts // c.n_group)
    best, _ = lax.top_k(grouped, c.num_experts_per_tok // c.topk_group)
    _, groups = lax.top_k(best.sum(axis=-1), c.topk_group)
    stays = jax.nn.one_hot(groups, c.n_group, dtype=jnp.bool_).any(axis=1)
    masked = jnp.where(stays[:, :, None], grouped, -jnp.inf).reshape(count, experts)
    _, indices = lax.top_k(masked, c.num_experts_per_tok)
    weights = jnp.take_along_axis(shares, indices, axis=-1)
    if c.num_experts_per_tok > 1:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return Routing(indices, weights * c.routed_scaling_factor)


def router_stats(
    scores: Float[Array, "T E"], routing: Routing, tokens: Tokens, *, config: ModelConfig
) -> LayerStats:
    """Measure a router over the valid tokens, per loss group (equal blocks of rows).

    aux = E / (k T^2) sum_i count_i sum_t q_ti, with q = sigmoid(scores) normalised over all
    experts and counts of a plain top-k of q, as Megatron has it: neither bias nor groups.
    z = mean_t logsumexp(scores_t)^2. expert_counts are of the routing itself.
    """
    groups, experts = tokens.loss_groups, scores.shape[-1]
    chosen_per_token = config.num_experts_per_tok
    valid = tokens.valid.reshape(groups, -1)
    counted = jnp.where(valid, 1.0, 0.0)
    total = jnp.maximum(counted.sum(axis=-1), 1.0)
    grouped = scores.reshape(groups, -1, experts)
    shares = jax.nn.sigmoid(grouped)
    shares = shares / (shares.sum(axis=-1, keepdims=True) + 1e-20)
    _, plain = lax.top_k(lax.stop_gradient(shares), chosen_per_token)
    loads = _counts(plain, valid, experts).astype(jnp.float32)
    shares = jnp.where(valid[..., None], shares, 0.0).sum(axis=1)
    logsumexp = jax.nn.logsumexp(grouped, axis=-1)
    chosen = routing.indices.reshape(groups, -1, chosen_per_token)
    return LayerStats(
        aux=experts / (chosen_per_token * total**2) * (loads * shares).sum(axis=-1),
        z=jnp.where(valid, logsumexp**2, 0.0).sum(axis=-1) / total,
        expert_counts=_counts(chosen, valid, experts).sum(axis=0),
    )


def dense_experts(
    x: Float[Array, "T D"],
    routing: Routing,
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
) -> Float[Array, "T D"]:
    """Compute every expert for every token, as two matrix products; unchosen ones weigh 0."""
    experts, hidden, _ = gate_up.shape
    inner = jnp.einsum("td,edf->tef", x, gate_up, precision=precision(x.dtype))
    chosen = jax.nn.one_hot(routing.indices, experts, dtype=jnp.float32)
    weights = jnp.einsum("tk,tke->te", routing.weights, chosen)
    weighted = swiglu(inner).astype(jnp.float32) * weights[..., None]
    flat = weighted.astype(x.dtype).reshape(x.shape[0], -1)
    return jnp.matmul(flat, down.reshape(-1, hidden), precision=precision(x.dtype))


def sorted_experts(
    x: Float[Array, "T D"],
    routing: Routing,
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
) -> Float[Array, "T D"]:
    """Sort assignments by expert and compute each row once, with two ragged products."""
    sent = dispatch(x, routing.indices, num_experts=gate_up.shape[0])
    exact = precision(x.dtype)
    inner = swiglu(lax.ragged_dot(sent.rows, gate_up, sent.group_sizes, precision=exact))
    # Weighing before the down projection leaves F, not D, numbers a row to keep for its gradient.
    weights = _permute(routing.weights.reshape(-1, 1), sent.order, sent.places.reshape(-1, 1))
    weighted = (inner.astype(jnp.float32) * weights).astype(x.dtype)
    rows = lax.ragged_dot(weighted, down, sent.group_sizes, precision=exact)
    return combine(rows, sent.order // routing.indices.shape[1], sent.places)


def dispatch(
    x: Float[Array, "T D"], indices: Int[Array, "T k"], *, num_experts: int
) -> Dispatched:
    """Copy each token once for each of its experts, sorted by expert.

    Overflow policy: none is needed. There are exactly T k rows, so no expert can overflow.
    """
    chosen = indices.reshape(-1)
    order = jnp.argsort(chosen, stable=True).astype(jnp.int32)
    places = jnp.argsort(order).astype(jnp.int32).reshape(indices.shape)
    sizes = jnp.bincount(chosen, length=num_experts).astype(jnp.int32)
    rows = _permute(x, order // indices.shape[1], places)
    return Dispatched(rows, order, places, sizes)


@jax.custom_vjp
def combine(
    rows: Float[Array, "Tk D"], sources: Int[Array, " Tk"], places: Int[Array, "T k"]
) -> Float[Array, "T D"]:
    """Add up the rows of each token: y_t = sum_j rows[places[t, j]].

    Args:
      rows: outputs of the experts, weighed.
      sources: token of each row; the backward pass gathers by it.
      places: rows of each token.
    """
    del sources
    return rows[places].sum(axis=1)


@jax.custom_vjp
def _permute(
    x: Float[Array, "T D"], sources: Int[Array, " Tk"], places: Int[Array, "T k"]
) -> Float[Array, "Tk D"]:
    """Return x[sources]; the transpose of combine. Its gradient gathers too: no scatter."""
    del places
    return x[sources]


def _combine_forward(rows: Array, sources: Array, places: Array) -> tuple[Array, Array]:
    return combine(rows, sources, places), sources


def _combine_backward(sources: Array, gradient: Array) -> tuple[Array, None, None]:
    return gradient[sources], None, None


def _permute_forward(x: Array, sources: Array, places: Array) -> tuple[Array, Array]:
    return _permute(x, sources, places), places


def _permute_backward(places: Array, gradient: Array) -> tuple[Array, None, None]:
    return gradient[places].sum(axis=1), None, None


combine.defvjp(_combine_forward, _combine_backward)
_permute.defvjp(_permute_forward, _permute_backward)


@functools.partial(jax.vmap, in_axes=(0, 0, None))
def _counts(indices: Int[Array, "T k"], valid: Bool[Array, " T"], experts: int) -> Array:
    """Return int32 [E]: valid tokens routed to each expert, exact for any number of them."""
    weights = jnp.broadcast_to(valid[:, None], indices.shape).astype(jnp.int32)
    return jnp.zeros(experts, jnp.int32).at[indices].add(weights)
