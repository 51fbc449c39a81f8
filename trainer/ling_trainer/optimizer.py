"""AdamW and clipping; the routers' bias rule, which is not a gradient."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float, Int

from ling_trainer.optimizer_config import OptimizerConfig

type Tree = Any

CLIP_EPSILON = 1e-6  # Megatron's; optax's clip_by_global_norm has none


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Build AdamW with decoupled decay; `update` takes the learning rate of the step.

        p -= lr * (m / (sqrt(v) + eps) + weight_decay * p)

    m and v are float32 and bias-corrected by the number of updates, so a skipped step leaves
    them as they are. The learning rate is an argument because it follows the step, not the
    updates: a run that skipped a step is still where its schedule says.

    Example:
      updates, opt_state = tx.update(grads, opt_state, params, learning_rate=lr)
    """
    return optax.chain(
        optax.scale_by_adam(
            b1=config.adam_b1, b2=config.adam_b2, eps=config.adam_eps, mu_dtype=jnp.float32
        ),
        optax.add_decayed_weights(config.adam_weight_decay, mask=decay_mask),
        optax.GradientTransformationExtraArgs(_no_state, _scale_by_learning_rate),
    )


def _no_state(params: Tree) -> optax.EmptyState:
    del params
    return optax.EmptyState()


def _scale_by_learning_rate(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra: Any,
) -> tuple[optax.Updates, optax.OptState]:
    del params
    return jax.tree.map(lambda u: -extra["learning_rate"] * u, updates), state


def decay_mask(params: Tree) -> Tree:
    """Tell for each parameter whether weight decay applies: to all but norms and biases.

    A parameter is a norm or a bias by its path: a component that ends in "norm", or a last
    component "bias" or "scale". The number of dimensions says nothing: stacked layers give a
    norm two, and Megatron's rule would then decay it.
    """

    def decays(path: tuple[Any, ...], _: Any) -> bool:
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        is_norm = any(name.endswith("norm") for name in names)
        return not is_norm and names[-1] not in {"bias", "scale"}

    return jax.tree_util.tree_map_with_path(decays, params)


def global_norm(tree: Tree) -> Float[Array, ""]:
    """Return the square root of the sum of all squares, in float32 whatever the leaves are."""
    squares = (jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree))
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def clip_factor(norm: Float[Array, ""], *, threshold: float) -> Float[Array, ""]:
    """Return min(1, threshold / (norm + 1e-6)); 1 if threshold is 0.

    Source: Megatron-LM megatron/core/optimizer/clip_grads.py@d98e8a64.
    """
    if not threshold:
        return jnp.ones((), jnp.float32)
    return jnp.minimum(1.0, threshold / (norm + CLIP_EPSILON))


def router_bias_update(
    bias: Float[Array, "L E"],
    expert_counts: Int[Array, "L E"] | Float[Array, "L E"],
    *,
    rate: float,
    bias_update: Literal["megatron", "ling_zero_mean"],
) -> Float[Array, "L E"]:
    """Move each expert's bias one step against its load.

        b += rate * u,  u = sign(mean(counts) - counts);  ling_zero_mean: u - mean(u)

    Args:
      bias: added to the router's scores when experts are chosen.
      expert_counts: tokens of each expert, summed over the whole step before the sign is taken.
        An integer sum over experts must stay below 2^31.
      rate: step; 0 leaves the bias bitwise as it is.
      bias_update: Megatron's rule, or that of Ling's patch to it, which keeps the mean of b.

    Source: Megatron-LM megatron/core/transformer/moe/moe_utils.py@d98e8a64,
      get_updated_expert_bias; Ling-V2 training/megatron/bailing_moe_v2.patch.
    """
    if not rate:
        return bias
    direction = _sign_below_mean(expert_counts)
    if bias_update == "ling_zero_mean":
        direction -= direction.mean(-1, keepdims=True)
    return bias + rate * direction


def _sign_below_mean(counts: Array) -> Float[Array, "L E"]:
    """Return sign(mean - count); exact for integers, whose float32 mean could round to a tie."""
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        return jnp.sign(counts.mean(-1, keepdims=True) - counts)
    quotient, remainder = jnp.divmod(counts.sum(-1, keepdims=True), counts.shape[-1])
    below = jnp.sign(quotient - counts)
    return jnp.where(below == 0, jnp.sign(remainder), below).astype(jnp.float32)
