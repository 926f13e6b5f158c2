"""Residual sum and norm in plain JAX: the meaning of the kernel."""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.row_digits import RowDigits, split_in_jax


def add_norm(
    x_MD: jax.Array,
    parts_JMD: jax.Array,
    bias_D: jax.Array | None,
    scale_D: jax.Array,
    shift_D: jax.Array | None,
    *,
    eps: float,
    digits: bool,
) -> tuple[jax.Array, jax.Array | RowDigits]:
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
    norm = split_in_jax(h_MD, x_MD.dtype) if digits else h_MD.astype(x_MD.dtype)
    return total_MD.astype(x_MD.dtype), norm
