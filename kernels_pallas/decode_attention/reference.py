"""Append one token to the cache and attend over it, in plain JAX: the meaning of the kernel."""

import jax
import jax.numpy as jnp
from jax import lax

MASKED = -1e30


def decode_attention(
    q_BHK: jax.Array,
    k_BGK: jax.Array,
    v_BGK: jax.Array,
    positions_B: jax.Array,
    k_cache_BGSK: jax.Array,
    v_cache_BGSK: jax.Array,
    *,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See api.decode_attention. Reads the whole cache whatever the positions are."""
    k_cache_BGSK = _append(k_cache_BGSK, k_BGK, positions_B)
    v_cache_BGSK = _append(v_cache_BGSK, v_BGK, positions_B)
    B, H, K = q_BHK.shape
    G, S = k_cache_BGSK.shape[1:3]
    q_BGMK = q_BHK.reshape(B, G, H // G, K)
    scores_BGMS = jnp.einsum(
        "BGMK,BGSK->BGMS", q_BGMK, k_cache_BGSK, preferred_element_type=jnp.float32
    )
    index_1S, position_B1 = jnp.arange(S, dtype=jnp.int32)[None, :], positions_B[:, None]
    visible_BS = (index_1S <= position_B1) & (position_B1 < S)
    if window is not None:
        visible_BS &= index_1S > position_B1 - window
    scores_BGMS = jnp.where(visible_BS[:, None, None], scores_BGMS * K**-0.5, MASKED)
    probs_BGMS = jax.nn.softmax(scores_BGMS, axis=-1)
    # Positions not yet written may hold NaN, and 0 * NaN is NaN.
    v_BGSK = jnp.where(visible_BS[:, None, :, None], v_cache_BGSK, 0)
    out_BGMK = jnp.einsum("BGMS,BGSK->BGMK", probs_BGMS, v_BGSK.astype(jnp.float32))
    return out_BGMK.reshape(B, H, K).astype(q_BHK.dtype), k_cache_BGSK, v_cache_BGSK


def _append(cache_BGSK: jax.Array, new_BGK: jax.Array, positions_B: jax.Array) -> jax.Array:
    """Writes row b at positions_B[b]; a position outside the cache leaves its row as it is."""
    S = cache_BGSK.shape[2]

    def one_row(cache_GSK: jax.Array, new_GK: jax.Array, position: jax.Array) -> jax.Array:
        inside = (position >= 0) & (position < S)
        place = jnp.clip(position, 0, S - 1)
        # The old slice is written back, rather than the old cache selected: that stays in place.
        old_G1K = lax.dynamic_slice_in_dim(cache_GSK, place, 1, axis=1)
        slice_G1K = jnp.where(inside, new_GK[:, None], old_G1K)
        return lax.dynamic_update_slice_in_dim(cache_GSK, slice_G1K, place, axis=1)

    return jax.vmap(one_row)(cache_BGSK, new_BGK.astype(cache_BGSK.dtype), positions_B)
