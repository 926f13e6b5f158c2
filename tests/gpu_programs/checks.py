"""Properties of compiled programs, as lists of what offends against them."""

from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import Any

import jax

from meshes.layout import Layout
from rlhf_jax.models.params import is_spec
from tests.gpu_programs.hlo import Array, Collective, Instruction, Module
from tests.gpu_programs.thunks import GRAPH, Thunk

SMALL = 2**16
"""Bytes below which an array is bookkeeping: lengths, flags, metrics, log-probabilities."""


def local_shapes(specs: Any, layout: Layout, *, sharded_in: Layout) -> list[tuple[int, ...]]:
    """One device's shapes, in `layout`, of the parameters that `sharded_in` shards."""
    return [
        layout.param_sharding(spec).shard_shape(spec.shape)
        for spec in jax.tree.leaves(specs, is_leaf=is_spec)
        if any(sharded_in.spec(*spec.axes))
    ]


def copies(module: Module, body: str, sizes: Iterable[int]) -> list[str]:
    """Arrays that a loop's body fills anew and that are as large as one of these numbers of
    elements, in any shape.
    """
    wanted = set(sizes)
    return [
        f"{array} by {one}"
        for array, one in module.written(body)
        if prod(array.shape) in wanted and array.num_bytes >= SMALL
    ]


def decode_loop(module: Module) -> Instruction:
    """The loop whose body is one token: of the loops that hold no other the longest."""

    def inside(loop: Instruction) -> list[Instruction]:
        return list(module.walk(module.body(loop)))

    inner = [one for one in module.loops() if not any(x.opcode == "while" for x in inside(one))]
    return max(inner, key=lambda one: len(inside(one)))


def decode_launches(thunks: Thunk) -> list[Thunk]:
    """What the host starts for one token, in the same loop."""
    loops = [one.part("body") for one in thunks.walk() if one.kind == "kWhile"]
    inner = [one for one in loops if not any(x.kind == "kWhile" for x in one.walk())]
    return max(inner, key=lambda one: len(list(one.walk()))).launches


def graphs(launches: list[Thunk]) -> Counter[str]:
    """Launches by kind: `kCommandBuffer` is a graph."""
    assert GRAPH in {one.kind for one in launches}
    return Counter(one.kind for one in launches)


def quadratic(module: Module, length: int) -> list[str]:
    """Arrays `[…, T, T]`: attention scores."""
    return [
        f"{array} by {one}" for array, one in module.written() if array.shape.count(length) >= 2
    ]


def logits(module: Module, vocab: Iterable[int], most: int) -> list[str]:
    """Arrays with a dimension of the vocabulary (or a device's share of it) of more than `most`
    elements.
    """
    sizes = set(vocab)
    return [
        f"{array} by {one}"
        for array, one in module.written()
        if sizes & set(array.shape) and prod(array.shape) > most
    ]


def attention_calls(module: Module) -> list[Instruction]:
    """Calls of cuDNN's fused attention, backward ones included."""
    return [one for one in module.walk() if one.target is not None and "fmha" in one.target]


def large(found: Iterable[Collective], kind: str) -> list[Array]:
    """Arrays of collectives of one kind, without the small ones."""
    return [
        array
        for one in found
        if one.kind == kind
        for array in one.arrays
        if array.num_bytes >= SMALL
    ]


def moved(found: Iterable[Collective], allowed: Iterable[str]) -> list[str]:
    """Collectives of other kinds than these that move more than a little."""
    kinds = set(allowed)
    return [str(one) for one in found if one.kind not in kinds and one.num_bytes >= SMALL]


def by_size(arrays: Iterable[Array] | Iterable[tuple[int, ...]]) -> Counter[int]:
    """How many arrays there are of each number of elements."""
    return Counter(prod(one.shape if isinstance(one, Array) else one) for one in arrays)
