"""One decode step of attention: append the new key and value, attend over the cache."""

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas.decode_attention import pallas, reference

IMPLEMENTATIONS = dispatch.kernel_table(
    pallas.decode_attention,
    pallas.why_not,
    pallas.why_not_interpret,
    reference.decode_attention,
)
GPU_ORDER = ("pallas", "reference")


def decode_attention(
    qkv_BGEK: jax.Array,
    positions_B: jax.Array,
    k_cache_BGSK: jax.Array,
    v_cache_BGSK: jax.Array,
    k_scale_BGS: jax.Array | None = None,
    v_scale_BGS: jax.Array | None = None,
    cos_BK: jax.Array | None = None,
    sin_BK: jax.Array | None = None,
    *,
    window: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Writes the new key and value at positions_B[b] and attends over 0..positions_B[b].

    Scale K**-0.5, fp32 softmax. Each group has M query heads that read its key and value. The
    caches are updated in place when they are donated. What lies beyond a row's position is never
    used and may be NaN.

    With `cos_BK` and `sin_BK` queries and key are rotated first, in float32: lane i becomes
    `x[i] cos[i] + x[(i + K/2) mod K] sin[i]` (so the first half of the sines is negative).

    Caches of one byte a number (int8, float8_e4m3fn) come with a scale for each row, head and
    position (`narrow.py`). The new token is rounded before it is attended to, too.

    Args:
      qkv_BGEK: the new token's projection, one token a row: in E a group's M query heads, its key
        and its value, which are written in the cache's dtype.
      positions_B: int32; a row whose position is outside 0..S-1 is inactive: it writes nothing and
        its output is finite and otherwise unspecified.
      k_cache_BGSK: keys of the tokens before.
      v_cache_BGSK: values of the tokens before, in the dtype of the keys.
      k_scale_BGS: float32, of keys of one byte a number; None for others.
      v_scale_BGS: float32, of such values.
      cos_BK: float32, of each row's position; None for no rotation.
      sin_BK: float32, with their signs.
      window: only the last `window` positions, the new one included; None for all.
      implementation: "pallas" | "interpret" | "reference"; None takes the kernel on a GPU.

    Returns:
      (out_BHK in qkv's dtype with H = G M, k cache, v cache), and the two scales where there are
      some.

    Raises:
      ValueError: shapes, dtypes or window do not fit together.
      dispatch.Unsupported: the named implementation cannot run, with its reason.
    """
    _check(qkv_BGEK, positions_B, k_cache_BGSK, v_cache_BGSK, window)
    _check_scales(k_cache_BGSK, k_scale_BGS, v_scale_BGS)
    _check_turn(qkv_BGEK, cos_BK, sin_BK)
    return dispatch.run(
        "decode_attention", IMPLEMENTATIONS, GPU_ORDER, implementation, qkv_BGEK, positions_B,
        k_cache_BGSK, v_cache_BGSK, k_scale_BGS, v_scale_BGS, cos_BK, sin_BK, window=window,
    )  # fmt: skip


def _check(
    qkv_BGEK: jax.Array,
    positions_B: jax.Array,
    k_cache_BGSK: jax.Array,
    v_cache_BGSK: jax.Array,
    window: int | None,
) -> None:
    qkv, cache = qkv_BGEK.shape, k_cache_BGSK.shape
    fits = len(qkv) == 4 and len(cache) == 4 and cache == v_cache_BGSK.shape
    fits = fits and (*qkv[:2], qkv[3]) == (*cache[:2], cache[3]) and qkv[2] >= 3
    if not fits or positions_B.shape != qkv[:1]:
        raise ValueError(
            f"decode_attention: got {qkv}, positions {positions_B.shape}, caches {cache} and "
            f"{v_cache_BGSK.shape}; expected [B,G,E,K] with at least one query head, a key and a "
            "value in E, [B], [B,G,S,K] twice"
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


def _check_scales(cache_BGSK: jax.Array, *scales: jax.Array | None) -> None:
    """ValueError where there are none and should be, or some that do not fit the caches."""
    given = [scale for scale in scales if scale is not None]
    wanted = 2 if cache_BGSK.dtype.itemsize == 1 else 0
    wrong = [s for s in given if s.shape != cache_BGSK.shape[:3] or s.dtype != jnp.float32]
    if len(given) != wanted or wrong:
        raise ValueError(
            f"decode_attention: caches of {cache_BGSK.dtype} {cache_BGSK.shape} with scales "
            f"{[(str(s.dtype), s.shape) for s in given]}; expected two of float32 [B,G,S] with "
            "int8 and float8_e4m3fn, and none else"
        )


def _check_turn(qkv_BGEK: jax.Array, *turn: jax.Array | None) -> None:
    """ValueError where cosines and sines do not fit, or only one of them is there."""
    B, _, _, K = qkv_BGEK.shape
    given = [None if t is None else (str(t.dtype), t.shape) for t in turn]
    if given not in ([None, None], [("float32", (B, K))] * 2) or (given[0] and K % 2):
        raise ValueError(
            f"decode_attention: cosines and sines are {given} for heads of {K}; expected float32 "
            f"[{B},{K}] both, of an even size, or none"
        )
