"""The decode kernel: writes the new key and value into the cache and attends, in one launch.

Pallas, Triton backend. One program serves one row, one key/value head and one split of the row's
positions; it reads each cached key and value once for all query heads of the group, stops at the
row's length, and takes the new token from registers. M is query heads per key/value head.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas import dispatch
from kernels_pallas.decode_attention import tiling as tilings
from kernels_pallas.decode_attention.heads import load, make_heads
from kernels_pallas.decode_attention.tiling import Tiling


def why_not(*arrays: jax.Array, window: int | None) -> str | None:
    """Reason why the compiled kernel does not take decode_attention's arguments, or None."""
    return dispatch.why_not_gpu() or why_not_interpret(*arrays, window=window)


def why_not_interpret(*arrays: jax.Array, window: int | None) -> str | None:
    """The limits that do not depend on the platform."""
    del window
    q_BHK, _, _, _, k_cache_BGSK, _ = arrays
    if q_BHK.dtype != k_cache_BGSK.dtype:
        return f"q is {q_BHK.dtype} and the cache {k_cache_BGSK.dtype}: the kernel needs one dtype"
    if q_BHK.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the kernel takes bfloat16, float16 and float32 and the arrays are {q_BHK.dtype}"
    return None


def decode_attention(
    q_BHK: jax.Array,
    k_BGK: jax.Array,
    v_BGK: jax.Array,
    positions_B: jax.Array,
    k_cache_BGSK: jax.Array,
    v_cache_BGSK: jax.Array,
    *,
    window: int | None,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See api.decode_attention; `tiling` None takes tiling.choose."""
    _silence_backend_deprecation()
    B, H, K = q_BHK.shape
    G, S = k_cache_BGSK.shape[1:3]
    M = H // G
    if tiling is None:
        tiling = tilings.choose(B, G, M, K, S, window)
    call = _pallas_call((B, G, M, S, K), q_BHK.dtype, window, tiling, interpret)
    new_k_BGK, new_v_BGK = k_BGK.astype(k_cache_BGSK.dtype), v_BGK.astype(v_cache_BGSK.dtype)
    parts, *rest = call(
        q_BHK.reshape(B, G, M, K), new_k_BGK, new_v_BGK, positions_B, k_cache_BGSK, v_cache_BGSK
    )
    if tiling.num_splits == 1:
        k_cache_BGSK, v_cache_BGSK = rest
        return parts.reshape(B, H, K), k_cache_BGSK, v_cache_BGSK
    log_sums_BGMJ, k_cache_BGSK, v_cache_BGSK = rest
    weights_BGMJ = jax.nn.softmax(log_sums_BGMJ, axis=-1)
    out_BGMK = jnp.sum(weights_BGMJ[..., None] * parts, axis=3)
    return out_BGMK.reshape(B, H, K).astype(q_BHK.dtype), k_cache_BGSK, v_cache_BGSK


def _pallas_call(dims, dtype, window: int | None, tiling: Tiling, interpret: bool):
    """The call for [B,G,M,S,K] = dims; its outputs are out, [log-sums,] and the two caches."""
    B, G, M, S, K = dims
    # Arrays inside a kernel have power-of-two sizes; the lanes beyond K and M are masked.
    lanes = max(tilings.SMALLEST_DOT, tilings.next_power_of_2(K))
    rows = max(tilings.SMALLEST_DOT, tilings.next_power_of_2(M)) if tiling.use_dot else M
    J = tiling.num_splits
    cache = jax.ShapeDtypeStruct((B, G, S, K), dtype)
    token_spec = pl.BlockSpec((None, None, lanes), lambda b, g, j: (b, g, 0))
    cache_spec = pl.BlockSpec((None, None, S, lanes), lambda b, g, j: (b, g, 0, 0))
    group_spec = pl.BlockSpec((None, None, rows, lanes), lambda b, g, j: (b, g, 0, 0))
    position_spec = pl.BlockSpec((None,), lambda b, g, j: (b,))
    if J == 1:
        partial_shapes = [jax.ShapeDtypeStruct((B, G, M, K), dtype)]
        partial_specs = [group_spec]
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
        functools.partial(_kernel, dims=dims, window=window, tiling=tiling),
        grid=(B, G, J),
        in_specs=[group_spec, token_spec, token_spec, position_spec, cache_spec, cache_spec],
        out_specs=[*partial_specs, cache_spec, cache_spec],
        out_shape=[*partial_shapes, cache, cache],
        input_output_aliases={4: first_cache, 5: first_cache + 1},
        compiler_params=plt.CompilerParams(num_warps=tiling.num_warps, num_stages=2),
        interpret=interpret,
        name="decode_attention",
    )


def _kernel(
    q_ref, new_k_ref, new_v_ref, position_ref, _k_in, _v_in, *out_refs, dims, window, tiling: Tiling
):
    *partial_refs, k_ref, v_ref = out_refs
    _, _, M, S, K = dims
    block, lanes = tiling.block, k_ref.shape[-1]
    position = position_ref[()]
    inside = (position >= 0) & (position < S)
    end = jnp.where(inside, position, 0)  # cached positions are start..end-1; the new one is end
    start = jnp.int32(0) if window is None else jnp.maximum(end + 1 - window, 0)
    lane_ok = jnp.arange(lanes) < K
    # Without padded lanes the masks are left out: nothing is added to the plain kernel.
    token_ok = None if lanes == K else lane_ok
    new_k = load(new_k_ref, token_ok)
    new_v = load(new_v_ref, token_ok)
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
        return heads.attend(state, k, v, ok)

    low, high = _blocks_of_split(start, end, tiling)
    state = lax.fori_loop(low, high, step, heads.empty())
    first_split = pl.program_id(2) == 0
    state = heads.attend_new(state, new_k, new_v, first_split)
    heads.write(partial_refs, state)

    @pl.when(inside & first_split)
    def _():
        plt.store(k_ref.at[end, :], new_k, mask=token_ok)
        plt.store(v_ref.at[end, :], new_v, mask=token_ok)


def _blocks_of_split(start: jax.Array, end: jax.Array, tiling: Tiling):
    """First and last+1 block of this program: the row's own blocks in equal parts."""
    first = lax.div(start, jnp.int32(tiling.block))
    stop = lax.div(end + (tiling.block - 1), jnp.int32(tiling.block))
    if tiling.num_splits == 1:
        return first, stop
    share = lax.div(stop - first + (tiling.num_splits - 1), jnp.int32(tiling.num_splits))
    low = first + pl.program_id(2) * share
    return low, jnp.minimum(low + share, stop)


def _silence_backend_deprecation() -> None:
    """Ignores the one warning that lowering this backend gives.

    JAX 0.11 deprecates the Triton backend; it is used knowingly, behind dispatch. The warning comes
    when the surrounding program is lowered, after this call returned, so a filter around the call
    would not be in force.
    """
    warnings.filterwarnings(
        "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
    )
