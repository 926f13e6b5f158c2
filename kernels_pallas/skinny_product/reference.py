"""The two products in plain JAX: the meaning of the kernels."""

import jax
import jax.numpy as jnp


def product_up(
    x_MD: jax.Array,
    w_FD: jax.Array,
    bias_F: jax.Array | None,
    gate_FD: jax.Array | None,
    scale_F: jax.Array | None,
    gate_scale_F: jax.Array | None,
    *,
    activation: str | None,
) -> jax.Array:
    """See api.product_up. Bias and ReLU are in x's dtype: so XLA puts them into the product."""
    y_MF = _scaled_product(x_MD, w_FD, scale_F)
    if bias_F is not None:
        y_MF = y_MF + bias_F.astype(y_MF.dtype)
    if gate_FD is not None:
        gate_MF = _scaled_product(x_MD, gate_FD, gate_scale_F)
        y_MF = (jax.nn.silu(gate_MF.astype(jnp.float32)) * y_MF).astype(x_MD.dtype)
    elif activation == "relu":
        y_MF = jax.nn.relu(y_MF)
    return y_MF


def _scaled_product(x_MD: jax.Array, w_FD: jax.Array, scale_F: jax.Array | None) -> jax.Array:
    """In x's dtype; of float32 sums."""
    if scale_F is None:
        return jnp.einsum("MD,FD->MF", x_MD, w_FD)
    w_FD = w_FD.astype(x_MD.dtype)
    y_MF = jnp.einsum("MD,FD->MF", x_MD, w_FD, preferred_element_type=jnp.float32)
    return (y_MF * scale_F[None, :]).astype(x_MD.dtype)


def product_down(y_MF: jax.Array, w_FD: jax.Array, scale_F: jax.Array | None) -> jax.Array:
    """See api.product_down: one part."""
    if scale_F is not None:
        y_MF = (y_MF.astype(jnp.float32) * scale_F[None, :]).astype(y_MF.dtype)
    w_FD = w_FD.astype(y_MF.dtype)
    return jnp.einsum("MF,FD->MD", y_MF, w_FD, preferred_element_type=jnp.float32)[None]


def product_down_transposed(y_MF: jax.Array, w_DF: jax.Array, scale_F: jax.Array) -> jax.Array:
    """See api.product_down_transposed."""
    return product_down(y_MF, w_DF.T, scale_F)
