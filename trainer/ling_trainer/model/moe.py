"""Mixture of experts: dispatch, experts, combine, behind the router of router.py.

T tokens, D hidden width, E experts, k experts a token, F expert width.
Source: DeepSeek-V3 (arXiv 2412.19437) section 2.1.2.
"""

from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax import Array, lax
from jaxtyping import Float, Int

from ling_trainer.model.layers import SwiGLU, Tokens, normal, swiglu
from ling_trainer.model.products import product, ragged_product
from ling_trainer.model.router import LayerStats, Routing, route, router_stats
from ling_trainer.model_config import ModelConfig

# Above this many experts, computing every expert for every token costs more than sorting.
_MOST_DENSE_EXPERTS = 32


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
        stats = router_stats(scores, routing, expert_bias, tokens, config=self.config)
        return y.reshape(x.shape), stats


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
        gate_up, down = self.gate_up[...], self.down[...]
        dense = jax.default_backend() == "cpu" and gate_up.shape[0] <= _MOST_DENSE_EXPERTS
        return (dense_experts if dense else sorted_experts)(x, routing, gate_up, down)


def dense_experts(
    x: Float[Array, "T D"],
    routing: Routing,
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
) -> Float[Array, "T D"]:
    """Compute every expert for every token, as two matrix products; unchosen ones weigh 0."""
    experts, hidden, _ = gate_up.shape
    inner = product("td,edf->tef", x, gate_up)
    chosen = jax.nn.one_hot(routing.indices, experts, dtype=jnp.float32)
    weights = jnp.einsum("tk,tke->te", routing.weights, chosen)
    weighted = swiglu(inner).astype(jnp.float32) * weights[..., None]
    flat = weighted.astype(x.dtype).reshape(x.shape[0], -1)
    return product("tf,fd->td", flat, down.reshape(-1, hidden))


def sorted_experts(
    x: Float[Array, "T D"],
    routing: Routing,
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
) -> Float[Array, "T D"]:
    """Sort assignments by expert and compute each row once, with two ragged products."""
    sent = dispatch(x, routing.indices, num_experts=gate_up.shape[0])
    inner = swiglu(ragged_product(sent.rows, gate_up, sent.group_sizes))
    # Weighing before the down projection leaves F, not D, numbers a row to keep for its gradient.
    weights = _permute(routing.weights.reshape(-1, 1), sent.order, sent.places.reshape(-1, 1))
    weighted = (inner.astype(jnp.float32) * weights).astype(x.dtype)
    rows = ragged_product(weighted, down, sent.group_sizes)
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
