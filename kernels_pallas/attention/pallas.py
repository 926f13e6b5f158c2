"""The attention kernel, forward: a program serves a tile of one query head's queries.

Pallas, Triton backend; pallas_vjp has its gradient. Scores exist a tile at a time; what is kept for
the gradient is the log of each query's sum of exponentials, in powers of two. Nothing is added
atomically, so the same arrays give the same bits. M is query heads per key/value head.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas import dispatch
from kernels_pallas.attention import pallas_vjp
from kernels_pallas.attention import tiling as tilings
from kernels_pallas.attention.tiles import MASKED, keys_seen, load_rows, store_rows
from kernels_pallas.attention.tiling import Tiling, Tilings
from kernels_pallas.triton import silence_backend_deprecation

LARGEST_HEAD_SIZE = 256
KEPT = "attention_kernel"
"""Name, for rematerialisation policies, of what the forward kernel leaves for the gradient."""


def why_not(*arrays: jax.Array | None, window: int | None) -> str | None:
    """Reason why the compiled kernel does not take attention's arguments, or None."""
    return dispatch.why_not_gpu() or why_not_interpret(*arrays, window=window)


def why_not_interpret(*arrays: jax.Array | None, window: int | None) -> str | None:
    """The limits that do not depend on the platform."""
    del window
    q_BTHK = arrays[0]
    assert q_BTHK is not None
    if q_BTHK.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the kernel takes bfloat16, float16 and float32 and the arrays are {q_BTHK.dtype}"
    if q_BTHK.shape[-1] > LARGEST_HEAD_SIZE:
        return f"it takes head sizes up to {LARGEST_HEAD_SIZE} and it is {q_BTHK.shape[-1]}"
    if q_BTHK.size >= 2**31:
        return f"offsets are 32 bits wide and the queries {q_BTHK.shape} have 2^31 or more"
    return None


def attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    starts_BT: jax.Array | None,
    *,
    window: int | None,
    tiling: Tilings | None = None,
    interpret: bool = False,
) -> jax.Array:
    """As reference.attention; `tiling` None takes tiling.choose."""
    silence_backend_deprecation()
    B, T, _, K = q_BTHK.shape
    if tiling is None:
        tiling = tilings.choose(T, K, q_BTHK.dtype)
    if window is not None and window < T:
        earliest_T = jnp.maximum(jnp.arange(T, dtype=jnp.int32) - (window - 1), 0)
        earliest_BT = jnp.broadcast_to(earliest_T, (B, T))
        starts_BT = earliest_BT if starts_BT is None else jnp.maximum(starts_BT, earliest_BT)
    return _attention(q_BTHK, k_BTGK, v_BTGK, starts_BT, tiling, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(q, k, v, starts, tiling: Tilings, interpret: bool) -> jax.Array:
    return _forward(q, k, v, starts, tiling.forward, interpret)[0]


def _attention_fwd(q, k, v, starts, tiling: Tilings, interpret: bool):
    out, log_sums_BHT = (
        checkpoint_name(result, KEPT)
        for result in _forward(q, k, v, starts, tiling.forward, interpret)
    )
    return out, (q, k, v, starts, out, log_sums_BHT)


def _attention_bwd(tiling: Tilings, interpret: bool, residuals, out_grad):
    q, k, v, starts, out, log_sums_BHT = residuals
    grads = pallas_vjp.gradients(
        q, k, v, starts, out, log_sums_BHT, out_grad, tiling=tiling, interpret=interpret
    )
    return *grads, None


_attention.defvjp(_attention_fwd, _attention_bwd)


def _forward(
    q_BTHK, k_BTGK, v_BTGK, starts_BT, tiling: Tiling, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """The output, and log2 of the sums of exponentials `[B, H, T]`."""
    B, T, H, K = q_BTHK.shape
    M, lanes = H // k_BTGK.shape[2], tilings.lanes_of(K)
    num_tiles = pl.cdiv(T, tiling.queries)

    # Later queries see more keys: their programs start first, so that the last ones are short.
    def tile(i: Any) -> Any:
        return num_tiles - 1 - i

    queries = pl.BlockSpec((None, tiling.queries, None, lanes), lambda i, h, b: (b, tile(i), h, 0))
    keys = pl.BlockSpec((None, T, None, lanes), lambda i, h, b: (b, 0, lax.div(h, jnp.int32(M)), 0))
    starts = pl.BlockSpec((None, tiling.queries), lambda i, h, b: (b, tile(i)))
    sums = pl.BlockSpec((None, None, tiling.queries), lambda i, h, b: (b, h, tile(i)))
    return pl.pallas_call(
        functools.partial(_kernel, length=T, head_size=K, num_tiles=num_tiles, tiling=tiling),
        grid=(num_tiles, H, B),
        in_specs=[queries, keys, keys, None if starts_BT is None else starts],
        out_specs=[queries, sums],
        out_shape=[
            jax.ShapeDtypeStruct(q_BTHK.shape, q_BTHK.dtype),
            jax.ShapeDtypeStruct((B, H, T), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(
            num_warps=tiling.num_warps, num_stages=tiling.num_stages
        ),
        interpret=interpret,
        name="attention",
    )(q_BTHK, k_BTGK, v_BTGK, starts_BT)


def _kernel(
    q_ref, k_ref, v_ref, starts_ref, out_ref, sums_ref,
    *, length: int, head_size: int, num_tiles: int, tiling: Tiling,
) -> None:  # fmt: skip
    first = (num_tiles - 1 - pl.program_id(0)) * tiling.queries
    query = first + jnp.arange(tiling.queries, dtype=jnp.int32)
    real = query < length
    q = load_rows(q_ref, real, head_size)
    starts = None
    if starts_ref is not None:
        starts = plt.load(starts_ref, mask=real, other=length - 1)
    scale = head_size**-0.5 * math.log2(math.e)

    def step(i: jax.Array, state: Any, masked: bool) -> Any:
        out, top, total = state
        here = pl.ds(i * tiling.keys, tiling.keys)
        key = i * tiling.keys + jnp.arange(tiling.keys, dtype=jnp.int32)
        keys_ok = key < length if masked else None
        k = load_rows(k_ref.at[here, :], keys_ok, head_size)
        score = plt.dot(q, k, trans_b=True) * scale
        if masked:
            seen = key[None, :] <= query[:, None]
            if starts is not None:
                seen &= key[None, :] >= starts[:, None]
            score = jnp.where(seen, score, MASKED)
        # A query that has seen nothing yet counts masked keys as 1. The first real key, its own at
        # the latest, takes their weight away: 2^(MASKED - top) is 0.
        new_top = jnp.maximum(top, jnp.max(score, axis=1))
        keep = jnp.exp2(top - new_top)
        p = jnp.exp2(score - new_top[:, None])
        v = load_rows(v_ref.at[here, :], keys_ok, head_size)
        out = out * keep[:, None] + plt.dot(p.astype(v.dtype), v)
        return out, new_top, total * keep + jnp.sum(p, axis=1)

    state = (
        jnp.zeros(q.shape, jnp.float32),
        jnp.full((tiling.queries,), MASKED, jnp.float32),
        jnp.zeros((tiling.queries,), jnp.float32),
    )
    out, top, total = keys_seen(first, starts, length, tiling).run(step, state)
    store_rows(out_ref, out / total[:, None], real, head_size)
    plt.store(sums_ref, top + jnp.log2(total), mask=real)
