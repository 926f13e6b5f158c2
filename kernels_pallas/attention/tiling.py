"""How the attention kernels are cut into programs, and why.

Blocks of heads up to 128 wide in bfloat16 were timed on an H200 (docs/log.md). The others are
derived: both operands of a product and its accumulators have to fit the registers and shared memory
of a program, and a narrower block wastes fewer products above the diagonal and across the borders
of packed rows.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.typing import DTypeLike

from kernels_pallas.triton import SMALLEST_DOT, next_power_of_2


@dataclass(frozen=True)
class Tiling:
    """One way to run one of the kernels.

    queries: queries of a tile (power of two).
    keys: keys of a tile (power of two).
    num_warps: warps of a program (power of two).
    num_stages: tiles that are loaded ahead.
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int = 2

    def __post_init__(self) -> None:
        for name, value in (("queries", self.queries), ("keys", self.keys)):
            if value < SMALLEST_DOT or value != next_power_of_2(value):
                raise ValueError(
                    f"Tiling.{name}={value}: use a power of two, at least {SMALLEST_DOT}"
                )
        if self.num_warps < 1 or self.num_warps != next_power_of_2(self.num_warps):
            raise ValueError(f"Tiling.num_warps={self.num_warps}: use a power of two")


@dataclass(frozen=True)
class Tilings:
    """Of the forward kernel, and of the two of the backward pass."""

    forward: Tiling
    queries: Tiling
    keys: Tiling


def lanes_of(head_size: int) -> int:
    """Width of a head inside a kernel: a power of two, as all sizes there; the rest is masked."""
    return max(SMALLEST_DOT, next_power_of_2(head_size))


def choose(length: int, head_size: int, dtype: DTypeLike) -> Tilings:
    """The tilings for rows of `length` tokens. Four-byte numbers halve the tiles."""
    lanes, wide = lanes_of(head_size), jnp.dtype(dtype).itemsize > 2
    if lanes > 128:
        tilings = Tiling(64, 32, 8), Tiling(32, 32, 4), Tiling(32, 32, 4)
    elif wide:
        warps = 8 if lanes > 64 else 4
        tilings = Tiling(128, 64, warps), Tiling(64, 64, 4), Tiling(64, 64, 4)
    else:
        queries = Tiling(128, 32, 8, 3) if lanes > 64 else Tiling(64, 64, 4)
        tilings = Tiling(64, 64, 4, 3), queries, Tiling(32, 64, 4, 3)
    most = max(SMALLEST_DOT, next_power_of_2(length))
    return Tilings(*(_at_most(tiling, most, halved=wide) for tiling in tilings))


def _at_most(tiling: Tiling, most: int, *, halved: bool) -> Tiling:
    """The tiling with tiles no longer than a row."""

    def size(wanted: int) -> int:
        return min(most, max(SMALLEST_DOT, wanted // 2) if halved else wanted)

    return replace(tiling, queries=size(tiling.queries), keys=size(tiling.keys))
