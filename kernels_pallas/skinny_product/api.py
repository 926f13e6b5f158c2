"""The two kinds of products in a decode step: few rows times a matrix that is read once."""

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas.row_digits import RowDigits
from kernels_pallas.skinny_product import digits, pallas, reference, xla
from kernels_pallas.skinny_product.tiling import most_rows

UP = dispatch.kernel_table(
    pallas.product_up,
    pallas.why_not_up,
    pallas.why_not_interpret_up,
    reference.product_up,
)
DOWN = dispatch.kernel_table(
    pallas.product_down,
    pallas.why_not_down,
    pallas.why_not_interpret_down,
    reference.product_down,
) | {"xla": dispatch.Implementation(xla.product_down, dispatch.always)}
UP_INT8 = dispatch.kernel_table(
    digits.product_up, digits.why_not, digits.why_not_interpret, reference.product_up
)
DOWN_TRANSPOSED = dispatch.kernel_table(
    digits.product_down, digits.why_not, digits.why_not_interpret, reference.product_down_transposed
) | {"xla": dispatch.Implementation(xla.product_down_transposed, dispatch.always)}
GPU_ORDER = ("pallas", "reference")
ACTIVATIONS = (None, "relu")  # the backend has no erf


def product_up(
    x_MD: jax.Array | RowDigits,
    w_FD: jax.Array,
    bias_F: jax.Array | None = None,
    gate_FD: jax.Array | None = None,
    scale_F: jax.Array | None = None,
    gate_scale_F: jax.Array | None = None,
    *,
    activation: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`activation(x w^T + bias)`, or `silu(x gate^T) * (x w^T + bias)` where there is a gate.

    A matrix of one byte a number (int8, float8_e4m3fn) is `scale_F[:, None]` times what it holds:
    its numbers are whole in x's dtype, and the float32 sums are scaled. With int8 the kernel gives
    x 15 bits relative to the largest number of a row.

    Args:
      x_MD: one row a sequence; or its digits, where `takes_digits` says so.
      w_FD: the matrix, its output dimension first.
      bias_F: added in front of the activation; None for none.
      gate_FD: a second matrix; then `activation` is None.
      scale_F: float32, of a matrix of one byte a number; None for others.
      gate_scale_F: the gate's.
      activation: None or "relu".
      implementation: "pallas" | "interpret" | "reference"; None takes the kernel on a GPU, and
        XLA's product of more rows than it is for (`tiling.most_rows`).

    Returns:
      y_MF in x's dtype; sums are float32.

    Raises:
      ValueError: shapes or options do not fit together.
      dispatch.Unsupported: the named implementation cannot run, with its reason.
    """
    rows = x_MD.rows if isinstance(x_MD, RowDigits) else x_MD
    _check_up(rows, w_FD, bias_F, gate_FD, activation)
    _check_scale("product_up", w_FD, scale_F)
    if gate_FD is not None:
        _check_scale("product_up", gate_FD, gate_scale_F)
    arrays = w_FD, bias_F, gate_FD, scale_F, gate_scale_F
    if isinstance(x_MD, RowDigits):
        if not takes_digits(rows, w_FD, gate_FD, implementation=implementation):
            raise ValueError(
                f"product_up: got digits of {rows.dtype}{list(rows.shape)}, matrices of "
                f"{w_FD.dtype} {w_FD.shape} and implementation={implementation!r}; only the kernel "
                "for int8 reads digits: give rows where `takes_digits` says no"
            )
        return UP_INT8[implementation or "pallas"].run(x_MD, *arrays, activation=activation)
    return dispatch.run(
        "product_up", UP_INT8 if _all_int8(w_FD, gate_FD) else UP,
        GPU_ORDER if _few(x_MD, w_FD) else ("reference",), implementation,
        x_MD, *arrays, activation=activation,
    )  # fmt: skip


def takes_digits(
    x_MD: jax.Array | jax.ShapeDtypeStruct,
    w_FD: jax.Array,
    gate_FD: jax.Array | None = None,
    *,
    implementation: str | None = None,
) -> bool:
    """Whether `product_up` takes the digits of such rows in their place: its kernel for int8 is
    what runs.
    """
    name = implementation or "pallas"
    return (
        name in ("pallas", "interpret")
        and _all_int8(w_FD, gate_FD)
        and UP_INT8[name].why_not(x_MD, w_FD) is None
    )


def product_down(
    y_MF: jax.Array,
    w_FD: jax.Array,
    scale_F: jax.Array | None = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """`y w` as float32 parts `[J, M, D]` whose sum over J it is.

    A matrix of one byte a number (int8, float8_e4m3fn) is `scale_F[:, None]` times what it holds:
    y is scaled, and rounded to its own dtype.

    Args:
      y_MF: one row a sequence.
      w_FD: the matrix, its contracted dimension first.
      scale_F: float32, of a matrix of one byte a number; None for others.
      implementation: "pallas" | "interpret" | "xla" | "reference"; None as of `product_up`.

    Raises:
      ValueError: shapes do not fit together.
      dispatch.Unsupported: the named implementation cannot run, with its reason.
    """
    if y_MF.ndim != 2 or w_FD.ndim != 2 or y_MF.shape[1] != w_FD.shape[0]:
        raise ValueError(
            f"product_down: got y {y_MF.shape} and a matrix {w_FD.shape}; expected [M,F], [F,D]"
        )
    _check_scale("product_down", w_FD, scale_F)
    order = GPU_ORDER if _few(y_MF, w_FD) else ("xla", "reference")
    return dispatch.run("product_down", DOWN, order, implementation, y_MF, w_FD, scale_F)


def product_down_transposed(
    y_MF: jax.Array, w_DF: jax.Array, scale_F: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """`product_down` of an int8 matrix that lies with its contracted dimension last, `w_DF`: so
    the tensor cores read int8. The kernel gives scaled y 15 bits relative to its row's largest
    number. The rest is as of `product_down`.
    """
    fits = w_DF.ndim == 2 and y_MF.ndim == 2 and y_MF.shape[1:] == w_DF.shape[1:] == scale_F.shape
    if not fits or (w_DF.dtype, scale_F.dtype) != (jnp.int8, jnp.float32):
        raise ValueError(
            f"product_down_transposed: got y {y_MF.shape}, {w_DF.dtype}{list(w_DF.shape)} and "
            f"scale {scale_F.dtype}{list(scale_F.shape)}; expected [M,F], int8[D,F], float32[F]"
        )
    order = GPU_ORDER if _few(y_MF, w_DF) else ("xla", "reference")
    return dispatch.run(
        "product_down_transposed", DOWN_TRANSPOSED, order, implementation, y_MF, w_DF, scale_F
    )


def _check_up(
    rows: jax.Array | jax.ShapeDtypeStruct,
    w_FD: jax.Array,
    bias_F: jax.Array | None,
    gate_FD: jax.Array | None,
    activation: str | None,
) -> None:
    """ValueError where the shapes or the activation of `product_up` do not fit together."""
    shapes = [a.shape for a in (w_FD, gate_FD) if a is not None]
    fits = rows.ndim == 2 and all(s == w_FD.shape and s[1:] == rows.shape[1:] for s in shapes)
    if not fits or (bias_F is not None and bias_F.shape != w_FD.shape[:1]):
        got = None if bias_F is None else bias_F.shape
        raise ValueError(
            f"product_up: got x {rows.shape}, matrices {shapes}, bias {got}; "
            "expected [M,D], [F,D] each, [F]"
        )
    if activation not in ACTIVATIONS or (gate_FD is not None and activation is not None):
        raise ValueError(
            f"product_up: activation={activation!r} with{'' if gate_FD is not None else 'out'} a "
            f"gate; use one of {ACTIVATIONS}, and None with a gate"
        )


def _all_int8(*matrices: jax.Array | None) -> bool:
    """Of those that are there."""
    return all(matrix.dtype == jnp.int8 for matrix in matrices if matrix is not None)


def _few(rows: jax.Array, matrix: jax.Array) -> bool:
    """Whether the kernels are for so many rows."""
    return len(rows) <= most_rows(matrix.dtype.itemsize, matrix.size)


def _check_scale(op: str, w_FD: jax.Array, scale_F: jax.Array | None) -> None:
    """ValueError where a matrix of one byte a number has no scale for its rows, or another one."""
    narrow = w_FD.dtype.itemsize == 1
    if narrow != (scale_F is not None):
        raise ValueError(
            f"{op}: a matrix of {w_FD.dtype} with{'' if scale_F is not None else 'out'} a scale; "
            "give one with int8 and float8_e4m3fn, and none else"
        )
    if scale_F is not None and (scale_F.shape, scale_F.dtype) != (w_FD.shape[:1], jnp.float32):
        raise ValueError(
            f"{op}: the scale of {w_FD.shape} is {scale_F.dtype}{list(scale_F.shape)}; expected "
            f"float32 [{w_FD.shape[0]}]"
        )
