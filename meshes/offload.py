"""Parameters in host memory: where they are put, and how they come to the devices.

An array in host memory says so in its type (`jax.typeof(x).memory_space`), so a program needs no
flag: what reads parameters calls `to_device`, which moves what lies on the host and is nothing for
the rest. Moved layer by layer, a model never is on the devices as a whole.
"""

from dataclasses import replace
from typing import Any

import jax

from meshes.layout import Layout

HOST = "pinned_host"


def on_host(layout: Layout) -> Layout:
    """The layout with its parameters in page-locked host memory, each shard beside its device.

    Raises:
        ValueError: the devices have no such memory.
    """
    check_host_memory(layout.mesh.devices.flat[0])
    return replace(layout, memory=HOST)


def check_host_memory(device: Any) -> None:
    """ValueError where a device has no page-locked host memory beside it."""
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise ValueError(
            f"offloading needs {HOST} memory, {device.device_kind} ({device.platform}) offers "
            f"{', '.join(kinds)}: leave the offload flags out"
        )


def to_device[Tree](tree: Tree) -> Tree:
    """Every array in device memory, in the sharding that it has; inside jit or out of it."""
    return jax.tree.map(_leaf_to_device, tree)


def to_host[Tree](tree: Tree) -> Tree:
    """Inside jit: every array in host memory, in the sharding that it has."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Host), tree)


def is_on_host(leaf: Any) -> bool:
    """Whether an array (or a traced one) lies in host memory."""
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def _leaf_to_device(leaf: jax.Array) -> jax.Array:
    return jax.device_put(leaf, jax.memory.Space.Device) if is_on_host(leaf) else leaf
