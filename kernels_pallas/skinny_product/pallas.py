"""Products of few rows with a large matrix, as fast as the matrix can be read.

Pallas, Triton backend. Rows are padded to a tensor-core operand; each program reads its own part of
the matrix once. The contracted dimension of `product_down` is shared out to several programs, whose
parts the next kernel (add_norm) adds up.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas import dispatch
from kernels_pallas.skinny_product import tiling as tilings
from kernels_pallas.skinny_product.tiling import Tiling
from kernels_pallas.triton import load, silence_backend_deprecation


def why_not_up(
    x_MD: jax.Array, w_FD: jax.Array, *arrays: jax.Array | None, activation: str | None
) -> str | None:
    """Reason why the compiled kernel does not take product_up's arguments, or None."""
    return why_not_operands(x_MD, w_FD) or why_not_interpret_up(
        x_MD, w_FD, *arrays, activation=activation
    )


def why_not_interpret_up(
    x_MD: jax.Array,
    w_FD: jax.Array,
    bias_F: jax.Array | None,
    gate_FD: jax.Array | None,
    *scales: jax.Array | None,
    activation: str | None,
) -> str | None:
    """The limits that do not depend on the platform."""
    del bias_F, scales, activation
    if gate_FD is not None and gate_FD.dtype != w_FD.dtype:
        return f"the matrix is {w_FD.dtype} and its gate {gate_FD.dtype}"
    F, D = w_FD.shape
    plan = tilings.choose_up(len(x_MD), F, D, w_FD.dtype.itemsize)
    return None if plan else f"no tile divides a matrix of {w_FD.shape}"


def why_not_down(y_MF: jax.Array, w_FD: jax.Array, scale_F: jax.Array | None) -> str | None:
    """Reason why the compiled kernel does not take product_down's arguments, or None."""
    return why_not_operands(y_MF, w_FD) or why_not_interpret_down(y_MF, w_FD, scale_F)


def why_not_interpret_down(
    y_MF: jax.Array, w_FD: jax.Array, scale_F: jax.Array | None
) -> str | None:
    """The limits that do not depend on the platform."""
    del scale_F
    F, D = w_FD.shape
    plan = tilings.choose_down(len(y_MF), F, D, w_FD.dtype.itemsize)
    return None if plan else f"no tile divides a matrix of {w_FD.shape}"


def why_not_operands(x: jax.Array, w: jax.Array) -> str | None:
    """Reason why the compiled kernels do not take rows and a matrix, whatever their sizes."""
    if reason := dispatch.why_not_gpu():
        return reason
    narrow = w.dtype in (jnp.int8, jnp.float8_e4m3fn)
    if not (narrow or x.dtype == w.dtype) or x.dtype not in (jnp.bfloat16, jnp.float16):
        return (
            "the kernel takes bfloat16 or float16, with a matrix of the same dtype, int8 or "
            f"float8_e4m3fn, and the operands are {x.dtype}, {w.dtype}"
        )
    if len(x) > (most := tilings.most_rows(w.dtype.itemsize, w.size)):
        return f"it is for up to {most} rows and there are {len(x)}"
    return None


