"""The residual sum after a product, and the norm in front of the next."""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas.add_norm import pallas, reference

IMPLEMENTATIONS = dispatch.kernel_table(
    pallas.add_norm,
    pallas.why_not,
    pallas.why_not_interpret,
    reference.add_norm,
)
GPU_ORDER = ("pallas", "reference")


def add_norm(
    x_MD: jax.Array,
    parts_JMD: jax.Array,
    bias_D: jax.Array | None,
    scale_D: jax.Array,
    shift_D: jax.Array | None,
    *,
    eps: float,
    digits: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, Any]:
    """`total = x + sum of parts + bias` and its layer norm, or RMS norm where `shift_D` is None.

    The norm is that of the float32 sum; both results are in x's dtype.

    Args:
      x_MD: the residual, one row a sequence.
      parts_JMD: parts of what is added, as `product_down` returns them; float32 or x's dtype.
      bias_D: added too; None for none.
      scale_D: factors of the norm.
      shift_D: its bias.
      eps: added to the variance.
      digits: the norm comes as int8 digits, of its float32 numbers, for a `product_up` that
        `takes_digits`.
      implementation: "pallas" | "interpret" | "reference"; None takes the kernel on a GPU.

    Returns:
      (total_MD, norm_MD); in place of norm_MD its `RowDigits` with `digits`.

    Raises:
      ValueError: shapes or dtypes do not fit together.
      dispatch.Unsupported: the named implementation cannot run, with its reason.
    """
    vectors = [v.shape for v in (bias_D, scale_D, shift_D) if v is not None]
    D = x_MD.shape[-1:]
    if x_MD.ndim != 2 or parts_JMD.shape[1:] != x_MD.shape or any(v != D for v in vectors):
        raise ValueError(
            f"add_norm: got x {x_MD.shape}, parts {parts_JMD.shape}, vectors {vectors}; "
            "expected [M,D], [J,M,D], [D]"
        )
    if parts_JMD.dtype not in (jnp.float32, x_MD.dtype):
        raise ValueError(
            f"add_norm: parts are {parts_JMD.dtype}; use float32 or the rows' {x_MD.dtype}"
        )
    return dispatch.run(
        "add_norm", IMPLEMENTATIONS, GPU_ORDER, implementation,
        x_MD, parts_JMD, bias_D, scale_D, shift_D, eps=eps, digits=digits,
    )  # fmt: skip
