"""Causal attention of a batch of rows to themselves, for training, scoring and prefill."""

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas.attention import cudnn, pallas, reference

IMPLEMENTATIONS = {
    "cudnn": dispatch.Implementation(cudnn.attention, cudnn.why_not),
    **dispatch.kernel_table(
        pallas.attention, pallas.why_not, pallas.why_not_interpret, reference.attention
    ),
}
GPU_ORDER = ("cudnn", "pallas", "reference")


def attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    starts_BT: jax.Array | None = None,
    *,
    window: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Causal grouped-query attention; scale K**-0.5, fp32 softmax.

    Query head h reads key/value head h // (H / G). Rows start at index 0 and are padded on the
    right: causality alone hides the padding from real tokens; what it hides must be finite. A row
    may hold several segments one after the other (packing); no token then sees one of another
    segment.

    Args:
      q_BTHK: queries.
      k_BTGK: keys, in q's dtype.
      v_BTGK: values, in q's dtype.
      starts_BT: int32, index of the first token of each token's segment; None: each row is one.
        Query i sees keys starts[i] <= j <= i. Starts must not fall along a row nor lie behind their
        own token.
      window: query i sees keys j with i - window < j <= i; None for all j <= i.
      implementation: "cudnn" | "pallas" | "interpret" | "reference"; None takes cuDNN where it
        runs, else the kernel.

    Returns:
      out_BTHK in q's dtype.

    Raises:
      ValueError: shapes, dtypes or window do not fit together.
      dispatch.Unsupported: the named implementation cannot run, with its reason.
    """
    _check(q_BTHK, k_BTGK, v_BTGK, window)
    if starts_BT is not None:
        _check_starts(starts_BT, q_BTHK.shape[:2])
    return dispatch.run(
        "attention",
        IMPLEMENTATIONS,
        GPU_ORDER,
        implementation,
        q_BTHK,
        k_BTGK,
        v_BTGK,
        starts_BT,
        window=window,
    )


def _check(q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, window: int | None) -> None:
    q, k, v = q_BTHK.shape, k_BTGK.shape, v_BTGK.shape
    fits = len(q) == len(k) == 4 and k == v and q[:2] == k[:2] and q[3] == k[3]
    if not fits or q[2] % k[2]:
        raise ValueError(
            f"attention: got q {q}, k {k}, v {v}; expected q [B,T,H,K], k and v [B,T,G,K] with the "
            f"same B, T and K, and G dividing H"
        )
    if not q_BTHK.dtype == k_BTGK.dtype == v_BTGK.dtype:
        raise ValueError(
            f"attention: q, k, v have dtypes {q_BTHK.dtype}, {k_BTGK.dtype}, {v_BTGK.dtype}; "
            f"cast them to one"
        )
    if window is not None and window < 1:
        raise ValueError(f"attention: window={window}; use at least 1, or None for no window")


def _check_starts(starts_BT: jax.Array, rows: tuple[int, ...]) -> None:
    if starts_BT.shape != rows or starts_BT.dtype != jnp.int32:
        raise ValueError(
            f"attention: starts are {starts_BT.dtype} {starts_BT.shape}; expected int32 {rows}"
        )
