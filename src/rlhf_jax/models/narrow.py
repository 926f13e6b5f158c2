"""Decoding in one byte a number: matrices of the layers, and what the cache holds.

Off ("same"), int8, or fp8 (e4m3: 4 bits of exponent, 3 of mantissa). Norms, biases, position table
and the vocabulary's matrices stay as they are.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from meshes.spec import ParamSpec
from rlhf_jax.models.adapted import is_adapted
from rlhf_jax.models.params import Params, is_spec
from rlhf_jax.models.quantized import is_quantized, quantize, quantized_spec, transposed

Narrow = Literal["same", "int8", "fp8"]

DTYPES = {"int8": jnp.dtype(jnp.int8), "fp8": jnp.dtype(jnp.float8_e4m3fn)}
DOWN = ("out_ED", "down_FD")  # of a layer: what `project_down` multiplies with


def declare_narrow(specs: Params[ParamSpec], kind: Narrow) -> Params[ParamSpec]:
    """The declaration of what `narrow_weights` returns, as if no matrix were transposed: bytes and
    devices are the same.
    """
    return _each_matrix(specs, kind, lambda spec, name: quantized_spec(spec))


def narrow_weights(params: Params[jax.Array], kind: Narrow) -> Params[jax.Array]:
    """The model with every matrix of its layers in one byte a number; inside jit.

    Every device rounds its own rows, so this comes before weights are gathered: half as much
    travels. Matrices that are in one byte already stay, adapters stay beside what they adapt. Of
    those that become int8 the ones whose rows are contracted are transposed, as the kernel reads
    them.
    """

    def narrow(weight: jax.Array, name: str) -> Any:
        rounded = quantize(weight, DTYPES[kind])
        return transposed(rounded) if kind == "int8" and name in DOWN else rounded

    return _each_matrix(params, kind, narrow)


def _each_matrix(params: Params[Any], kind: Narrow, narrow: Callable[[Any, str], Any]) -> Any:
    """A model with `narrow` applied to the matrices of its layers that have more than a byte, and
    to their names: that of a matrix with an adapter is empty.
    """
    if kind == "same":
        return params

    def one(leaf: Any, name: str) -> Any:
        if is_adapted(leaf):
            return replace(leaf, base_FD=one(leaf.base_FD, ""))
        if is_quantized(leaf) or len(leaf.shape) < 2:
            return leaf
        return narrow(leaf, name)

    def is_leaf(node: Any) -> bool:
        return is_adapted(node) or is_quantized(node) or is_spec(node)

    layers = jax.tree_util.tree_map_with_path(
        lambda path, leaf: one(leaf, path[-1].name), params.layers, is_leaf=is_leaf
    )
    return replace(params, layers=layers)
