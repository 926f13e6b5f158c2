"""The decode kernel: writes the new key and value into the cache and attends, in one launch.

Pallas, Triton backend. One program serves one row, one key/value head and one split of the row's
positions; it reads each cached key and value once for all query heads of the group, stops at the
row's length, and takes the new token from registers. M is query heads per key/value head.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas import dispatch
from kernels_pallas.decode_attention import tiling as tilings
from kernels_pallas.decode_attention.heads import make_heads
from kernels_pallas.decode_attention.narrow import narrowed, widened
from kernels_pallas.decode_attention.tiling import Tiling
from kernels_pallas.triton import SMALLEST_DOT, load, next_power_of_2, silence_backend_deprecation


def why_not(*arrays: jax.Array, window: int | None) -> str | None:
    """Reason why the compiled kernel does not take decode_attention's arguments, or None."""
    return dispatch.why_not_gpu() or why_not_interpret(*arrays, window=window)


def why_not_interpret(*arrays: jax.Array, window: int | None) -> str | None:
    """The limits that do not depend on the platform."""
    del window
    q_BHK, _, _, _, k_cache_BGSK, *_ = arrays
    if q_BHK.dtype != k_cache_BGSK.dtype and k_cache_BGSK.dtype.itemsize > 1:
        return f"q is {q_BHK.dtype} and the cache {k_cache_BGSK.dtype}: the kernel needs one dtype"
    if q_BHK.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the kernel takes bfloat16, float16 and float32 and the arrays are {q_BHK.dtype}"
    # The backend counts in 32 signed bits up to 2^32 bytes: too few for numbers of one byte.
    if k_cache_BGSK.dtype.itemsize == 1 and 2**31 < k_cache_BGSK.size <= 2**32:
        return f"offsets are 32 bits wide and the cache {k_cache_BGSK.shape} has more than 2^31"
    return None


