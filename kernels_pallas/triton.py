"""What the Triton kernels share: sizes, padded loads, and the backend's warning."""

import warnings
from typing import Any

import jax
from jax.experimental.pallas import triton as plt

SMALLEST_DOT = 16  # rows of a tensor-core instruction


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least n: arrays inside a kernel have such sizes."""
    return 1 << (n - 1).bit_length()


def load(ref: Any, mask: jax.Array | None, **hints: Any) -> jax.Array:
    """Loads a ref, with zeros where the mask is False."""
    if mask is None:
        return plt.load(ref, **hints)
    return plt.load(ref, mask=mask, other=0.0, **hints)


def silence_backend_deprecation() -> None:
    """Ignores the one warning that lowering this backend gives.

    JAX 0.11 deprecates the Triton backend; it is used knowingly, behind dispatch. The warning comes
    when the surrounding program is lowered, after this call returned, so a filter around the call
    would not be in force.
    """
    warnings.filterwarnings(
        "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
    )
