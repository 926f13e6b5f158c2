"""The mesh of a run, and `Layout`: one table of `rules` applied to one mesh and one model."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from meshes.axes import MESH_AXES
from meshes.rules import TABLES, TableName
from meshes.spec import ParamSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeshShape:
    """`--mesh`: replicas x fully sharded x tensor parallel."""

    replica: int
    fsdp: int
    tensor: int

    def __post_init__(self) -> None:
        if min(self.replica, self.fsdp, self.tensor) < 1:
            raise ValueError(f"mesh sizes must be at least 1, got {self}")

    @property
    def num_devices(self) -> int:
        """Devices of the whole mesh."""
        return self.replica * self.fsdp * self.tensor

    def __str__(self) -> str:
        sizes = [self.fsdp, self.tensor]
        return "x".join(map(str, [self.replica, *sizes] if self.replica > 1 else sizes))


def parse_mesh(text: str) -> MeshShape:
    """`"8x1"` (FxT) or `"2x4x1"` (RxFxT) as a MeshShape; ValueError says what is allowed."""
    sizes = text.lower().split("x")
    if len(sizes) not in (2, 3) or not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise ValueError(
            f"--mesh={text} is not a mesh: use FxT (fully sharded x tensor parallel) such as 8x1, "
            "or RxFxT with replicas such as 2x8x1"
        )
    replica, fsdp, tensor = [1] * (3 - len(sizes)) + [int(size) for size in sizes]
    return MeshShape(replica, fsdp, tensor)


def check_device_count(shape: MeshShape, available: int) -> None:
    """ValueError where the mesh asks for more devices than are visible; names meshes that fit."""
    if shape.num_devices <= available:
        return
    fitting = [f"--mesh={available}x1"]
    if available % 2 == 0:
        fitting.append(f"--mesh={available // 2}x2")
    raise ValueError(
        f"--mesh={shape} asks for {shape.num_devices} devices, {available} "
        f"{'is' if available == 1 else 'are'} visible: use {' or '.join(fitting)}"
    )


def default_inference_tp(shape: MeshShape, num_heads: int, num_kv_heads: int) -> int:
    """The largest N that divides the devices of one replica, the query heads and the KV heads.

    N must be a multiple of T; where no such N divides the heads, N = T.
    """
    return even_inference_sizes(shape, num_heads, num_kv_heads)[-1]


def even_inference_sizes(shape: MeshShape, num_heads: int, num_kv_heads: int) -> list[int]:
    """Every N that is a multiple of T and divides the devices of one replica, the query heads and
    the KV heads, the smallest first; T where there is none.
    """
    common = math.gcd(shape.fsdp * shape.tensor, num_heads, num_kv_heads)
    fits = [n for n in range(1, common + 1) if common % n == 0 and n % shape.tensor == 0]
    return fits or [shape.tensor]


def make_mesh(shape: MeshShape, inference_tp: int, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh with axes (replica, data, gen, tp), all explicit, for N-way tensor-parallel decode.

    ValueError where `inference_tp` does not fit the mesh.
    """
    devices = jax.devices()[: shape.num_devices] if devices is None else devices
    abstract = abstract_mesh(shape, inference_tp)
    grid = np.asarray(devices).reshape(abstract.axis_sizes)
    return Mesh(grid, MESH_AXES, axis_types=abstract.axis_types)


def abstract_mesh(shape: MeshShape, inference_tp: int) -> AbstractMesh:
    """The mesh without its devices: programs can be traced for it, not compiled or run."""
    check_inference_tp(shape, inference_tp)
    gen = inference_tp // shape.tensor
    sizes = (shape.replica, shape.fsdp // gen, gen, shape.tensor)
    return AbstractMesh(sizes, MESH_AXES, axis_types=(AxisType.Explicit,) * len(MESH_AXES))


def check_inference_tp(shape: MeshShape, inference_tp: int) -> None:
    """ValueError unless N is a multiple of T and N / T divides F; names the sizes that work."""
    allowed = inference_sizes(shape)
    if inference_tp not in allowed:
        raise ValueError(
            f"--inference-tp-size={inference_tp} does not fit --mesh={shape}: "
            f"use one of {', '.join(map(str, allowed))}"
        )


def inference_sizes(shape: MeshShape) -> list[int]:
    """Every `--inference-tp-size` that fits: T times the divisors of F, the smallest first."""
    return [shape.tensor * n for n in range(1, shape.fsdp + 1) if shape.fsdp % n == 0]


@dataclass(frozen=True)
class Layout:
    """Where every logical axis lives, for one table, one mesh and one model.

    `units` gives the number of indivisible pieces of each logical axis (KV groups for "qkv" and
    "heads", rows or columns for the others); an axis whose pieces do not divide over its mesh axes
    is replicated. Axes of size 1 are dropped from every spec, so equal layouts have equal types.
    `memory` is where parameters lie, None: the devices' own memory (see `meshes.offload`).
    """

    mesh: Mesh
    table: TableName
    units: tuple[tuple[str, int], ...]
    memory: str | None = None

    @classmethod
    def create(cls, mesh: Mesh, table: TableName, units: Mapping[str, int]) -> Self:
        """The layout, with a log line for every axis that has to be replicated."""
        layout = cls(mesh, table, tuple(sorted(units.items())))
        for name, count in layout.units:
            size = layout.size(TABLES[table].axes(name))
            if count % size:
                log.info(
                    "%s: %s has %d pieces, not a multiple of %d devices: replicated",
                    table, name, count, size,
                )  # fmt: skip
        return layout

    def size(self, axes: tuple[str, ...]) -> int:
        """Devices along these mesh axes together."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def mesh_axes(self, logical: str | None) -> tuple[str, ...]:
        """Mesh axes larger than 1 that a logical axis is sharded over; () where replicated."""
        if logical is None:
            return ()
        axes = TABLES[self.table].axes(logical)
        if logical not in ("batch", "rows") and dict(self.units)[logical] % self.size(axes):
            return ()
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    def spec(self, *logical: str | None) -> PartitionSpec:
        """PartitionSpec of an array whose dimensions have these logical axes."""
        entries = [self.mesh_axes(name) for name in logical]
        used = [axis for axes in entries for axis in axes]
        if len(used) != len(set(used)):
            raise ValueError(f"{self.table}: {logical} use a mesh axis twice: {entries}")
        return PartitionSpec(
            *(None if not axes else axes[0] if len(axes) == 1 else axes for axes in entries)
        )

    def sharding(self, *logical: str | None) -> NamedSharding:
        """NamedSharding of an array whose dimensions have these logical axes."""
        return NamedSharding(self.mesh, self.spec(*logical))

    def param_sharding(self, spec: ParamSpec) -> NamedSharding:
        """NamedSharding of a parameter."""
        sharding = self.sharding(*spec.axes)
        return sharding if self.memory is None else sharding.with_memory_kind(self.memory)

    @property
    def batch_size_divisor(self) -> int:
        """A global batch must be a multiple of this."""
        return self.size(TABLES[self.table].batch)
