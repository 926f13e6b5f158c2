"""The KV cache: per-layer arrays, zero-filled and updated in place."""

import flax.struct
import jax
import jax.numpy as jnp

from meshes.layout import Layout

CACHE_AXES = ("batch", "heads", None, None)


@flax.struct.dataclass
class KVCache:
    """Keys and values of every layer, `[B, G, S, K]` each.

    A list, not one stacked array: slices of a stacked cache are copied at every decode step.
    """

    keys: list[jax.Array]
    values: list[jax.Array]


def extend(kv_BGTK: jax.Array, length: int, layout: Layout) -> jax.Array:
    """Prefilled keys or values with zeros up to `length` positions."""
    missing = length - kv_BGTK.shape[2]
    padded = jnp.pad(kv_BGTK, ((0, 0), (0, 0), (0, missing), (0, 0)))
    return jax.sharding.reshard(padded, layout.sharding(*CACHE_AXES))
