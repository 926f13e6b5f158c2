"""Causal attention in plain JAX: the meaning of the other implementations.

out_i = sum_j softmax_j(q_i . k_j / sqrt(K)) v_j over j <= i (and j > i - window, and
j >= start_i).
"""

import jax
import jax.numpy as jnp
from jax import lax

# Finite: a row of -inf would give NaN in softmax and its gradient.
MASKED = -1e30


def attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    starts_BT: jax.Array | None,
    *,
    window: int | None,
    query_block: int = 512,
) -> jax.Array:
    """Returns out_BTHK in q's dtype; the softmax is fp32.

    Rows longer than two `query_block`s are evaluated a block of queries at a time and recomputed in
    the backward pass, so that memory grows with T and not with T squared.
    """
    B, T, H, K = q_BTHK.shape
    if 2 * query_block >= T:
        return _attend(q_BTHK, k_BTGK, v_BTGK, starts_BT, jnp.int32(0), window)
    blocks = -(-T // query_block)
    q_BTHK = jnp.pad(q_BTHK, ((0, 0), (0, blocks * query_block - T), (0, 0), (0, 0)))
    q_blocks = jnp.moveaxis(q_BTHK.reshape(B, blocks, query_block, H, K), 1, 0)
    start_blocks = None
    if starts_BT is not None:
        starts_BT = jnp.pad(starts_BT, ((0, 0), (0, blocks * query_block - T)))
        start_blocks = jnp.moveaxis(starts_BT.reshape(B, blocks, query_block), 1, 0)

    @jax.checkpoint
    def one_block(block: tuple[jax.Array, jax.Array | None, jax.Array]) -> jax.Array:
        q_BCHK, starts_BC, first = block
        return _attend(q_BCHK, k_BTGK, v_BTGK, starts_BC, first, window)

    firsts = jnp.arange(blocks, dtype=jnp.int32) * query_block
    out = lax.map(one_block, (q_blocks, start_blocks, firsts))
    return jnp.moveaxis(out, 0, 1).reshape(B, blocks * query_block, H, K)[:, :T]


def _attend(
    q_BCHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    starts_BC: jax.Array | None,
    first: jax.Array,
    window: int | None,
) -> jax.Array:
    """Queries first..first+C-1 over all keys. M is query heads per key/value head."""
    B, C, H, K = q_BCHK.shape
    T, G = k_BTGK.shape[1:3]
    q_BCGMK = q_BCHK.reshape(B, C, G, H // G, K)
    scores_BGMCT = jnp.einsum(
        "BCGMK,BTGK->BGMCT", q_BCGMK, k_BTGK, preferred_element_type=jnp.float32
    )
    query_C1 = (first + jnp.arange(C, dtype=jnp.int32))[:, None]
    key_1T = jnp.arange(T, dtype=jnp.int32)[None, :]
    visible_BCT = (key_1T <= query_C1)[None]
    if window is not None:
        visible_BCT &= (key_1T > query_C1 - window)[None]
    if starts_BC is not None:
        visible_BCT &= key_1T[None] >= starts_BC[:, :, None]
    scores_BGMCT = jnp.where(visible_BCT[:, None, None], scores_BGMCT * K**-0.5, MASKED)
    probs_BGMCT = jax.nn.softmax(scores_BGMCT, axis=-1).astype(v_BTGK.dtype)
    out_BCGMK = jnp.einsum("BGMCT,BTGK->BCGMK", probs_BGMCT, v_BTGK)
    return out_BCGMK.reshape(B, C, H, K).astype(q_BCHK.dtype)
