"""Causal attention of a batch of rows to themselves, for training, scoring and prefill."""

import jax

from kernels_pallas import dispatch
from kernels_pallas.attention import cudnn, reference

IMPLEMENTATIONS = {
    "cudnn": dispatch.Implementation(cudnn.attention, cudnn.why_not),
    "reference": dispatch.Implementation(reference.attention, dispatch.always),
}
GPU_ORDER = ("cudnn", "reference")


def attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    *,
    window: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Causal grouped-query attention; scale K**-0.5, fp32 softmax.

    Query head h reads key/value head h // (H / G). Rows start at index 0 and are padded on the
    right: causality alone hides the padding from real tokens.

    Args:
      q_BTHK: queries.
      k_BTGK: keys, in q's dtype.
      v_BTGK: values, in q's dtype.
      window: query i sees keys j with i - window < j <= i; None for all j <= i.
      implementation: "cudnn" | "reference"; None takes cuDNN where it runs.

    Returns:
      out_BTHK in q's dtype.

    Raises:
      ValueError: shapes, dtypes or window do not fit together.
      dispatch.Unsupported: the named implementation cannot run, with its reason.
    """
    _check(q_BTHK, k_BTGK, v_BTGK, window)
    return dispatch.run(
        "attention",
        IMPLEMENTATIONS,
        GPU_ORDER,
        implementation,
        q_BTHK,
        k_BTGK,
        v_BTGK,
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
