"""Keys and values in one byte a number: one float32 scale for a token's key (or value) of a head.

Plain JAX that also runs inside the kernel: what the kernel writes is what prefill writes.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.row_digits import largest_of

LARGEST = 127


def narrowed(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """`[..., K]` in int8 or float8_e4m3fn, and the scale `[...]`: the largest number becomes the
    largest that the dtype has. Zeros stay zero, and next to zero (1e-35) becomes it. What is not a
    number shows in the scale.
    """
    is_float = jnp.issubdtype(dtype, jnp.floating)
    most = float(jnp.finfo(dtype).max) if is_float else float(LARGEST)
    wide = x.astype(jnp.float32)
    largest = largest_of(wide)
    # A scale below the smallest normal number may be flushed to zero, and is divided by. The
    # comparison is this way round for NaN.
    least = most * float(jnp.finfo(jnp.float32).tiny)
    scale = jnp.where(largest <= least, 1.0, largest / most)
    values = wide / scale[..., None]
    # The kernel's backend has no round.
    values = values if is_float else jnp.floor(values + 0.5)
    return values.astype(dtype), scale


def widened(values: jax.Array, scale: jax.Array) -> jax.Array:
    """What `narrowed` stands for, in float32."""
    return values.astype(jnp.float32) * scale[..., None]
