"""One decode step of attention: append the new key and value, attend over the cache."""

import functools

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas.decode_attention import pallas, reference

IMPLEMENTATIONS = {
    "pallas": dispatch.Implementation(pallas.decode_attention, pallas.why_not),
    "interpret": dispatch.Implementation(
        functools.partial(pallas.decode_attention, interpret=True), pallas.why_not_interpret
    ),
    "reference": dispatch.Implementation(reference.decode_attention, dispatch.always),
}
GPU_ORDER = ("pallas", "reference")


def decode_attention(
    q_BHK: jax.Array,
    k_BGK: jax.Array,
    v_BGK: jax.Array,
    positions_B: jax.Array,
    k_cache_BGSK: jax.Array,
    v_cache_BGSK: jax.Array,
    *,
    window: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes k, v at positions_B[b] and attends over 0..positions_B[b].

    Scale K**-0.5, fp32 softmax. Query head h reads key/value head h // (H / G). The caches are
    updated in place when they are donated. What lies beyond a row's position is never used and may
    be NaN.

    Args:
      q_BHK: the new token's queries, one token a row.
      k_BGK: its keys; written in the cache's dtype.
      v_BGK: its values; written in the cache's dtype.
      positions_B: int32; a row whose position is outside 0..S-1 is inactive: it writes nothing and
        its output is finite and otherwise unspecified.
      k_cache_BGSK: keys of the tokens before.
      v_cache_BGSK: values of the tokens before, in the dtype of the keys.
      window: only the last `window` positions, the new one included; None for all.
      implementation: "pallas" | "interpret" | "reference"; None takes the kernel on a GPU.

    Returns:
      (out_BHK in q's dtype, k cache, v cache).

    Raises:
      ValueError: shapes, dtypes or window do not fit together.
      dispatch.Unsupported: the named implementation cannot run, with its reason.
    """
    arrays = (q_BHK, k_BGK, v_BGK, positions_B, k_cache_BGSK, v_cache_BGSK)
    _check(*arrays, window)
    return dispatch.run(
        "decode_attention", IMPLEMENTATIONS, GPU_ORDER, implementation, *arrays, window=window
    )


def _check(
    q_BHK: jax.Array,
    k_BGK: jax.Array,
    v_BGK: jax.Array,
    positions_B: jax.Array,
    k_cache_BGSK: jax.Array,
    v_cache_BGSK: jax.Array,
    window: int | None,
) -> None:
    q, k, cache = q_BHK.shape, k_BGK.shape, k_cache_BGSK.shape
    fits = len(q) == 3 and len(cache) == 4 and k == v_BGK.shape and cache == v_cache_BGSK.shape
    fits = fits and k == (q[0], cache[1], q[2]) and (cache[0], cache[3]) == (q[0], q[2])
    if not fits or q[1] % cache[1] or positions_B.shape != q[:1]:
        raise ValueError(
            f"decode_attention: got q {q}, k {k}, v {v_BGK.shape}, positions {positions_B.shape}, "
            f"caches {cache} and {v_cache_BGSK.shape}; expected [B,H,K], [B,G,K], [B,G,K], [B], "
            f"[B,G,S,K] twice, with G dividing H"
        )
    if positions_B.dtype != jnp.int32:
        raise ValueError(f"decode_attention: positions are {positions_B.dtype}; cast to int32")
    if k_cache_BGSK.dtype != v_cache_BGSK.dtype:
        raise ValueError(
            f"decode_attention: the caches are {k_cache_BGSK.dtype} and {v_cache_BGSK.dtype}; "
            f"use one dtype"
        )
    if window is not None and window < 1:
        raise ValueError(f"decode_attention: window={window}; use at least 1, or None for none")
