"""Changing layout inside a jitted program, and putting host arrays on the mesh."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshes.layout import Layout
from meshes.offload import to_device
from meshes.spec import ParamSpec


def reshard_params(params: Any, specs: Any, layout: Layout) -> Any:
    """Every parameter in `layout`; for use inside jit, where equal layouts cost nothing.

    What lies in host memory comes to the devices first: shards travel there, not whole weights.
    """
    return jax.tree.map(
        lambda spec, leaf: jax.sharding.reshard(to_device(leaf), layout.param_sharding(spec)),
        specs,
        params,
        is_leaf=lambda node: isinstance(node, ParamSpec),
    )


def whole(array: jax.Array) -> jax.Array:
    """The array on every device of its mesh; for use inside jit, nothing where it is there."""
    placed = jax.typeof(array).sharding
    if placed.mesh.empty:
        return array
    spec = PartitionSpec(*[None] * array.ndim)
    return jax.sharding.reshard(array, NamedSharding(placed.mesh, spec))


def put_batch[Tree](batch: Tree, layout: Layout) -> Tree:
    """A tree of host arrays `[B, ...]`, the same on every process, sharded over the batch axis.

    Never through `jax.device_put` to another sharding, which goes through the host once more.
    """
    return jax.tree.map(lambda leaf: put_rows(np.asarray(leaf), layout, "batch"), batch)


def put_rows(array: np.ndarray, layout: Layout, first_axis: str | None) -> jax.Array:
    """A host array with its first dimension on a logical axis and the others replicated."""
    logical = (first_axis,) + (None,) * (array.ndim - 1) if array.ndim else ()
    return jax.make_array_from_callback(
        array.shape, layout.sharding(*logical), lambda index: array[index]
    )


def local_shards(
    function: Callable[..., Any], layout: Layout, in_axes: Any, out_axes: Any
) -> Callable[..., Any]:
    """`function` run on the local shards of its operands.

    `in_axes` and `out_axes` are trees of tuples of logical axes. Kernels and cuDNN calls sit in
    here: called plainly their operands are gathered or their gradients lose their sharding.
    """

    def specs(tree: Any) -> Any:
        return jax.tree.map(lambda axes: layout.spec(*axes), tree, is_leaf=_is_axes)

    return jax.shard_map(
        function,
        mesh=layout.mesh,
        in_specs=specs(in_axes),
        out_specs=specs(out_axes),
        check_vma=False,
    )


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(item is None or isinstance(item, str) for item in node)
