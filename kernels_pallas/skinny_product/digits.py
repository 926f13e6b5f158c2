"""Products of few rows with a matrix in int8, on the tensor cores for int8.

Pallas, Triton backend. Converting a matrix takes longer than reading it, so the rows become int8
(`row_digits`): 15 bits relative to the row's largest number, and finer than what bfloat16 keeps of
the result. Products of digits are exact.

Both products contract the last dimension of rows `[M, C]` and matrices `[R, C]`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas import row_digits
from kernels_pallas.row_digits import GROUP, RowDigits
from kernels_pallas.skinny_product.digits_tiling import SMALLEST_BLOCK, choose
from kernels_pallas.skinny_product.pallas import activate, rows_ok, why_not_operands
from kernels_pallas.skinny_product.tiling import Tiling
from kernels_pallas.triton import SMALLEST_DOT, load, next_power_of_2, silence_backend_deprecation

# Lanes of one row that fit a program's registers; int32 holds the sums of twice that.
WIDEST = 65536


def why_not(x_MC: jax.Array, w_RC: jax.Array, *arrays: Any, **options: Any) -> str | None:
    """Reason why the compiled kernels do not take a product's arguments, or None."""
    if w_RC.shape[1] % SMALLEST_BLOCK:
        return f"a matrix of {w_RC.shape}: the last size is no multiple of {SMALLEST_BLOCK}"
    return why_not_operands(x_MC, w_RC) or why_not_interpret(x_MC, w_RC, *arrays, **options)


def why_not_interpret(x_MC: jax.Array, w_RC: jax.Array, *arrays: Any, **options: Any) -> str | None:
    """The limits that do not depend on the platform."""
    del x_MC, arrays, options
    R, C = w_RC.shape
    if C > WIDEST:
        return f"rows are {C} wide and the kernel takes up to {WIDEST}"
    if R % SMALLEST_DOT or C % SMALLEST_DOT:
        return f"no tile divides a matrix of {w_RC.shape}"
    return None


