"""The random numbers of sampling: a function of key, index and sample, for any columns alone."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p


def sample_keys(key_data: jax.Array, index_B: jax.Array, ids_B: jax.Array) -> jax.Array:
    """Key data `[B, 2]` for token `index_B` of each sample."""
    return jax.random.key_data(_keys(key_data, index_B, ids_B))


def gumbel_noise(key_data: jax.Array, index_B: jax.Array, ids_B: jax.Array, vocab: int):
    """Gumbel noise `[B, V]` for token `index_B` of each sample."""
    return jax.vmap(lambda key: jax.random.gumbel(key, (vocab,)))(_keys(key_data, index_B, ids_B))


def gumbel_noise_from(
    key_data: jax.Array, index_B: jax.Array, ids_B: jax.Array, first: jax.Array, width: int
) -> jax.Array:
    """Columns `first` to `first + width` of `gumbel_noise`, bit for bit, without the others.

    JAX's generator hashes each column's number with the key, so that any range can be made alone;
    its public functions make all of them.
    """
    keys_B2 = sample_keys(key_data, index_B, ids_B)
    column_V = first.astype(jnp.uint32) + lax.iota(jnp.uint32, width)

    def bits(key_2: jax.Array) -> jax.Array:
        high, low = (jnp.broadcast_to(half, column_V.shape) for half in key_2)
        one, other = threefry2x32_p.bind(high, low, jnp.zeros_like(column_V), column_V)
        return one ^ other

    return -jnp.log(-jnp.log(_uniform(jax.vmap(bits)(keys_B2))))


def _keys(key_data: jax.Array, index_B: jax.Array, ids_B: jax.Array) -> jax.Array:
    fold, key = jax.random.fold_in, jax.random.wrap_key_data(key_data)
    return jax.vmap(lambda at, sample_id: fold(fold(key, at), sample_id))(index_B, ids_B)


def _uniform(bits: jax.Array) -> jax.Array:
    """Floats in (0, 1) as `jax.random.uniform` makes them: 23 bits behind the binary point."""
    tiny = jnp.finfo(jnp.float32).tiny
    mantissa = (bits >> 9) | jnp.uint32(0x3F800000)  # 1.0
    unit = lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0
    return jnp.maximum(tiny, unit * (1.0 - tiny) + tiny)
