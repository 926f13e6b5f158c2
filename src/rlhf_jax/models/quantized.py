"""Frozen matrices in int8: `W = scale * values`, one float32 scale for each row.

A row is one position of the dimension that is sharded, so every device rounds its own rows and the
mesh changes nothing. The largest entry of a row becomes 127: no entry is off by more than half a
scale. In products the values are whole numbers, which bfloat16 holds exactly, and what is scaled is
the result, or the input where rows are contracted: the weights are rounded once and never again.
"""

import functools
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from meshes.layout import Layout
from meshes.spec import Constant, ParamSpec

LARGEST = 127


@flax.struct.dataclass
class Quantized[Leaf]:
    """A matrix `[F, D]` in int8, and the float32 scale of each row."""

    values_FD: Leaf
    scale_F: Leaf


@flax.struct.dataclass
class Transposed[Leaf]:
    """A matrix `[F, D]` in int8, and the scale of each of its rows, that lies as the decode step's
    product of F numbers a row reads it.
    """

    values_DF: Leaf
    scale_F: Leaf


def is_quantized(node: object) -> bool:
    """Whether a node of a tree is a matrix in int8."""
    return isinstance(node, Quantized | Transposed)


def transposed(weight: Quantized[jax.Array]) -> Transposed[jax.Array]:
    """The same matrix, its rows last."""
    return Transposed(weight.values_FD.T, weight.scale_F)


def quantize(weight_FD: jax.Array, dtype: Any = jnp.int8) -> Quantized[jax.Array]:
    """The nearest matrix that int8 (or a float of one byte) with a scale a row can hold; rows of
    zeros stay zero, and rows next to zero (1e-35) become it. A row with NaN has that as its scale.
    """
    is_float = jnp.issubdtype(dtype, jnp.floating)
    most = float(jnp.finfo(dtype).max) if is_float else LARGEST
    wide = weight_FD.astype(jnp.float32)
    largest_F = jnp.abs(wide).max(axis=1)
    # A scale below the smallest normal number may be flushed to zero, and is divided by. The
    # comparison is this way round for NaN, which int8 has not.
    least = most * float(jnp.finfo(jnp.float32).tiny)
    scale_F = jnp.where(largest_F <= least, 1.0, largest_F / most)
    values_FD = wide / scale_F[:, None]
    return Quantized((values_FD if is_float else jnp.round(values_FD)).astype(dtype), scale_F)


def widened(weight: Any) -> jax.Array:
    """A matrix, in int8 or not, in float32."""
    if is_quantized(weight):
        return weight.scale_F[:, None] * weight.values_FD.astype(jnp.float32)
    return weight.astype(jnp.float32)


def multiply_up(x: jax.Array, weight: Any) -> jax.Array:
    """`[..., D]` times a matrix `[F, D]`, which may be in int8."""
    if not is_quantized(weight):
        return jnp.einsum("...D,FD->...F", x, weight)
    return scaled(jnp.einsum("...D,FD->...F", x, weight.values_FD.astype(x.dtype)), weight.scale_F)


def multiply_down(y: jax.Array, weight: Any, out_sharding: Any) -> jax.Array:
    """`[..., F]` times a matrix `[F, D]`, which may be in int8."""
    if not is_quantized(weight):
        return jnp.einsum("...F,FD->...D", y, weight, out_sharding=out_sharding)
    y = scaled(y, weight.scale_F)
    if isinstance(weight, Transposed):
        values_DF = weight.values_DF.astype(y.dtype)
        return jnp.einsum("...F,DF->...D", y, values_DF, out_sharding=out_sharding)
    return jnp.einsum(
        "...F,FD->...D", y, weight.values_FD.astype(y.dtype), out_sharding=out_sharding
    )


def scaled(y: jax.Array, scale_F: jax.Array) -> jax.Array:
    """`[..., F]` times the scale of each row, rounded once."""
    scale = lax.expand_dims(scale_F, tuple(range(y.ndim - 1)))
    return (y.astype(jnp.float32) * scale).astype(y.dtype)


def quantized_spec(spec: ParamSpec) -> Quantized[ParamSpec]:
    """The declaration of a matrix in int8."""
    scale = ParamSpec(spec.shape[:1], spec.axes[:1], Constant(1.0), decay=False, dtype="float32")
    values = ParamSpec(spec.shape, spec.axes, spec.init, spec.decay, spec.rows, dtype="int8")
    return Quantized(values, scale)


def spec_like(spec: ParamSpec, leaf: Any) -> Quantized[ParamSpec] | Transposed[ParamSpec]:
    """The declaration of a matrix in int8 in the form that `leaf` has."""
    declared = quantized_spec(spec)
    if not isinstance(leaf, Transposed):
        return declared
    values = replace(declared.values_FD, shape=spec.shape[::-1], axes=spec.axes[::-1], rows=None)
    return Transposed(values, declared.scale_F)


def plain_spec(spec: Any) -> ParamSpec:
    """The declaration of a matrix as if it were not in int8."""
    return replace(spec.values_FD, dtype=None) if is_quantized(spec) else spec


def quantize_leaf(weight_FD: jax.Array, spec: ParamSpec, layout: Layout) -> Quantized[jax.Array]:
    """A parameter that was loaded, in int8 and in `layout`: a program of its own, so that no more
    than this one matrix is ever there in both dtypes.
    """
    with jax.set_mesh(layout.mesh):
        return jax.block_until_ready(_quantizer(spec, layout)(weight_FD))


def quantize_params(params: Any, specs: Any, layout: Layout, paths: Collection[str]) -> Any:
    """A model with the matrices at `paths` in int8 and in `layout`, one after the other; what they
    were is deleted.
    """
    leaves, tree = jax.tree.flatten(params)
    for number, (path, spec) in enumerate(by_path(specs)):
        if path in paths:
            weight = leaves[number]
            leaves[number] = quantize_leaf(weight, spec, layout)
            weight.delete()
    return jax.tree.unflatten(tree, leaves)


def declare_int8(specs: Any, paths: Collection[str]) -> Any:
    """The declaration of a model with the matrices at `paths` in int8."""
    named = by_path(specs)
    leaves = [quantized_spec(spec) if path in paths else spec for path, spec in named]
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=_is_spec), leaves)


def place_by_path(specs: Any, layout_of: Callable[[str], Layout]) -> Any:
    """Shardings of a model whose parameters do not all lie in one layout."""
    places = [layout_of(path).param_sharding(spec) for path, spec in by_path(specs)]
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=_is_spec), places)


def by_path(specs: Any) -> list[tuple[str, ParamSpec]]:
    """Every parameter's declaration and its path in a decoder (of a reward model its body)."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator=".").removeprefix("body."), spec)
        for path, spec in jax.tree.leaves_with_path(specs, is_leaf=_is_spec)
    ]


def _is_spec(node: object) -> bool:
    return isinstance(node, ParamSpec)


@functools.lru_cache(maxsize=256)
def _quantizer(spec: ParamSpec, layout: Layout) -> Any:
    stored = quantized_spec(spec)
    places = layout.param_sharding(stored.values_FD), layout.param_sharding(stored.scale_F)
    return jax.jit(quantize, out_shardings=Quantized(*places))