def decode_attention(
    q_BHK: jax.Array,
    k_BGK: jax.Array,
    v_BGK: jax.Array,
    positions_B: jax.Array,
    k_cache_BGSK: jax.Array,
    v_cache_BGSK: jax.Array,
    *scales_BGS: jax.Array,
    window: int | None,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """See api.decode_attention; `tiling` None takes tiling.choose."""
    B, H, K = q_BHK.shape
    G = k_cache_BGSK.shape[1]
    if not scales_BGS:
        k_BGK, v_BGK = k_BGK.astype(k_cache_BGSK.dtype), v_BGK.astype(v_cache_BGSK.dtype)
    tokens = (q_BHK.reshape(B, G, H // G, K), k_BGK, v_BGK)
    caches = (k_cache_BGSK, v_cache_BGSK, *scales_BGS)
    return _run(tokens, H // G, positions_B, caches, window, tiling, interpret)


def why_not_fused(*arrays: jax.Array, window: int | None) -> str | None:
    """Reason why the compiled kernel does not take decode_attention_fused's arguments, or None."""
    return dispatch.why_not_gpu() or why_not_interpret_fused(*arrays, window=window)


def why_not_interpret_fused(*arrays: jax.Array, window: int | None) -> str | None:
    """The limits that do not depend on the platform."""
    qkv_BGEK, positions_B, *caches = arrays
    tokens = (qkv_BGEK, qkv_BGEK, qkv_BGEK)
    return why_not_interpret(*tokens, positions_B, *caches, window=window)


def decode_attention_fused(
    qkv_BGEK: jax.Array,
    positions_B: jax.Array,
    k_cache_BGSK: jax.Array,
    v_cache_BGSK: jax.Array,
    *scales_BGS: jax.Array,
    window: int | None,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """See api.decode_attention_fused; `tiling` None takes tiling.choose."""
    M, tokens = qkv_BGEK.shape[2] - 2, (qkv_BGEK, qkv_BGEK, qkv_BGEK)
    caches = (k_cache_BGSK, v_cache_BGSK, *scales_BGS)
    return _run(tokens, M, positions_B, caches, window, tiling, interpret)


def _run(
    tokens: tuple[jax.Array, jax.Array, jax.Array],
    M: int,
    positions_B: jax.Array,
    caches: tuple[jax.Array, ...],
    window: int | None,
    tiling: Tiling | None,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """The kernel, and the reduction over splits; `tokens` as `_token_specs` reads them."""
    silence_backend_deprecation()
    B, G, S, K = caches[0].shape
    dtype = tokens[0].dtype
    if tiling is None:
        tiling = tilings.choose(B, G, M, K, S, window)
    fused = tokens[1].ndim == 4
    call = _pallas_call((B, G, M, S, K), dtype, caches, window, tiling, interpret, fused=fused)
    parts, *rest = call(*tokens, positions_B, *caches)
    if tiling.num_splits == 1:
        return parts.reshape(B, G * M, K), *rest
    log_sums_BGMJ, *rest = rest
    weights_BGMJ = jax.nn.softmax(log_sums_BGMJ, axis=-1)
    out_BGMK = jnp.sum(weights_BGMJ[..., None] * parts, axis=3)
    return out_BGMK.reshape(B, G * M, K).astype(dtype), *rest


def _token_specs(rows: int, M: int, lanes: int, *, fused: bool) -> list[pl.BlockSpec]:
    """The group's query heads, its key and its value: of three arrays `[B, G, M, K]`, `[B, G, K]`
    twice, or three times of one `[B, G, M+2, K]` that holds them in this order.
    """
    queries = pl.BlockSpec((None, None, rows, lanes), lambda b, g, j: (b, g, 0, 0))
    if not fused:
        token = pl.BlockSpec((None, None, lanes), lambda b, g, j: (b, g, 0))
        return [queries, token, token]
    return [
        queries,
        pl.BlockSpec((None, None, None, lanes), lambda b, g, j: (b, g, M, 0)),
        pl.BlockSpec((None, None, None, lanes), lambda b, g, j: (b, g, M + 1, 0)),
    ]


def _pallas_call(
    dims, dtype, caches, window: int | None, tiling: Tiling, interpret: bool, *, fused: bool
):
    """The call for [B,G,M,S,K] = dims; its outputs are out, [log-sums,] and the caches, which are
    keys, values and, where these have one byte a number, the scales of both.
    """
    B, G, M, S, K = dims
    # Arrays inside a kernel have power-of-two sizes; the lanes beyond K and M are masked.
    lanes = max(SMALLEST_DOT, next_power_of_2(K))
    rows = max(SMALLEST_DOT, next_power_of_2(M)) if tiling.use_dot else M
    J = tiling.num_splits
    cache_shapes = [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches]
    cache_specs = [pl.BlockSpec((None, None, S, lanes), lambda b, g, j: (b, g, 0, 0))] * 2
    cache_specs += [pl.BlockSpec((None, None, S), lambda b, g, j: (b, g, 0))] * (len(caches) - 2)
    position_spec = pl.BlockSpec((None,), lambda b, g, j: (b,))
    token_specs = _token_specs(rows, M, lanes, fused=fused)
    if J == 1:
        partial_shapes = [jax.ShapeDtypeStruct((B, G, M, K), dtype)]
        partial_specs = [pl.BlockSpec((None, None, rows, lanes), lambda b, g, j: (b, g, 0, 0))]
    else:
        partial_shapes = [
            jax.ShapeDtypeStruct((B, G, M, J, K), jnp.float32),
            jax.ShapeDtypeStruct((B, G, M, J), jnp.float32),
        ]
        partial_specs = [
            pl.BlockSpec((None, None, rows, None, lanes), lambda b, g, j: (b, g, 0, j, 0)),
            pl.BlockSpec((None, None, rows, None), lambda b, g, j: (b, g, 0, j)),
        ]
    first_cache = len(partial_shapes)
    return pl.pallas_call(
        functools.partial(_kernel, num_caches=len(caches), dims=dims, window=window, tiling=tiling),
        grid=(B, G, J),
        in_specs=[*token_specs, position_spec, *cache_specs],
        out_specs=[*partial_specs, *cache_specs],
        out_shape=[*partial_shapes, *cache_shapes],
        input_output_aliases={4 + n: first_cache + n for n in range(len(caches))},
        compiler_params=plt.CompilerParams(num_warps=tiling.num_warps, num_stages=2),
        interpret=interpret,
        name="decode_attention",
    )


def _kernel(
    q_ref,
    new_k_ref,
    new_v_ref,
    position_ref,
    *refs,
    num_caches: int,
    dims,
    window,
    tiling: Tiling,
):
    partial_refs, (k_ref, v_ref, *scale_refs) = refs[num_caches:-num_caches], refs[-num_caches:]
    _, _, M, S, K = dims
    block, lanes = tiling.block, k_ref.shape[-1]
    position = position_ref[()]
    inside = (position >= 0) & (position < S)
    end = jnp.where(inside, position, 0)  # cached positions are start..end-1; the new one is end
    start = jnp.int32(0) if window is None else jnp.maximum(end + 1 - window, 0)
    lane_ok = jnp.arange(lanes) < K
    # Without padded lanes the masks are left out: nothing is added to the plain kernel.
    token_ok = None if lanes == K else lane_ok
    token = new_k, new_v = load(new_k_ref, token_ok), load(new_v_ref, token_ok)
    token_scales: tuple[jax.Array, ...] = ()
    if scale_refs:
        token, token_scales = zip(*(narrowed(x, k_ref.dtype) for x in token), strict=True)
        new_k, new_v = (widened(*pair) for pair in zip(token, token_scales, strict=True))
    heads = make_heads(q_ref, M, K, use_dot=tiling.use_dot)

    def step(i: jax.Array, state):
        index = i * block + jnp.arange(block)
        ok = (index >= start) & (index < end)
        ok_tile = jnp.broadcast_to(ok[:, None], (block, lanes))
        if lanes != K:
            ok_tile &= lane_ok[None, :]
        here = pl.ds(i * block, block)
        # Masked loads: what lies beyond the row's length is not read, so it may be NaN.
        k = plt.load(k_ref.at[here, :], mask=ok_tile, other=0.0)
        v = plt.load(v_ref.at[here, :], mask=ok_tile, other=0.0)
        scales = tuple(plt.load(ref.at[here], mask=ok, other=0.0) for ref in scale_refs)
        return heads.attend(state, k, v, ok, scales)

    low, high = _blocks_of_split(start, end, tiling)
    state = lax.fori_loop(low, high, step, heads.empty())
    first_split = pl.program_id(2) == 0
    state = heads.attend_new(state, new_k, new_v, first_split)
    heads.write(list(partial_refs), state)

    @pl.when(inside & first_split)
    def _():
        for ref, values in zip((k_ref, v_ref), token, strict=True):
            plt.store(ref.at[end, :], values, mask=token_ok)
        for ref, scale in zip(scale_refs, token_scales, strict=True):
            plt.store(ref.at[end], scale)


def _blocks_of_split(start: jax.Array, end: jax.Array, tiling: Tiling):
    """First and last+1 block of this program: the row's own blocks in equal parts."""
    first = lax.div(start, jnp.int32(tiling.block))
    stop = lax.div(end + (tiling.block - 1), jnp.int32(tiling.block))
    if tiling.num_splits == 1:
        return first, stop
    share = lax.div(stop - first + (tiling.num_splits - 1), jnp.int32(tiling.num_splits))
    low = first + pl.program_id(2) * share
    return low, jnp.minimum(low + share, stop)
