"""Residual sum and norm in plain JAX: the meaning of the kernel."""

import jax
import jax.numpy as jnp
from jax import lax


def add_norm(
    x_MD: jax.Array,
    parts_JMD: jax.Array,
    bias_D: jax.Array | None,
    scale_D: jax.Array,
    shift_D: jax.Array | None,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """See api.add_norm."""
    total_MD = x_MD.astype(jnp.float32) + parts_JMD.astype(jnp.float32).sum(0)
    if bias_D is not None:
        total_MD = total_MD + bias_D.astype(jnp.float32)
    centered_MD = total_MD
    if shift_D is not None:
        centered_MD = total_MD - total_MD.mean(-1, keepdims=True)
    h_MD = centered_MD * lax.rsqrt(jnp.square(centered_MD).mean(-1, keepdims=True) + eps)
    h_MD = h_MD * scale_D.astype(jnp.float32)
    if shift_D is not None:
        h_MD = h_MD + shift_D.astype(jnp.float32)
    return total_MD.astype(x_MD.dtype), h_MD.astype(x_MD.dtype)
