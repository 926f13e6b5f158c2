"""Masks from lengths, and statistics over what they keep.

A mask is bool or 0/1. What it leaves out is never read: NaN there does no harm. An empty mask gives
0, never 0/0. All statistics are float32 and run over every kept entry of the whole (global) array.
"""

import jax
import jax.numpy as jnp


def length_mask(lengths_B: jax.Array, width: int) -> jax.Array:
    """`slot < length`: bool [B, width], a contiguous prefix of each row."""
    return jnp.arange(width)[None, :] < lengths_B[:, None]


def last_mask(lengths_B: jax.Array, width: int) -> jax.Array:
    """`slot == length - 1`: bool [B, width], the last real slot of each row; none at length 0."""
    return jnp.arange(width)[None, :] == lengths_B[:, None] - 1


def take_last(x_BT: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """`x[b, lengths[b] - 1]`: [B]; 0 at length 0. A sum, because it keeps any sharding of B."""
    return jnp.sum(jnp.where(last_mask(lengths_B, x_BT.shape[1]), x_BT, 0), axis=1)


def masked_sum(x: jax.Array, mask: jax.Array) -> jax.Array:
    """`Σ x·mask` over everything."""
    return jnp.sum(jnp.where(mask.astype(bool), x.astype(jnp.float32), 0.0))


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """`Σ x·mask / Σ mask` over everything."""
    count = jnp.sum(mask.astype(jnp.float32))
    return masked_sum(x, mask) / jnp.maximum(count, 1.0)


def masked_var(x: jax.Array, mask: jax.Array) -> jax.Array:
    """`mean((x - mean(x))²)` over everything kept: the population's, without Bessel's factor."""
    return masked_mean(jnp.square(x.astype(jnp.float32) - masked_mean(x, mask)), mask)


def masked_whiten(x: jax.Array, mask: jax.Array) -> jax.Array:
    """`(x - mean) / √(var + 1e-8)`; 0 outside the mask."""
    mean = masked_mean(x, mask)
    whitened = (x.astype(jnp.float32) - mean) * jax.lax.rsqrt(masked_var(x, mask) + 1e-8)
    return jnp.where(mask.astype(bool), whitened, 0.0)
