"""The gradient of the attention kernel: one kernel for queries, one for keys and values.

With s the scores, p = softmax(s) and g the gradient of the output:

    dv_j = sum_i p_ij g_i
    ds_ij = p_ij (g_i . v_j - g_i . out_i)
    dq_i = sum_j ds_ij k_j / sqrt(K)        dk_j = sum_i ds_ij q_i / sqrt(K)

p is computed again from the log-sums of the forward kernel. A program for keys goes through the
queries of all M heads of their group, so nothing is added between programs.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.attention import tiling as tilings
from kernels_pallas.attention.tiles import (
    MASKED,
    keys_seen,
    load_rows,
    queries_seeing,
    store_rows,
)
from kernels_pallas.attention.tiling import Tiling, Tilings


def gradients(
    q_BTHK, k_BTGK, v_BTGK, starts_BT, out_BTHK, log_sums_BHT, grad_BTHK,
    *, tiling: Tilings, interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Gradients of queries, keys and values, in their dtypes."""
    grad_BTHK = grad_BTHK.astype(q_BTHK.dtype)
    dots_BTH = jnp.sum(out_BTHK.astype(jnp.float32) * grad_BTHK.astype(jnp.float32), axis=-1)
    arrays = q_BTHK, k_BTGK, v_BTGK, grad_BTHK, log_sums_BHT, dots_BTH.swapaxes(1, 2), starts_BT
    dq_BTHK = _query_gradient(*arrays, tiling=tiling.queries, interpret=interpret)
    dk_BTGK, dv_BTGK = _key_gradients(*arrays, tiling=tiling.keys, interpret=interpret)
    return dq_BTHK, dk_BTGK, dv_BTGK


def _query_gradient(q, k, v, grad, log_sums, dots, starts, *, tiling: Tiling, interpret: bool):
    B, T, H, K = q.shape
    M, lanes = H // k.shape[2], tilings.lanes_of(K)
    num_tiles = pl.cdiv(T, tiling.queries)

    def tile(i: Any) -> Any:
        return num_tiles - 1 - i  # the longest programs first

    queries = pl.BlockSpec((None, tiling.queries, None, lanes), lambda i, h, b: (b, tile(i), h, 0))
    keys = pl.BlockSpec((None, T, None, lanes), lambda i, h, b: (b, 0, lax.div(h, jnp.int32(M)), 0))
    numbers = pl.BlockSpec((None, None, tiling.queries), lambda i, h, b: (b, h, tile(i)))
    row = pl.BlockSpec((None, tiling.queries), lambda i, h, b: (b, tile(i)))
    return pl.pallas_call(
        functools.partial(_query_kernel, length=T, head_size=K, num_tiles=num_tiles, tiling=tiling),
        grid=(num_tiles, H, B),
        in_specs=[
            queries, keys, keys, queries, numbers, numbers, None if starts is None else row,
        ],
        out_specs=queries,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plt.CompilerParams(
            num_warps=tiling.num_warps, num_stages=tiling.num_stages
        ),
        interpret=interpret,
        name="attention_query_gradient",
    )(q, k, v, grad, log_sums, dots, starts)  # fmt: skip


def _query_kernel(
    q_ref, k_ref, v_ref, grad_ref, log_sums_ref, dots_ref, starts_ref, dq_ref,
    *, length: int, head_size: int, num_tiles: int, tiling: Tiling,
) -> None:  # fmt: skip
    first = (num_tiles - 1 - pl.program_id(0)) * tiling.queries
    query = first + jnp.arange(tiling.queries, dtype=jnp.int32)
    real = query < length
    q, grad = load_rows(q_ref, real, head_size), load_rows(grad_ref, real, head_size)
    log_sums = plt.load(log_sums_ref, mask=real, other=0.0)
    dots = plt.load(dots_ref, mask=real, other=0.0)
    starts = None
    if starts_ref is not None:
        starts = plt.load(starts_ref, mask=real, other=length - 1)
    scale = head_size**-0.5

    def step(i: jax.Array, dq: jax.Array, masked: bool) -> jax.Array:
        here = pl.ds(i * tiling.keys, tiling.keys)
        key = i * tiling.keys + jnp.arange(tiling.keys, dtype=jnp.int32)
        keys_ok = key < length if masked else None
        k = load_rows(k_ref.at[here, :], keys_ok, head_size)
        v = load_rows(v_ref.at[here, :], keys_ok, head_size)
        score = plt.dot(q, k, trans_b=True) * (scale * math.log2(math.e))
        if masked:
            seen = key[None, :] <= query[:, None]
            if starts is not None:
                seen &= key[None, :] >= starts[:, None]
            score = jnp.where(seen, score, MASKED)
        p = jnp.exp2(score - log_sums[:, None])
        ds = p * (plt.dot(grad, v, trans_b=True) - dots[:, None])
        return dq + plt.dot(ds.astype(k.dtype), k)

    dq = jnp.zeros(q.shape, jnp.float32)
    dq = keys_seen(first, starts, length, tiling).run(step, dq)
    store_rows(dq_ref, dq * scale, real, head_size)


