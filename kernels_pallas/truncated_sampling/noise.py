"""Gumbel noise of any tokens alone, as `jax.random.gumbel` draws it for all of them.

JAX's generator hashes the number of each element with the key (Threefry-2x32: Salmon et al. 2011,
https://doi.org/10.1145/2063384.2063405), so that any element can be made without the others; its
public functions make all of them, and its primitive does not exist inside a kernel.
"""

import jax
import jax.numpy as jnp
from jax import lax

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def gumbel(high: jax.Array, low: jax.Array, token: jax.Array) -> jax.Array:
    """Element `token` of `jax.random.gumbel(key, (V,))` for any V, where the key is (high, low).

    All three broadcast; the key is uint32.
    """
    tiny = float(jnp.finfo(jnp.float32).tiny)
    mantissa = (_bits(high, low, token.astype(jnp.uint32)) >> 9) | jnp.uint32(0x3F800000)  # 1.0
    uniform = lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0
    return -jnp.log(-jnp.log(jnp.maximum(tiny, uniform + tiny)))


def _bits(high: jax.Array, low: jax.Array, number: jax.Array) -> jax.Array:
    """32 random bits for each number."""
    keys = high, low, high ^ low ^ jnp.uint32(PARITY)
    one, other = jnp.zeros_like(number) + keys[0], number + keys[1]
    for turn in range(5):
        for by in ROTATIONS[turn % 2]:
            one = one + other
            other = one ^ ((other << by) | (other >> (32 - by)))
        one = one + keys[(turn + 1) % 3]
        other = other + keys[(turn + 2) % 3] + jnp.uint32(turn + 1)
    return one ^ other
