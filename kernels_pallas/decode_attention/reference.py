"""Append one token to the cache and attend over it, in plain JAX: the meaning of the kernel."""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.decode_attention.narrow import narrowed, widened

MASKED = -1e30


def decode_attention(
    qkv_BGEK: jax.Array,
    positions_B: jax.Array,
    k_cache_BGSK: jax.Array,
    v_cache_BGSK: jax.Array,
    k_scale_BGS: jax.Array | None,
    v_scale_BGS: jax.Array | None,
    cos_BK: jax.Array | None,
    sin_BK: jax.Array | None,
    *,
    window: int | None,
) -> tuple[jax.Array, ...]:
    """See api.decode_attention. Reads the whole cache whatever the positions are."""
    B, _, _, K = qkv_BGEK.shape
    q_BGMK, k_BGK, v_BGK = qkv_BGEK[:, :, :-2], qkv_BGEK[:, :, -2], qkv_BGEK[:, :, -1]
    if cos_BK is not None and sin_BK is not None:
        q_BGMK = _turn(q_BGMK, cos_BK[:, None, None], sin_BK[:, None, None])
        k_BGK = _turn(k_BGK, cos_BK[:, None], sin_BK[:, None])
    q_BHK = q_BGMK.reshape(B, -1, K)
    if k_scale_BGS is not None and v_scale_BGS is not None:
        k_cache_BGSK, k_scale_BGS = _append_narrow(k_cache_BGSK, k_scale_BGS, k_BGK, positions_B)
        v_cache_BGSK, v_scale_BGS = _append_narrow(v_cache_BGSK, v_scale_BGS, v_BGK, positions_B)
        k_wide, v_wide = widened(k_cache_BGSK, k_scale_BGS), widened(v_cache_BGSK, v_scale_BGS)
        out = _attend(q_BHK, positions_B, k_wide, v_wide, window)
        return out, k_cache_BGSK, v_cache_BGSK, k_scale_BGS, v_scale_BGS
    k_cache_BGSK = _append(k_cache_BGSK, k_BGK, positions_B)
    v_cache_BGSK = _append(v_cache_BGSK, v_BGK, positions_B)
    out = _attend(q_BHK, positions_B, k_cache_BGSK, v_cache_BGSK, window)
    return out, k_cache_BGSK, v_cache_BGSK


def _turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Heads rotated in float32; the sines have their signs."""
    wide, half = x.astype(jnp.float32), x.shape[-1] // 2
    return (wide * cos + jnp.roll(wide, half, axis=-1) * sin).astype(x.dtype)


def _attend(
    q_BHK: jax.Array,
    positions_B: jax.Array,
    k_cache_BGSK: jax.Array,
    v_cache_BGSK: jax.Array,
    window: int | None,
) -> jax.Array:
    """Attention of each row to what its cache holds up to its position."""
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
    return out_BGMK.reshape(B, H, K).astype(q_BHK.dtype)


def _append_narrow(
    cache_BGSK: jax.Array, scale_BGS: jax.Array, new_BGK: jax.Array, positions_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes the rounded token and its scale."""
    values_BGK, new_scale_BG = narrowed(new_BGK, cache_BGSK.dtype)
    scale_BGS1 = _append(scale_BGS[..., None], new_scale_BG[..., None], positions_B)
    return _append(cache_BGSK, values_BGK, positions_B), scale_BGS1[..., 0]


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
