"""Rows as two int8 digits a number, for products on the tensor cores for int8.

Two kernels write them: `add_norm` of the rows that it makes, and one of `skinny_product` of others.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.triton import next_power_of_2

GROUP = 8  # rows whose high digits stand together, above their low ones: a thread has both
MOST_ROWS = 128  # of digits, in a program of the product
LARGEST = 127 * 128.0


@flax.struct.dataclass
class RowDigits:
    """Rows `[M, C]` whose numbers are `scale * (128 high + low)`: 15 bits relative to the largest
    of a row. Digits and scales fill up whole programs of the product; behind those of the M rows
    they have any value.

    digits: int8 `[groups, 2, GROUP, C]`, the high digits of 8 rows and then their low ones.
    scale: float32 `[groups * GROUP]`.
    rows: shape and dtype of the rows.
    """

    digits: jax.Array
    scale: jax.Array
    rows: jax.ShapeDtypeStruct = flax.struct.field(pytree_node=False)


def program_rows(M: int) -> int:
    """The most rows of digits that a program of the product has, two a row of M."""
    return min(MOST_ROWS, max(2 * GROUP, 2 * next_power_of_2(M)))


def outputs(M: int, C: int, rows: int | None = None) -> tuple[list[Any], list[Any]]:
    """Block specs and shapes of digits and scale in a kernel with one program a row. They fill up
    programs of `rows` rows of digits; None: of as many as any has.
    """
    rows, lanes = rows or program_rows(M), next_power_of_2(C)
    groups = pl.cdiv(2 * M, rows) * rows // (2 * GROUP)
    specs = [
        pl.BlockSpec((None, 2, None, lanes), lambda m: (m // GROUP, 0, m % GROUP, 0)),
        pl.BlockSpec((1,), lambda m: (m,)),
    ]
    shapes = [
        jax.ShapeDtypeStruct((groups, 2, GROUP, C), jnp.int8),
        jax.ShapeDtypeStruct((groups * GROUP,), jnp.float32),
    ]
    return specs, shapes


def store(x: jax.Array, digits_ref: Any, scale_ref: Any, mask: jax.Array | None) -> None:
    """Writes the digits of one float32 row, and its scale; x is zero where the mask is False."""
    high, low, scale = split(x)
    for digit, values in enumerate((high, low)):
        plt.store(digits_ref.at[jnp.int32(digit), :], values, mask=mask)
    scale_ref[...] = jnp.full((1,), scale)


def split(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """High and low digits of one float32 row, and its scale; zeros stay zero, and a row with NaN
    has that as its scale.
    """
    largest = largest_of(x)
    # A scale below the smallest normal number may be flushed to zero, and is divided by. The
    # comparison is this way round for NaN.
    least = LARGEST * float(jnp.finfo(jnp.float32).tiny)
    scale = jnp.where(largest <= least, 1.0, largest / LARGEST)
    # The backend has no round.
    whole = jnp.floor(x * (1.0 / scale) + 0.5)
    high = jnp.floor((whole + 64.0) * (1 / 128))
    return high.astype(jnp.int8), (whole - 128.0 * high).astype(jnp.int8), scale


def largest_of(x: jax.Array) -> jax.Array:
    """The largest magnitude of the last dimension of float32 numbers; NaN where there is one."""
    # As whole numbers, without the sign, NaN is the largest of all. The kernels' backend passes it
    # over in a maximum of floating-point numbers.
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    return lax.bitcast_convert_type(jnp.max(bits, axis=-1), jnp.float32)


def split_in_jax(x_MC: jax.Array, dtype: Any) -> RowDigits:
    """The digits of float32 rows that stand for rows of `dtype`, in plain JAX."""
    M, C = x_MC.shape
    _, (digits, _) = outputs(M, C)
    padding = digits.shape[0] * GROUP - M
    high, low, scale = jax.vmap(split)(jnp.pad(x_MC, ((0, padding), (0, 0))))
    digits = jnp.stack([d.reshape(-1, GROUP, C) for d in (high, low)], axis=1)
    return RowDigits(digits, scale, jax.ShapeDtypeStruct((M, C), dtype))
