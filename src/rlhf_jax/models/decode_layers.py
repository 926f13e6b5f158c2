"""All layers for one token a row, in the fewest kernels.

A layer is two halves, attention and mlp. Each is a product with a wide output, what works on it
locally, and a product back to the model's width, whose parts the kernel of the residual sum and the
next norm adds up: so the norm in front of a half belongs to the half before it. It writes int8
digits where the product that reads it takes them. Everything runs on local shards, with one
all-reduce a half where heads or the mlp are tensor parallel.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.add_norm.api import add_norm
from kernels_pallas.row_digits import RowDigits
from kernels_pallas.skinny_product.api import (
    product_down,
    product_down_transposed,
    product_up,
    takes_digits,
)
from meshes.layout import Layout
from meshes.reshard import local_shards
from meshes.spec import ParamSpec
from rlhf_jax.models.adapted import Adapted, Matrix, is_adapted
from rlhf_jax.models.attention import attend_shard, turn_of
from rlhf_jax.models.cache import CACHE_AXES, KVCache
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.layers import normalize
from rlhf_jax.models.params import LayerParams, Norm, Params, is_spec, layer_specs, norm_specs
from rlhf_jax.models.quantized import Quantized, Transposed, is_quantized, spec_like


def fits(params: Params[jax.Array]) -> bool:
    """Whether `decode_layers` is for this model: its matrices have no adapters."""
    return not any(map(is_adapted, jax.tree.leaves(params.layers, is_leaf=is_adapted)))


def decode_layers(
    params: Params[jax.Array],
    x_BD: jax.Array,
    positions_B: jax.Array,
    cache: KVCache,
    cfg: ModelConfig,
    layout: Layout,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, KVCache]:
    """From embedded tokens `[B, D]` to what the output projection reads, behind the final norm.

    `implementation` names that of every kernel; None chooses.
    """
    layers = [axes_of(layer, cfg) for layer in params.layers]
    norm_axes = jax.tree.map(lambda spec: spec.axes, norm_specs(cfg), is_leaf=is_spec)
    caches = jax.tree.map(lambda array: CACHE_AXES[: array.ndim], cache)
    rows = ("batch", None)
    run = local_shards(
        partial(_local, cfg=cfg, layout=layout, implementation=implementation),
        layout,
        in_axes=(layers, norm_axes if cfg.final_norm else None, rows, ("batch",), caches),
        out_axes=(rows, caches),
    )
    return run(params.layers, params.final_norm, x_BD, positions_B, cache)


def axes_of(layer: LayerParams[jax.Array], cfg: ModelConfig) -> Any:
    """The logical axes of everything in a layer: a scale lies as the rows that it belongs to."""

    def one(spec: ParamSpec, leaf: Any) -> Any:
        specs = spec_like(spec, leaf) if is_quantized(leaf) else spec
        return jax.tree.map(lambda spec: spec.axes, specs, is_leaf=is_spec)

    return jax.tree.map(one, layer_specs(cfg), layer, is_leaf=is_spec)


def _local(
    layers: list[LayerParams[jax.Array]],
    final_norm: Norm[jax.Array] | None,
    x: jax.Array,
    positions: jax.Array,
    cache: KVCache,
    *,
    cfg: ModelConfig,
    layout: Layout,
    implementation: str | None,
) -> tuple[jax.Array, KVCache]:
    """One device's rows and heads."""
    up = partial(_up, implementation=implementation)
    down = partial(_down, implementation=implementation)
    add = partial(_add, cfg=cfg, implementation=implementation)
    h = normalize(x, layers[0].attention_norm, cfg) if cfg.pre_norm else x
    turn, new = turn_of(positions, cfg), KVCache([], [])
    for number, (layer, keys, values) in enumerate(
        zip(layers, cache.keys, cache.values, strict=True)
    ):
        after_attention, after_mlp = _norms(layers, number, final_norm, cfg)
        qkv = up(h, layer.qkv_ED, layer.qkv_bias_E)
        out, keys, values = attend_shard(
            qkv, positions, turn, keys, values, cfg, implementation=implementation
        )
        new.keys.append(keys)
        new.values.append(values)
        parts = down(out, layer.out_ED)
        parts = _over_devices(parts, "heads", layout, x.dtype)
        x, h = add(x, parts, layer.out_bias_D, after_attention, layer.up_FD, layer.gate_FD)
        hidden = _activated(h, layer, cfg, up)
        parts = down(hidden, layer.down_FD)
        parts = _over_devices(parts, "mlp", layout, x.dtype)
        reader = layers[number + 1].qkv_ED if number + 1 < len(layers) else None
        x, h = add(x, parts, layer.down_bias_D, after_mlp, reader)
    if not cfg.pre_norm and final_norm is not None:
        h = normalize(h, final_norm, cfg)
    return h, new