def product_up(
    x_MD: jax.Array,
    w_FD: jax.Array,
    bias_F: jax.Array | None,
    gate_FD: jax.Array | None,
    scale_F: jax.Array | None = None,
    gate_scale_F: jax.Array | None = None,
    *,
    activation: str | None,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See api.product_up; `tiling` None takes tiling.choose_up."""
    silence_backend_deprecation()
    M, (F, D) = len(x_MD), w_FD.shape
    plan = tiling or tilings.choose_up(M, F, D, w_FD.dtype.itemsize)
    assert plan is not None
    rows = plan.rows_of(M)
    weights = [w_FD] if gate_FD is None else [w_FD, gate_FD]
    vectors = [v for v in (scale_F, gate_scale_F, bias_F) if v is not None]
    # Blocks of rows come first: programs that read the same tile run side by side.
    return pl.pallas_call(
        functools.partial(
            _up_kernel,
            M=M,
            plan=plan,
            num_weights=len(weights),
            num_scales=len(vectors) - (bias_F is not None),
            activation=activation,
        ),
        grid=(pl.cdiv(M, rows), F // plan.tile),
        in_specs=[pl.BlockSpec((rows, D), lambda r, i: (r, 0))]
        + [pl.BlockSpec((plan.tile, D), lambda r, i: (i, 0))] * len(weights)
        + [pl.BlockSpec((plan.tile,), lambda r, i: (i,))] * len(vectors),
        out_specs=pl.BlockSpec((rows, plan.tile), lambda r, i: (r, i)),
        out_shape=jax.ShapeDtypeStruct((M, F), x_MD.dtype),
        compiler_params=plt.CompilerParams(num_warps=plan.num_warps, num_stages=plan.num_stages),
        interpret=interpret,
        name="skinny_product_up",
    )(x_MD, *weights, *vectors)


def _up_kernel(
    x_ref, *refs, M: int, plan: Tiling, num_weights: int, num_scales: int, activation: str | None
):
    weight_refs, vector_refs, y_ref = refs[:num_weights], refs[num_weights:-1], refs[-1]
    scale_refs, bias_refs = vector_refs[:num_scales], vector_refs[num_scales:]
    rows, D = x_ref.shape
    here = pl.program_id(0) * rows

    def step(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        part = pl.ds(i * plan.block, plan.block)
        weights = [plt.load(ref.at[:, part], eviction_policy="evict_first") for ref in weight_refs]
        x = load(x_ref.at[:, part], rows_ok(here, M, rows, plan.block))
        products = (
            plt.dot(w, x, trans_b=True) if plan.matrix_first else plt.dot(x, w, trans_b=True)
            for w in (w.astype(x.dtype) for w in weights)
        )
        return tuple(total + product for total, product in zip(sums, products, strict=True))

    shape = (plan.tile, rows) if plan.matrix_first else (rows, plan.tile)
    empty = tuple(jnp.zeros(shape, jnp.float32) for _ in weight_refs)
    sums = lax.fori_loop(0, D // plan.block, step, empty)
    if plan.matrix_first:
        sums = [total.T for total in sums]
    if scale_refs:
        sums = [s * ref[...][None, :] for s, ref in zip(sums, scale_refs, strict=True)]
    y, *gate = sums
    for ref in bias_refs:
        y = y + ref[...].astype(jnp.float32)[None, :]
    y = activate(y, gate, activation)
    plt.store(y_ref, y.astype(y_ref.dtype), mask=rows_ok(here, M, rows, plan.tile))


def activate(y: jax.Array, gate: list[jax.Array], activation: str | None) -> jax.Array:
    """What `product_up` makes of its one or two products."""
    if gate:
        return gate[0] / (1.0 + jnp.exp(-gate[0])) * y
    if activation == "relu":
        return jnp.maximum(y, 0.0)
    return y


def product_down(
    y_MF: jax.Array,
    w_FD: jax.Array,
    scale_F: jax.Array | None = None,
    *,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See api.product_down; `tiling` None takes tiling.choose_down."""
    silence_backend_deprecation()
    M, (F, D) = len(y_MF), w_FD.shape
    plan = tiling or tilings.choose_down(M, F, D, w_FD.dtype.itemsize)
    assert plan is not None
    rows, J = plan.rows_of(M), plan.num_splits
    scales = [] if scale_F is None else [scale_F]
    return pl.pallas_call(
        functools.partial(_down_kernel, M=M, plan=plan),
        grid=(pl.cdiv(M, rows), D // plan.tile, J),
        in_specs=[
            pl.BlockSpec((rows, F), lambda r, i, j: (r, 0)),
            pl.BlockSpec((F, plan.tile), lambda r, i, j: (0, i)),
            *[pl.BlockSpec((F,), lambda r, i, j: (0,))] * len(scales),
        ],
        out_specs=pl.BlockSpec((None, rows, plan.tile), lambda r, i, j: (j, r, i)),
        out_shape=jax.ShapeDtypeStruct((J, M, D), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=plan.num_warps, num_stages=plan.num_stages),
        interpret=interpret,
        name="skinny_product_down",
    )(y_MF, w_FD, *scales)


def _down_kernel(y_ref: Any, w_ref: Any, *refs: Any, M: int, plan: Tiling):
    *scale_refs, part_ref = refs
    rows, F = y_ref.shape
    share = F // plan.num_splits
    here, first = pl.program_id(0) * rows, pl.program_id(2) * share

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        part = pl.ds(first + i * plan.block, plan.block)
        w = plt.load(w_ref.at[part, :], eviction_policy="evict_first")
        y = load(y_ref.at[:, part], rows_ok(here, M, rows, plan.block))
        for ref in scale_refs:
            y = (y.astype(jnp.float32) * plt.load(ref.at[part])[None, :]).astype(y.dtype)
        return total + plt.dot(y, w.astype(y.dtype))

    empty = jnp.zeros((rows, plan.tile), jnp.float32)
    total = lax.fori_loop(0, share // plan.block, step, empty)
    plt.store(part_ref, total, mask=rows_ok(here, M, rows, plan.tile))


def rows_ok(first: jax.Array, M: int, rows: int, columns: int) -> jax.Array | None:
    """Mask `[rows, columns]` of the rows from `first` on that exist; None where all do."""
    if M % rows == 0:
        return None
    row = first + jnp.arange(rows)
    return jnp.broadcast_to((row < M)[:, None], (rows, columns))
