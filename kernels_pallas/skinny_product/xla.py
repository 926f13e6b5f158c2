"""`product_down` of many rows by XLA, in parts that the next kernel adds up.

XLA shares the contracted dimension of such a product out by itself, and adds the parts up in a
kernel of its own.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.skinny_product.tiling import num_parts


def product_down(y_MF: jax.Array, w_FD: jax.Array, scale_F: jax.Array | None) -> jax.Array:
    """See api.product_down."""
    M, (F, D) = len(y_MF), w_FD.shape
    J = num_parts(M, F, D)
    if scale_F is not None:
        y_MF = (y_MF.astype(jnp.float32) * scale_F[None, :]).astype(y_MF.dtype)
    y_MJI, w_JID = y_MF.reshape(M, J, F // J), w_FD.astype(y_MF.dtype).reshape(J, F // J, D)
    return jnp.einsum("MJI,JID->JMD", y_MJI, w_JID, preferred_element_type=jnp.float32)


def product_down_transposed(y_MF: jax.Array, w_DF: jax.Array, scale_F: jax.Array) -> jax.Array:
    """See api.product_down_transposed."""
    return product_down(y_MF, w_DF.T, scale_F)
