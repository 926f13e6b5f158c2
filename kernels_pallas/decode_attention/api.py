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
FUSED = dispatch.kernel_table(
    pallas.decode_attention_fused,
    pallas.why_not_fused,
    pallas.why_not_interpret_fused,
    reference.decode_attention_fused,
)
GPU_ORDER = ("pallas", "reference")


def decode_attention(
    q_BHK: jax.Array,
    k_BGK: jax.Array,
    v_BGK: jax.Array,
    positions_B: jax.Array,
    k_cache_BGSK: jax.Array,
    v_cache_BGSK: jax.Array,
    k_scale_BGS: jax.Array | None = None,
    v_scale_BGS: jax.Array | None = None,
    *,
    window: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Writes k, v at positions_B[b] and attends over 0..positions_B[b].

    Scale K**-0.5, fp32 softmax. Query head h reads key/value head h // (H / G). The caches are
    updated in place when they are donated. What lies beyond a row's position is never used and may
    be NaN.

    Caches of one byte a number (int8, float8_e4m3fn) come with a scale for each row, head and
    position (`narrow.py`). The new token is rounded before it is attended to, too.

    Args:
      q_BHK: the new token's queries, one token a row.
      k_BGK: its keys; written in the cache's dtype.
      v_BGK: its values; written in the cache's dtype.
      positions_B: int32; a row whose position is outside 0..S-1 is inactive: it writes nothing and
        its output is finite and otherwise unspecified.
      k_cache_BGSK: keys of the tokens before.
      v_cache_BGSK: values of the tokens before, in the dtype of the keys.
      k_scale_BGS: float32, of keys of one byte a number; None for others.
      v_scale_BGS: float32, of such values.
      window: only the last `window` positions, the new one included; None for all.
      implementation: "pallas" | "interpret" | "reference"; None takes the kernel on a GPU.

    Returns:
      (out_BHK in q's dtype, k cache, v cache), and the two scales where there are some.

    Raises:
      ValueError: shapes, dtypes or window do not fit together.
      dispatch.Unsupported: the named implementation cannot run, with its reason.
    """
    arrays = (q_BHK, k_BGK, v_BGK, positions_B, k_cache_BGSK, v_cache_BGSK)
    _check(*arrays, window)
    scales = _check_scales(k_cache_BGSK, k_scale_BGS, v_scale_BGS)
    return dispatch.run(
        "decode_attention", IMPLEMENTATIONS, GPU_ORDER, implementation, *arrays, *scales,
        window=window,
    )  # fmt: skip


def decode_attention_fused(
    qkv_BGEK: jax.Array,
    positions_B: jax.Array,
    k_cache_BGSK: jax.Array,
    v_cache_BGSK: jax.Array,
    k_scale_BGS: jax.Array | None = None,
    v_scale_BGS: jax.Array | None = None,
    *,
    window: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """`decode_attention` of the projection as it is: per group its query heads, key and value.

    Raises:
      ValueError: shapes, dtypes or window do not fit together.
      dispatch.Unsupported: the named implementation cannot run, with its reason.
    """
    if qkv_BGEK.ndim != 4 or qkv_BGEK.shape[2] < 3:
        raise ValueError(
            f"decode_attention_fused: got {qkv_BGEK.shape}; expected [B,G,E,K] with at least one "
            "query head, a key and a value in E"
        )
    arrays = (qkv_BGEK, positions_B, k_cache_BGSK, v_cache_BGSK)
    B, G, E, K = qkv_BGEK.shape
    q_BHK = jax.ShapeDtypeStruct((B, G * (E - 2), K), qkv_BGEK.dtype)
    token_BGK = jax.ShapeDtypeStruct((B, G, K), qkv_BGEK.dtype)
    _check(q_BHK, token_BGK, token_BGK, *arrays[1:], window)
    scales = _check_scales(k_cache_BGSK, k_scale_BGS, v_scale_BGS)
    return dispatch.run(
        "decode_attention_fused", FUSED, GPU_ORDER, implementation, *arrays, *scales, window=window
    )


def _check_scales(cache_BGSK: jax.Array, *scales: jax.Array | None) -> tuple[jax.Array, ...]:
    """The scales that there are; ValueError where they do not fit the caches."""
    given = tuple(scale for scale in scales if scale is not None)
    wanted = 2 if cache_BGSK.dtype.itemsize == 1 else 0
    wrong = [s for s in given if s.shape != cache_BGSK.shape[:3] or s.dtype != jnp.float32]
    if len(given) != wanted or wrong:
        raise ValueError(
            f"decode_attention: caches of {cache_BGSK.dtype} {cache_BGSK.shape} with scales "
            f"{[(str(s.dtype), s.shape) for s in given]}; expected two of float32 [B,G,S] with "
            "int8 and float8_e4m3fn, and none else"
        )
    return given


def _check(
    q_BHK: jax.Array | jax.ShapeDtypeStruct,
    k_BGK: jax.Array | jax.ShapeDtypeStruct,
    v_BGK: jax.Array | jax.ShapeDtypeStruct,
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
