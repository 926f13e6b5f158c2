"""The KV cache: per-layer arrays, zero-filled and updated in place."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from kernels_pallas.decode_attention.narrow import narrowed
from meshes.layout import Layout
from rlhf_jax.models.narrow import DTYPES, Narrow

CACHE_AXES = ("batch", "heads", None, None)


@flax.struct.dataclass
class Scaled[Leaf]:
    """Keys or values in one byte a number, and the float32 scale of each row, head and position."""

    values_BGSK: Leaf
    scale_BGS: Leaf


type Cached = jax.Array | Scaled[jax.Array]


@flax.struct.dataclass
class KVCache:
    """Keys and values of every layer, `[B, G, S, K]` each, or such with scales.

    A list, not one stacked array: slices of a stacked cache are copied at every decode step.
    """

    keys: list[Any]
    values: list[Any]


def axes_of(cached: Cached) -> Any:
    """The logical axes of one layer's keys or values."""
    return jax.tree.map(lambda array: CACHE_AXES[: array.ndim], cached)


def empty(shape: tuple[int, ...], dtype: Any, layout: Layout, kind: Narrow = "same") -> Cached:
    """Keys or values of no position yet."""

    def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.zeros(shape, dtype, out_sharding=layout.sharding(*CACHE_AXES[: len(shape)]))

    if kind == "same":
        return zeros(shape, dtype)
    return Scaled(zeros(shape, DTYPES[kind]), zeros(shape[:-1], jnp.float32))


def stored(kv_BGTK: jax.Array, like: Cached) -> Cached:
    """Keys or values in the form of a cache."""
    if not isinstance(like, Scaled):
        return kv_BGTK
    return Scaled(*narrowed(kv_BGTK, like.values_BGSK.dtype))


def extend(kv_BGTK: jax.Array, length: int, layout: Layout, kind: Narrow = "same") -> Cached:
    """Prefilled keys or values with zeros up to `length` positions."""
    missing = length - kv_BGTK.shape[2]
    cached = kv_BGTK if kind == "same" else Scaled(*narrowed(kv_BGTK, DTYPES[kind]))

    def one(array: jax.Array) -> jax.Array:
        padding = [(0, 0), (0, 0), (0, missing), (0, 0)][: array.ndim]
        where = layout.sharding(*CACHE_AXES[: array.ndim])
        return jax.sharding.reshard(jnp.pad(array, padding), where)

    return jax.tree.map(one, cached)
