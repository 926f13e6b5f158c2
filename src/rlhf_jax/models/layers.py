"""Pieces of a decoder layer: norms, projections, activations, the embedding."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshes.layout import Layout
from meshes.reshard import local_shards
from rlhf_jax.models.adapted import Adapted, Matrix, add_down, add_up
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.params import LayerParams, Norm, Params
from rlhf_jax.models.quantized import multiply_down, multiply_up
from rlhf_jax.models.remat import keep

MOST_COLUMNS = 512
"""Of an embedding's gradient that are float32 at a time."""


def normalize(x: jax.Array, norm: Norm[jax.Array], cfg: ModelConfig) -> jax.Array:
    """Layer norm, or RMS norm without bias, over the last axis; in float32."""
    wide = x.astype(jnp.float32)
    if norm.bias_D is not None:
        wide = wide - wide.mean(-1, keepdims=True)
    scale = lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + cfg.norm_eps)
    wide = wide * scale * broadcast(norm.scale_D, x.ndim).astype(jnp.float32)
    if norm.bias_D is not None:
        wide = wide + broadcast(norm.bias_D, x.ndim).astype(jnp.float32)
    return wide.astype(x.dtype)


def broadcast(vector: jax.Array, ndim: int) -> jax.Array:
    """A vector with leading dimensions of size 1."""
    return lax.expand_dims(vector, tuple(range(ndim - 1)))


def project_up(x: jax.Array, weight: Matrix[jax.Array], bias: jax.Array | None) -> jax.Array:
    """`[..., D]` times `[F, D]`: the output has the weight's tensor-parallel dimension."""
    base = weight.base_FD if isinstance(weight, Adapted) else weight
    y = multiply_up(x, base)
    if isinstance(weight, Adapted):
        y = y + add_up(x, weight)
    return y if bias is None else y + broadcast(bias, y.ndim)


def project_down(
    y: jax.Array, weight: Matrix[jax.Array], bias: jax.Array | None, layout: Layout
) -> jax.Array:
    """`[..., F]` times `[F, D]`: one all-reduce where F is tensor parallel."""
    axes = ("batch",) + (None,) * (y.ndim - 1)
    base = weight.base_FD if isinstance(weight, Adapted) else weight
    x = multiply_down(y, base, layout.spec(*axes))
    if isinstance(weight, Adapted):
        x = x + add_down(y, weight, layout)
    return x if bias is None else x + broadcast(bias, x.ndim)


def feed_forward(
    x: jax.Array, layer: LayerParams[jax.Array], cfg: ModelConfig, layout: Layout
) -> jax.Array:
    """The two (or, gated, three) matrices between attention and the next layer."""
    up = project_up(x, layer.up_FD, layer.up_bias_F)
    if layer.gate_FD is not None:
        hidden = jax.nn.silu(keep(project_up(x, layer.gate_FD, None), "gate")) * keep(up, "up")
    elif cfg.activation == "gelu":
        hidden = jax.nn.gelu(keep(up, "up"), approximate=False)
    else:
        hidden = relu(up)
    return project_down(hidden, layer.down_FD, layer.down_bias_D, layout)


@jax.custom_vjp
def relu(x: jax.Array) -> jax.Array:
    """max(x, 0). The backward pass reads the result, as the next product's does, and not x: one
    array is written and kept in place of two.
    """
    return jnp.maximum(x, 0)


def _relu_fwd(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = keep(jnp.maximum(x, 0), "up")
    return y, y


def _relu_bwd(y: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    return (jnp.where(y > 0, grad, 0),)


relu.defvjp(_relu_fwd, _relu_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def look_up(table_VW: jax.Array, tokens: jax.Array, layout: Layout) -> jax.Array:
    """Rows of the table, `[B, ...]` to `[B, ..., W]`; tokens are at least 0.

    A device sums its part of the gradient in float32: a frequent token has thousands of summands,
    and bfloat16 passes over what is less than 1/256 of a sum.
    """
    axes = ("batch",) + (None,) * tokens.ndim
    return table_VW.at[tokens].get(out_sharding=layout.spec(*axes), mode="clip")


def _look_up_fwd(table_VW: jax.Array, tokens: jax.Array, layout: Layout) -> tuple[jax.Array, Any]:
    return look_up(table_VW, tokens, layout), (table_VW, tokens)


def _look_up_bwd(layout: Layout, kept: Any, grad: jax.Array) -> tuple[jax.Array, None]:
    table_VW, tokens = kept
    V, W = table_VW.shape
    vocab_axes, rows = layout.mesh_axes("vocab"), ("batch",) + (None,) * (tokens.ndim - 1)
    columns = W // next(n for n in range(-(-W // MOST_COLUMNS), W + 1) if W % n == 0)

    def local(tokens: jax.Array, grad: jax.Array) -> jax.Array:
        block = V // layout.size(vocab_axes)
        index = tokens.reshape(-1).clip(0, V - 1) - lax.axis_index(vocab_axes) * block
        index = jnp.where(index < 0, block, index)  # of another device: dropped
        grad = grad.reshape(-1, W)

        def add_columns(n: jax.Array, sums: jax.Array) -> jax.Array:
            new = lax.dynamic_slice_in_dim(grad, n * columns, columns, axis=1).astype(jnp.float32)
            wide = jnp.zeros((block, columns), jnp.float32).at[index].add(new, mode="drop")
            return lax.dynamic_update_slice_in_dim(sums, wide.astype(sums.dtype), n * columns, 1)

        sums = jnp.zeros((block, W), table_VW.dtype)
        sums = lax.fori_loop(0, W // columns, add_columns, sums)
        return lax.psum(sums, layout.mesh_axes("batch"))

    run = local_shards(local, layout, in_axes=(rows, (*rows, None)), out_axes=("vocab", None))
    return jax.sharding.reshard(run(tokens, grad), jax.typeof(table_VW).sharding), None


look_up.defvjp(_look_up_fwd, _look_up_bwd)


def embed_tokens(params: Params[jax.Array], tokens: jax.Array, layout: Layout) -> jax.Array:
    """Rows of the embedding, `[B, ...]` to `[B, ..., D]`."""
    x: jax.Array = look_up(params.embed_VW, tokens, layout)
    if params.project_in_DW is not None:
        x = project_up(x, params.project_in_DW, None)
    return x


def unembedding(params: Params[jax.Array]) -> jax.Array:
    """The matrix that turns hidden states into logits, `[V, W]`."""
    return params.embed_VW if params.unembed_VW is None else params.unembed_VW


def logits_from_hidden(params: Params[jax.Array], hidden: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Logits `[..., V]` in float32; columns of the padded vocabulary are -inf."""
    logits = jnp.einsum(
        "...W,VW->...V", hidden, unembedding(params), preferred_element_type=jnp.float32
    )
    column = lax.broadcasted_iota(jnp.int32, (cfg.padded_vocab,), 0)
    real = broadcast(column < cfg.vocab_size, logits.ndim)
    return jnp.where(real, logits, -jnp.inf)
