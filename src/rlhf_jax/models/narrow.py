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
from rlhf_jax.models.quantized import is_quantized, quantize, quantized_spec

Narrow = Literal["same", "int8", "fp8"]

DTYPES = {"int8": jnp.dtype(jnp.int8), "fp8": jnp.dtype(jnp.float8_e4m3fn)}


def declare_narrow(specs: Params[ParamSpec], kind: Narrow) -> Params[ParamSpec]:
    """The declaration of what `narrow_weights` returns."""
    return _each_matrix(specs, kind, quantized_spec)


def narrow_weights(params: Params[jax.Array], kind: Narrow) -> Params[jax.Array]:
    """The model with every matrix of its layers in one byte a number; inside jit.

    Every device rounds its own rows, so this comes before weights are gathered: half as much
    travels. Matrices that are in one byte already stay, adapters stay beside what they adapt.
    """
    return _each_matrix(params, kind, lambda weight: quantize(weight, DTYPES[kind]))


def _each_matrix(params: Params[Any], kind: Narrow, narrow: Callable[[Any], Any]) -> Any:
    """A model with `narrow` applied to the matrices of its layers that have more than a byte."""
    if kind == "same":
        return params

    def one(leaf: Any) -> Any:
        if is_adapted(leaf):
            return replace(leaf, base_FD=one(leaf.base_FD))
        if is_quantized(leaf) or len(leaf.shape) < 2:
            return leaf
        return narrow(leaf)

    def is_leaf(node: Any) -> bool:
        return is_adapted(node) or is_quantized(node) or is_spec(node)

    return replace(params, layers=jax.tree.map(one, params.layers, is_leaf=is_leaf))
