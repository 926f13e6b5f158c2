"""Residual sum and norm of decode rows in one launch: one program a row.

Pallas, Triton backend.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas import dispatch, row_digits
from kernels_pallas.row_digits import RowDigits
from kernels_pallas.triton import (
    load,
    next_power_of_2,
    silence_backend_deprecation,
)

WIDEST = 16384  # lanes of one row that fit a program's registers


def why_not(*arrays: jax.Array | None, **options: Any) -> str | None:
    """Reason why the compiled kernel does not take add_norm's arguments, or None."""
    return dispatch.why_not_gpu() or why_not_interpret(*arrays, **options)


def why_not_interpret(*arrays: jax.Array | None, **options: Any) -> str | None:
    """The limits that do not depend on the platform."""
    del options
    x_MD = arrays[0]
    assert x_MD is not None
    if x_MD.shape[1] > WIDEST:
        return f"rows are {x_MD.shape[1]} wide and the kernel takes up to {WIDEST}"
    return None


def add_norm(
    x_MD: jax.Array,
    parts_JMD: jax.Array,
    bias_D: jax.Array | None,
    scale_D: jax.Array,
    shift_D: jax.Array | None,
    *,
    eps: float,
    digits: bool,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | RowDigits]:
    """See api.add_norm."""
    silence_backend_deprecation()
    J, M, D = parts_JMD.shape
    lanes = next_power_of_2(D)
    row = pl.BlockSpec((None, lanes), lambda m: (m, 0))
    vector = pl.BlockSpec((lanes,), lambda m: (0,))
    vectors = {"bias": bias_D, "scale": scale_D, "shift": shift_D}
    present = {name: array for name, array in vectors.items() if array is not None}
    rows = jax.ShapeDtypeStruct((M, D), x_MD.dtype)
    specs, shapes = row_digits.outputs(M, D) if digits else ([row], [rows])
    total_MD, *norm = pl.pallas_call(
        functools.partial(_kernel, D=D, names=tuple(present), eps=eps),
        grid=(M,),
        in_specs=[row, pl.BlockSpec((J, None, lanes), lambda m: (0, m, 0))]
        + [vector] * len(present),
        out_specs=[row, *specs],
        out_shape=[rows, *shapes],
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="add_norm",
    )(x_MD, parts_JMD, *present.values())
    return total_MD, RowDigits(norm[0], norm[1], rows) if digits else norm[0]


def _kernel(x_ref, parts_ref, *refs, D: int, names: tuple[str, ...], eps: float):
    vector_refs, (total_ref, *norm_refs) = refs[: len(names)], refs[len(names) :]
    lanes = x_ref.shape[0]
    ok = None if lanes == D else jnp.arange(lanes) < D
    total = load(x_ref, ok).astype(jnp.float32)
    vectors = {
        name: load(ref, ok).astype(jnp.float32)
        for name, ref in zip(names, vector_refs, strict=True)
    }
    for j in range(parts_ref.shape[0]):
        total = total + load(parts_ref.at[jnp.int32(j), :], ok).astype(jnp.float32)
    if "bias" in vectors:
        total = total + vectors["bias"]
    plt.store(total_ref, total.astype(total_ref.dtype), mask=ok)
    centered = total
    if "shift" in vectors:
        centered = total - jnp.sum(total) / D
        if ok is not None:
            centered = jnp.where(ok, centered, 0.0)
    h = centered * lax.rsqrt(jnp.sum(centered * centered) / D + eps) * vectors["scale"]
    if "shift" in vectors:
        h = h + vectors["shift"]
    if len(norm_refs) == 2:
        row_digits.store(h, *norm_refs, mask=ok)
    else:
        plt.store(norm_refs[0], h.astype(norm_refs[0].dtype), mask=ok)
