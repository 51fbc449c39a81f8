"""Checksums of arrays that do not depend on how they are sharded. N leaves."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Sharding
from jaxtyping import UInt32


def leaf_name(path: tuple[Any, ...]) -> str:
    """Write a key path of jax.tree_util with dots: params.groups.1.mlp."""
    return ".".join(
        str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path
    )


def leaf_names(tree: Any) -> tuple[str, ...]:
    """Name every leaf, in the order of jax.tree.leaves."""
    return tuple(leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))


@functools.partial(jax.jit, static_argnames="placement")
def leaf_checksums(tree: Any, placement: Sharding | None = None) -> UInt32[Array, " N"]:
    """Sum each leaf's bits, each element weighed by its place: sum(bits[i] * (2 i + 1)) mod 2^32.

    Integer sums are exact in any order, so every mesh and number of processes gives the same. A
    single changed element always shows (the weight is odd), and so do two that swapped places,
    almost always. It guards against damage, not against malice.

    Args:
      tree: arrays of 8, 16 or 32 bits an element.
      placement: of the result; every process can read it only where it is replicated.
    """
    sums = jnp.stack([_checksum(leaf) for leaf in jax.tree.leaves(tree)])
    return sums if placement is None else jax.lax.with_sharding_constraint(sums, placement)


def _checksum(x: Array) -> UInt32[Array, ""]:
    x = jax.device_put(x, jax.memory.Space.Device)  # from where it may have been offloaded to
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):  # row-major, without a reshape that would move shards
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)