def _key_gradients(q, k, v, grad, log_sums, dots, starts, *, tiling: Tiling, interpret: bool):
    B, T, H, K = q.shape
    G, lanes = k.shape[2], tilings.lanes_of(K)
    M, num_tiles = H // G, pl.cdiv(T, tiling.keys)
    ends = (None, None) if starts is None else _ends(starts, num_tiles, tiling.keys)
    heads = pl.BlockSpec((None, T, None, M, lanes), lambda i, g, b: (b, 0, g, 0, 0))
    keys = pl.BlockSpec((None, tiling.keys, None, lanes), lambda i, g, b: (b, i, g, 0))
    numbers = pl.BlockSpec((None, None, M, T), lambda i, g, b: (b, g, 0, 0))
    row = None if starts is None else pl.BlockSpec((None, T), lambda i, g, b: (b, 0))
    one = None if starts is None else pl.BlockSpec((None, None), lambda i, g, b: (b, i))
    by_group = (B, T, G, M, K), (B, G, M, T)
    return pl.pallas_call(
        functools.partial(_key_kernel, length=T, head_size=K, num_heads=M, tiling=tiling),
        grid=(num_tiles, G, B),
        in_specs=[keys, keys, heads, heads, numbers, numbers, row, one, one],
        out_specs=[keys, keys],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        compiler_params=plt.CompilerParams(
            num_warps=tiling.num_warps, num_stages=tiling.num_stages
        ),
        interpret=interpret,
        name="attention_key_gradients",
    )(
        k, v, *(x.reshape(by_group[0]) for x in (q, grad)),
        *(x.reshape(by_group[1]) for x in (log_sums, dots)), starts, *ends,
    )  # fmt: skip


def _ends(starts_BT: jax.Array, num_tiles: int, tile: int) -> tuple[jax.Array, jax.Array]:
    """For the first and the last key of every tile, how many queries start no later, `[B, tiles]`:
    the end of the range of queries that see it.
    """
    first_1N1 = (jnp.arange(num_tiles, dtype=jnp.int32) * tile)[None, :, None]
    starts_B1T = starts_BT[:, None, :]
    of_first, of_last = (
        jnp.sum(starts_B1T <= key, axis=-1, dtype=jnp.int32)
        for key in (first_1N1, first_1N1 + (tile - 1))
    )
    return of_first, of_last


def _key_kernel(
    k_ref, v_ref, q_ref, grad_ref, log_sums_ref, dots_ref, starts_ref, of_first_ref, of_last_ref,
    dk_ref, dv_ref, *, length: int, head_size: int, num_heads: int, tiling: Tiling,
) -> None:  # fmt: skip
    first = pl.program_id(0) * tiling.keys
    key = first + jnp.arange(tiling.keys, dtype=jnp.int32)
    real = key < length
    k, v = load_rows(k_ref, real, head_size), load_rows(v_ref, real, head_size)
    scale = head_size**-0.5
    end = jnp.full_like(first, length)
    ends = (end, end) if starts_ref is None else (of_first_ref[()], of_last_ref[()])
    visits = queries_seeing(first, ends, length, tiling)

    def head(m: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def step(i: jax.Array, sums: Any, masked: bool) -> tuple[jax.Array, jax.Array]:
            dk, dv = sums
            here = pl.ds(i * tiling.queries, tiling.queries)
            query = i * tiling.queries + jnp.arange(tiling.queries, dtype=jnp.int32)
            ok = query < length if masked else None
            q = load_rows(q_ref.at[here, m, :], ok, head_size)
            grad = load_rows(grad_ref.at[here, m, :], ok, head_size)
            log_sums = _load(log_sums_ref.at[m, here], ok)
            dots = _load(dots_ref.at[m, here], ok)
            # Keys by queries: the products below then read their operands as they are.
            score = plt.dot(k, q, trans_b=True) * (scale * math.log2(math.e))
            if masked:
                seen = key[:, None] <= query[None, :]
                if starts_ref is not None:
                    starts = plt.load(starts_ref.at[here], mask=ok, other=length)
                    seen &= key[:, None] >= starts[None, :]
                score = jnp.where(seen, score, MASKED)
            p = jnp.exp2(score - log_sums[None, :])
            dv += plt.dot(p.astype(grad.dtype), grad)
            ds = p * (plt.dot(v, grad, trans_b=True) - dots[None, :])
            return dk + plt.dot(ds.astype(q.dtype), q), dv

        return visits.run(step, sums)

    nothing = jnp.zeros(k.shape, jnp.float32)
    dk, dv = lax.fori_loop(0, num_heads, head, (nothing, nothing))
    store_rows(dk_ref, dk * scale, real, head_size)
    store_rows(dv_ref, dv, real, head_size)


def _load(ref: Any, ok: jax.Array | None) -> jax.Array:
    return plt.load(ref) if ok is None else plt.load(ref, mask=ok, other=0.0)