def _norms(
    layers: list[LayerParams[jax.Array]],
    number: int,
    final_norm: Norm[jax.Array] | None,
    cfg: ModelConfig,
) -> tuple[Norm[jax.Array], Norm[jax.Array] | None]:
    """The norms behind both halves of a layer."""
    layer = layers[number]
    if not cfg.pre_norm:
        return layer.attention_norm, layer.mlp_norm
    is_last = number + 1 == len(layers)
    return layer.mlp_norm, final_norm if is_last else layers[number + 1].attention_norm


def _activated(
    h: jax.Array | RowDigits, layer: LayerParams[jax.Array], cfg: ModelConfig, up: Any
) -> jax.Array:
    """What the second matrix of the mlp reads."""
    if cfg.activation == "gelu":
        return jax.nn.gelu(up(h, layer.up_FD, layer.up_bias_F), approximate=False)
    activation = "relu" if cfg.activation == "relu" else None
    return up(h, layer.up_FD, layer.up_bias_F, layer.gate_FD, activation=activation)


def _up(
    h: jax.Array | RowDigits,
    weight: Matrix[jax.Array],
    bias: jax.Array | None,
    gate: Matrix[jax.Array] | None = None,
    **options: Any,
) -> jax.Array:
    """`product_up` of matrices in either form."""
    values, scale = numbers(weight)
    gate_values, gate_scale = (None, None) if gate is None else numbers(gate)
    return product_up(h, values, bias, gate_values, scale, gate_scale, **options)


def _down(y: jax.Array, weight: Matrix[jax.Array], **options: Any) -> jax.Array:
    """`product_down` of matrices in any form."""
    if isinstance(weight, Transposed):
        return product_down_transposed(y, weight.values_DF, weight.scale_F, **options)
    return product_down(y, *numbers(weight), **options)


def numbers(weight: Matrix[jax.Array]) -> tuple[jax.Array, jax.Array | None]:
    """A matrix without an adapter, and the scale of its rows where it has one byte a number."""
    assert not isinstance(weight, Adapted | Transposed)
    if isinstance(weight, Quantized):
        return weight.values_FD, weight.scale_F
    return weight, None


def _over_devices(parts_JBD: jax.Array, axis: str, layout: Layout, dtype: Any) -> jax.Array:
    """Parts, added up over the devices that share a contracted dimension (in the rows' dtype)."""
    mesh_axes = layout.mesh_axes(axis)
    if not mesh_axes:
        return parts_JBD
    return lax.psum(parts_JBD.sum(0).astype(dtype), mesh_axes)[None]


def _add(
    x: jax.Array,
    parts: jax.Array,
    bias: jax.Array | None,
    norm: Norm[jax.Array] | None,
    reader: Matrix[jax.Array] | None,
    gate: Matrix[jax.Array] | None = None,
    *,
    cfg: ModelConfig,
    implementation: str | None,
) -> tuple[jax.Array, Any]:
    """The residual, and rows or digits that the next half reads: `reader` is its first matrix, None
    behind the last half. Post-norm models go on from the normalised sum.
    """
    if norm is None:
        total = x.astype(jnp.float32) + parts.astype(jnp.float32).sum(0)
        total = total if bias is None else total + bias.astype(jnp.float32)
        return total.astype(x.dtype), total.astype(x.dtype)
    matrices = [numbers(weight)[0] for weight in (reader, gate) if weight is not None]
    digits = (
        cfg.pre_norm
        and reader is not None
        and takes_digits(x, *matrices, implementation=implementation)
    )
    total, h = add_norm(
        x, parts, bias, norm.scale_D, norm.bias_D,
        eps=cfg.norm_eps, digits=digits, implementation=implementation,
    )  # fmt: skip
    return (total, h) if cfg.pre_norm else (h, h)
