"""The KV cache: per-layer arrays, zero-filled and updated in place."""

import flax.struct
import jax
import jax.numpy as jnp

from meshes.layout import Layout
from rlhf_jax.models.config import ModelConfig

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


def cache_bytes(cfg: ModelConfig, batch: int, length: int, dtype: jnp.dtype) -> int:
    """Bytes of the whole cache over all devices."""
    per_position = 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_size
    return per_position * batch * length * jnp.dtype(dtype).itemsize
