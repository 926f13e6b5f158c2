"""cuDNN's fused attention through JAX, with its limits checked before it is called."""

import os
import re

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch

FIXED_ORDER = re.compile(
    r"xla_gpu_(deterministic_ops|exclude_nondeterministic_ops)(=true|=1)?(\s|$)", re.IGNORECASE
)
"""As XLA reads them: the name alone turns a flag on too."""


def why_not(*arrays: jax.Array | None, window: int | None) -> str | None:
    """Reason why cuDNN does not take attention's arguments, or None."""
    del window
    q_BTHK, _, _, starts_BT = arrays
    assert q_BTHK is not None
    reason = dispatch.why_not_gpu()
    if reason is not None:
        return reason
    if starts_BT is not None:
        return "JAX's interface to cuDNN takes no packed rows"
    if FIXED_ORDER.search(os.environ.get("XLA_FLAGS", "")):
        return "its gradient in a fixed order ends with an IndexError in jaxlib 0.11.2"
    head_size, largest = q_BTHK.shape[-1], _largest_head_size()
    if q_BTHK.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN takes bfloat16 and float16 and the arrays are {q_BTHK.dtype}"
    if head_size % 8:
        return f"cuDNN needs a head size that 8 divides and it is {head_size}"
    if head_size > largest:
        return f"cuDNN takes head sizes up to {largest} on this GPU and it is {head_size}"
    return None


def attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    starts_BT: None,
    *,
    window: int | None,
) -> jax.Array:
    """As reference.attention. Its gradient is not deterministic (atomics)."""
    del starts_BT
    length = q_BTHK.shape[1]
    if length % 2:
        # Training is refused for odd lengths. No real query sees the added key: it comes later.
        q_BTHK, k_BTGK, v_BTGK = (
            jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q_BTHK, k_BTGK, v_BTGK)
        )
    out_BTHK = jax.nn.dot_product_attention(
        q_BTHK,
        k_BTGK,
        v_BTGK,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    return out_BTHK[:, :length]


def _largest_head_size() -> int:
    """256 from Hopper on, 128 before, as jax._src.cudnn checks it (on the attached device)."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return 128
    return 256 if float(device.compute_capability) >= 9.0 else 128
