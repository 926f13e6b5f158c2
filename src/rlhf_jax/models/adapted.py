"""A weight with a low-rank adapter beside it: W = base + scale * side @ core (Hu et al. 2021).

Both kinds of weights, whichever way they multiply, have their tensor-parallel dimension in `side`:
it is sharded as the base is. `core` is whole on every device that computes with it.
"""

from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshes.layout import Layout
from meshes.reshard import whole
from rlhf_jax.models.quantized import Quantized, Transposed, widened


@flax.struct.dataclass
class Adapted[Leaf]:
    """A matrix `[F, D]`, which may be in int8, and its adapter; in the tree of what trains
    `base_FD` is None, or all of it is.

    The fused projection has an adapter for each of query, key and value, as separate matrices
    would: `ranks` are the rows of `core_AD` that each has (0: none) and `rows` the rows of each in
    a KV group. A row of `side_FA` is zero in the columns of the other two. Other matrices leave
    both empty. `dropout` is a raw key, there in a training forward only.
    """

    base_FD: Leaf | Quantized[Leaf]
    side_FA: Leaf
    core_AD: Leaf
    dropout: Any = None
    scale: float = flax.struct.field(pytree_node=False, default=1.0)
    rate: float = flax.struct.field(pytree_node=False, default=0.0)
    rows: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())
    ranks: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())


type Matrix[Leaf] = Leaf | Quantized[Leaf] | Transposed[Leaf] | Adapted[Leaf]
"""What a matrix of a decoder layer may be."""


def is_adapted(node: object) -> bool:
    """Whether a node of a tree is a matrix with an adapter."""
    return isinstance(node, Adapted)


def side_of(weight: Adapted[jax.Array]) -> jax.Array:
    """`side_FA`, zero where a row of the fused projection belongs to another part."""
    if not weight.rows:
        return weight.side_FA
    group, bounds = sum(weight.rows), np.cumsum(weight.rows)[:-1]
    placed = jax.typeof(weight.side_FA).sharding
    where = None if placed.mesh.empty else placed
    row = lax.broadcasted_iota(jnp.int32, weight.side_FA.shape, 0, out_sharding=where) % group
    column = lax.broadcasted_iota(jnp.int32, weight.side_FA.shape, 1, out_sharding=where)
    part = sum((row >= bound).astype(jnp.int32) for bound in bounds)
    owner = sum((column >= bound).astype(jnp.int32) for bound in np.cumsum(weight.ranks)[:-1])
    return jnp.where(part == owner, weight.side_FA, jnp.zeros((), weight.side_FA.dtype))


def add_up(x: jax.Array, weight: Adapted[jax.Array]) -> jax.Array:
    """What the adapter adds to `[..., D]` times `[F, D]`."""
    low = jnp.einsum("...D,AD->...A", drop(x, weight), weight.core_AD)
    return weight.scale * jnp.einsum("...A,FA->...F", low, side_of(weight))


def add_down(y: jax.Array, weight: Adapted[jax.Array], layout: Layout) -> jax.Array:
    """What the adapter adds to `[..., F]` times `[F, D]`: one small all-reduce where F is tensor
    parallel.
    """
    axes = ("batch",) + (None,) * (y.ndim - 1)
    low = jnp.einsum(
        "...F,FA->...A", drop(y, weight), side_of(weight), out_sharding=layout.spec(*axes)
    )
    return weight.scale * jnp.einsum("...A,AD->...D", low, weight.core_AD)


def drop(x: jax.Array, weight: Adapted[jax.Array]) -> jax.Array:
    """The adapter's input with dropout, where the weight carries a key; the mesh changes nothing.

    The parts of the fused projection share their mask.
    """
    if weight.dropout is None:
        return x
    placed = jax.typeof(x).sharding
    keep = jax.random.bernoulli(
        jax.random.wrap_key_data(weight.dropout),
        1 - weight.rate,
        x.shape,
        out_sharding=None if placed.mesh.empty else placed,
    )
    return jnp.where(keep, x / (1 - weight.rate), jnp.zeros((), x.dtype))


def merged(weight: Adapted[jax.Array]) -> jax.Array:
    """The whole weight in float32."""
    side, core = side_of(weight).astype(jnp.float32), whole(weight.core_AD).astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        change = jnp.einsum("FA,AD->FD", side, core)
    return widened(weight.base_FD) + weight.scale * change


def merge[Tree](params: Tree) -> Tree:
    """The tree with every adapter added to its base in float32, and cast back; inside jit."""
    return jax.tree.map(
        lambda leaf: merged(leaf).astype(leaf.side_FA.dtype) if is_adapted(leaf) else leaf,
        params,
        is_leaf=is_adapted,
    )


def without_adapters[Tree](params: Tree) -> Tree:
    """The base weights, the very buffers."""
    return jax.tree.map(
        lambda leaf: leaf.base_FD if is_adapted(leaf) else leaf, params, is_leaf=is_adapted
    )


def settled[Tree](params: Tree) -> Tree:
    """Fused adapters with the zeros of `side_of` filled in once, for use many times over."""
    return jax.tree.map(
        lambda leaf: (
            replace(leaf, side_FA=side_of(leaf), rows=(), ranks=()) if is_adapted(leaf) else leaf
        ),
        params,
        is_leaf=is_adapted,
    )


def with_dropout(params: Any, *, key: jax.Array) -> Any:
    """A tree for one training forward: adapters that drop out carry keys of their own."""
    leaves, tree = jax.tree.flatten(params, is_leaf=is_adapted)
    leaves = [
        replace(leaf, dropout=jax.random.key_data(jax.random.fold_in(key, number)))
        if is_adapted(leaf) and leaf.rate > 0
        else leaf
        for number, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, leaves)