def product_up(
    x_MD: jax.Array | RowDigits,
    w_FD: jax.Array,
    bias_F: jax.Array | None,
    gate_FD: jax.Array | None,
    scale_F: jax.Array,
    gate_scale_F: jax.Array | None,
    *,
    activation: str | None,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See api.product_up; `tiling` None takes digits_tiling.choose."""
    weights = [w_FD] if gate_FD is None else [w_FD, gate_FD]
    rows = x_MD.rows if isinstance(x_MD, RowDigits) else x_MD
    plan = tiling or choose(rows.shape[0], w_FD.shape, len(weights))
    vectors = [v for v in (scale_F, gate_scale_F, bias_F) if v is not None]
    run = functools.partial(_product, activation=activation, interpret=interpret)
    return run(x_MD, None, weights, vectors, plan, rows.dtype)[0]


def product_down(
    y_MF: jax.Array,
    w_DF: jax.Array,
    scale_F: jax.Array,
    *,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See api.product_down_transposed; `tiling` None takes digits_tiling.choose."""
    plan = tiling or choose(len(y_MF), w_DF.shape, in_parts=True)
    return _product(y_MF, scale_F, [w_DF], [], plan, jnp.float32, interpret=interpret)


def _product(
    x: jax.Array | RowDigits,
    factor_C: jax.Array | None,
    weights: list[jax.Array],
    vectors: list[jax.Array],
    plan: Tiling,
    dtype: Any,
    *,
    activation: str | None = None,
    interpret: bool,
) -> jax.Array:
    """`[J, M, R]`; `vectors` are the scales of all matrices' rows, or none, and then a bias."""
    silence_backend_deprecation()
    rows, tile, J = plan.rows, plan.tile, plan.num_splits
    assert rows is not None
    if not isinstance(x, RowDigits):
        x = split_rows(x, factor_C, rows, interpret=interpret)
    M, (R, C) = x.rows.shape[0], weights[0].shape
    digits = x.digits.reshape(-1, C)
    assert len(digits) % rows == 0
    # Blocks of rows come first: programs that read the same tile run side by side.
    return pl.pallas_call(
        functools.partial(
            _kernel, M=M, block=plan.block, num_weights=len(weights), activation=activation
        ),
        grid=(pl.cdiv(2 * M, rows), R // tile, J),
        in_specs=[
            pl.BlockSpec((rows, C), lambda r, i, j: (r, 0)),
            pl.BlockSpec((rows // 2,), lambda r, i, j: (r,)),
            *[pl.BlockSpec((tile, C), lambda r, i, j: (i, 0))] * len(weights),
            *[pl.BlockSpec((tile,), lambda r, i, j: (i,))] * len(vectors),
        ],
        out_specs=pl.BlockSpec((None, rows // 2, tile), lambda r, i, j: (j, r, i)),
        out_shape=jax.ShapeDtypeStruct((J, M, R), dtype),
        compiler_params=plt.CompilerParams(num_warps=plan.num_warps, num_stages=plan.num_stages),
        interpret=interpret,
        name="int8_product",
    )(digits, x.scale, *weights, *vectors)


def _kernel(
    x_ref: Any,
    row_scale_ref: Any,
    *refs: Any,
    M: int,
    block: int,
    num_weights: int,
    activation: str | None,
):
    weight_refs, vector_refs, y_ref = refs[:num_weights], refs[num_weights:-1], refs[-1]
    scale_refs, bias_refs = vector_refs[:num_weights], vector_refs[num_weights:]
    (rows, C), (half, tile) = x_ref.shape, y_ref.shape
    share = C // pl.num_programs(2)
    first = pl.program_id(2) * share

    def step(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        part = pl.ds(first + i * block, block)
        weights = [plt.load(ref.at[:, part], eviction_policy="evict_first") for ref in weight_refs]
        x, last = plt.load(x_ref.at[:, part]), (((1,), (1,)), ((), ()))
        return tuple(
            total + lax.dot_general(x, w, last, preferred_element_type=jnp.int32)
            for total, w in zip(sums, weights, strict=True)
        )

    empty = tuple(jnp.zeros((rows, tile), jnp.int32) for _ in weight_refs)
    sums = lax.fori_loop(0, share // block, step, empty)
    factor = jnp.where(jnp.arange(rows) & GROUP == 0, 128.0, 1.0)[:, None]
    groups = (half // GROUP, 2, GROUP, tile)
    both = [(s.astype(jnp.float32) * factor).reshape(groups).sum(1) for s in sums]
    both = [s.reshape(half, tile) * row_scale_ref[...][:, None] for s in both]
    for number, ref in enumerate(scale_refs):
        both[number] = both[number] * ref[...][None, :]
    y, *gate = both
    for ref in bias_refs:
        y = y + ref[...].astype(jnp.float32)[None, :]
    y = activate(y, gate, activation).astype(y_ref.dtype)
    plt.store(y_ref, y, mask=rows_ok(pl.program_id(0) * half, M, half, tile))


def split_rows(
    x_MC: jax.Array, factor_C: jax.Array | None, rows: int, *, interpret: bool = False
) -> RowDigits:
    """The digits of rows, multiplied by `factor_C`, for programs of `rows` rows of digits."""
    silence_backend_deprecation()
    M, C = x_MC.shape
    lanes = next_power_of_2(C)
    warps = min(32, max(4, lanes // 1024))
    factors = [] if factor_C is None else [factor_C]
    specs, shapes = row_digits.outputs(M, C, rows)
    digits, scale = pl.pallas_call(
        functools.partial(_split_kernel, C=C),
        grid=(M,),
        in_specs=[pl.BlockSpec((None, lanes), lambda m: (m, 0))]
        + [pl.BlockSpec((lanes,), lambda m: (0,))] * len(factors),
        out_specs=specs,
        out_shape=shapes,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="int8_digits",
    )(x_MC, *factors)
    return RowDigits(digits, scale, jax.ShapeDtypeStruct((M, C), x_MC.dtype))


def _split_kernel(x_ref: Any, *refs: Any, C: int):
    *factor_refs, digits_ref, scale_ref = refs
    lanes = x_ref.shape[0]
    ok = None if lanes == C else jnp.arange(lanes) < C
    x = load(x_ref, ok).astype(jnp.float32)
    for ref in factor_refs:
        x = x * load(ref, ok)
    row_digits.store(x, digits_ref, scale_ref, ok)
