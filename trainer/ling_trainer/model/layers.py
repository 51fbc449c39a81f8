"""Layers that every block is made of. B sequences, S tokens, D hidden width, F inner width."""

from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, Shaped

from ling_trainer.model.products import product


@no_type_check
@struct.dataclass
class Tokens:
    """What the layers know of a batch besides its activations."""

    positions: Int[Array, "B S"]
    documents: Int[Array, "B S"] | None  # attention stays inside equal ids; None: causal only
    valid: Bool[Array, "B S"]  # no padding; what the routers count
    loss_groups: int = struct.field(pytree_node=False)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], *, std: float) -> nnx.Param:
    """Draw a float32 matrix from the normal distribution of mean 0."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))


def project(equation: str, x: Shaped[Array, "..."], param: nnx.Param) -> Shaped[Array, "..."]:
    """Multiply activations by a weight (an einsum) in the activations' type."""
    return product(equation, x, param[...])


class RMSNorm(nnx.Module):
    """Scale to unit root mean square, over the last dimension or each of its equal groups.

    y = x / sqrt(mean(x^2) + eps) * scale in float32, then cast to the output's type.
    Parameters: scale [D], ones at first. Every norm's leaf is named `scale`; nothing else is.
    Source: Zhang and Sennrich 2019, equation 4.
    """

    def __init__(self, width: int, *, eps: float, groups: int = 1) -> None:
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.eps = eps
        self.groups = groups

    def __call__(
        self, x: Float[Array, "*B D"], dtype: DTypeLike | None = None
    ) -> Float[Array, "*B D"]:
        """Normalise; `dtype` is the output's type, the input's by default."""
        dtype = x.dtype if dtype is None else dtype
        y = x.astype(jnp.float32).reshape(*x.shape[:-1], self.groups, -1)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        # Scaled before the cast, so that the gradient of `scale` is summed in float32.
        return (y.reshape(x.shape) * self.scale[...]).astype(dtype)


def swiglu(gate_up: Float[Array, "*B F2"]) -> Float[Array, "*B F"]:
    """Return silu(gate) * up of the concatenated [gate | up]; the product is float32."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


class SwiGLU(nnx.Module):
    """Dense feed-forward: down(silu(gate x) * (up x)).

    Parameters: gate_up [D, 2F], gate first; down [F, D].
    """

    def __init__(self, hidden: int, inner: int, *, std: float, rngs: nnx.Rngs) -> None:
        self.gate_up = normal(rngs, (hidden, 2 * inner), std=std)
        self.down = normal(rngs, (inner, hidden), std=std)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Apply to every token."""
        inner = swiglu(project("...d,df->...f", x, self.gate_up))
        return project("...f,fd->...d", inner, self.down)


def rotate_half_split(
    x: Float[Array, "B S H d"], positions: Int[Array, "B S"], *, theta: float, width: int
) -> Float[Array, "B S H d"]:
    """Apply RoPE to the first `width` dimensions, pairing i with i + width / 2 (NeoX's layout).

    Args:
      x: queries or keys.
      positions: position of each token in its document or row.
      theta: base of the frequencies theta^(-2i / width).
      width: even; dimensions from here on pass unrotated.
    """
    cos, sin = _rotation(positions, theta=theta, width=width)
    turned, rest = x[..., :width].astype(jnp.float32), x[..., width:]
    a, b = jnp.split(turned, 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def rotate_interleaved(
    x: Float[Array, "B S H d"], positions: Int[Array, "B S"], *, theta: float
) -> Float[Array, "B S H d"]:
    """Apply RoPE to all dimensions, pairing 2i with 2i + 1, in place.

    Hugging Face also moves the pairs to half-split order; scores do not depend on that.
    """
    cos, sin = _rotation(positions, theta=theta, width=x.shape[-1])
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def _rotation(
    positions: Int[Array, "B S"], *, theta: float, width: int
) -> tuple[Float[Array, "B S 1 half"], Float[Array, "B S 1 half"]]:
    frequencies = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)
