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
from kernels_pallas.decode_attention.heads import Turn, make_heads, turned
from kernels_pallas.decode_attention.narrow import narrowed, widened
from kernels_pallas.decode_attention.tiling import Tiling
from kernels_pallas.triton import SMALLEST_DOT, load, next_power_of_2, silence_backend_deprecation


def why_not(
    qkv_BGEK: jax.Array,
    positions_B: jax.Array,
    k_cache_BGSK: jax.Array,
    *arrays: jax.Array | None,
    window: int | None,
) -> str | None:
    """Reason why the compiled kernel does not take decode_attention's arguments, or None."""
    reason = dispatch.why_not_gpu()
    return reason or why_not_interpret(qkv_BGEK, positions_B, k_cache_BGSK, *arrays, window=window)


def why_not_interpret(
    qkv_BGEK: jax.Array,
    positions_B: jax.Array,
    k_cache_BGSK: jax.Array,
    *arrays: jax.Array | None,
    window: int | None,
) -> str | None:
    """The limits that do not depend on the platform."""
    del positions_B, arrays, window
    qkv, cache = qkv_BGEK.dtype, k_cache_BGSK.dtype
    if qkv != cache and cache.itemsize > 1:
        return f"queries are {qkv} and the cache {cache}: the kernel needs one dtype"
    if qkv not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the kernel takes bfloat16, float16 and float32 and the arrays are {qkv}"
    # The backend counts in 32 signed bits up to 2^32 bytes: too few for numbers of one byte.
    if cache.itemsize == 1 and 2**31 < k_cache_BGSK.size <= 2**32:
        return f"offsets are 32 bits wide and the cache {k_cache_BGSK.shape} has more than 2^31"
    return None


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
    window: int | None,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """See api.decode_attention; `tiling` None takes tiling.choose."""
    silence_backend_deprecation()
    B, G, E, K = qkv_BGEK.shape
    M, S, dtype = E - 2, k_cache_BGSK.shape[2], qkv_BGEK.dtype
    if tiling is None:
        tiling = tilings.choose(B, G, M, K, S, window, k_cache_BGSK.dtype.itemsize)
    caches = [a for a in (k_cache_BGSK, v_cache_BGSK, k_scale_BGS, v_scale_BGS) if a is not None]
    turn = [a for a in (cos_BK, sin_BK) if a is not None]
    call = _pallas_call((B, G, M, S, K), dtype, caches, len(turn), window, tiling, interpret)
    parts, *rest = call(qkv_BGEK, qkv_BGEK, qkv_BGEK, positions_B, *turn, *caches)
    if tiling.num_splits == 1:
        return parts.reshape(B, G * M, K), *rest
    log_sums_BGMJ, *rest = rest
    weights_BGMJ = jax.nn.softmax(log_sums_BGMJ, axis=-1)
    out_BGMK = jnp.sum(weights_BGMJ[..., None] * parts, axis=3)
    return out_BGMK.reshape(B, G * M, K).astype(dtype), *rest


def _pallas_call(
    dims, dtype, caches, num_turn: int, window: int | None, tiling: Tiling, interpret: bool
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
    # The group's query heads, its key and its value: three views of one array.
    token_specs = [
        pl.BlockSpec((None, None, rows, lanes), lambda b, g, j: (b, g, 0, 0)),
        pl.BlockSpec((None, None, None, lanes), lambda b, g, j: (b, g, M, 0)),
        pl.BlockSpec((None, None, None, lanes), lambda b, g, j: (b, g, M + 1, 0)),
        pl.BlockSpec((None,), lambda b, g, j: (b,)),
        *[pl.BlockSpec((None, lanes), lambda b, g, j: (b, 0))] * num_turn,
    ]
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
        functools.partial(
            _kernel,
            num_turn=num_turn,
            num_caches=len(caches),
            dims=dims,
            window=window,
            tiling=tiling,
        ),
        grid=(B, G, J),
        in_specs=[*token_specs, *cache_specs],
        out_specs=[*partial_specs, *cache_specs],
        out_shape=[*partial_shapes, *cache_shapes],
        input_output_aliases={4 + num_turn + n: first_cache + n for n in range(len(caches))},
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
    num_turn: int,
    num_caches: int,
    dims,
    window,
    tiling: Tiling,
):
    k_ref, v_ref, *scale_refs = refs[-num_caches:]
    turn_refs, outputs = refs[:num_turn], refs[num_turn + num_caches :]
    partial_refs = outputs[:-num_caches]
    _, _, M, S, K = dims
    block, lanes = tiling.block, k_ref.shape[-1]
    position = position_ref[()]
    inside = (position >= 0) & (position < S)
    end = jnp.where(inside, position, 0)  # cached positions are start..end-1; the new one is end
    start = jnp.int32(0) if window is None else jnp.maximum(end + 1 - window, 0)
    lane_ok = jnp.arange(lanes) < K
    # Without padded lanes the masks are left out: nothing is added to the plain kernel.
    token_ok = None if lanes == K else lane_ok
    turn = Turn(turn_refs, K, lanes) if turn_refs else None
    new_k = turned(load(new_k_ref, token_ok), new_k_ref, (), token_ok, turn)
    new_v = load(new_v_ref, token_ok)
    token = new_k, new_v
    token_scales: tuple[jax.Array, ...] = ()
    if scale_refs:
        token, token_scales = zip(*(narrowed(x, k_ref.dtype) for x in token), strict=True)
        new_k, new_v = (widened(*pair) for pair in zip(token, token_scales, strict=True))
    heads = make_heads(q_ref, M, K, turn, use_dot=tiling.use_dot)

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
