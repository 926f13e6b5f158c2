"""How the attention kernels are cut into programs, and why.

The blocks are derived, not timed: both operands of a product and its accumulators have to fit the
registers and shared memory of a program, and a narrower block wastes fewer products above the
diagonal and across the borders of packed rows.
"""

from dataclasses import dataclass

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
    """The tilings for rows of `length` tokens.

    A program keeps one tile (forward: queries; backward: queries, or keys with two gradients) and
    its float32 sums in registers: 128 x 64 numbers on 4 warps fill half of them. Wider heads halve
    the tile or take 8 warps; 4-byte numbers halve what is loaded at a time.
    """
    lanes, wide = lanes_of(head_size), jnp.dtype(dtype).itemsize > 2
    if lanes <= 64:
        forward, kept, moved, warps = 128, 64, 64, 4
    elif lanes <= 128:
        forward, kept, moved, warps = 128, 64, 32, 8
    else:
        forward, kept, moved, warps = 64, 32, 32, 8
    if wide:
        forward, kept, moved = forward // 2, max(SMALLEST_DOT, kept // 2), max(16, moved // 2)
    most = max(SMALLEST_DOT, next_power_of_2(length))
    forward, kept, moved = min(forward, most), min(kept, most), min(moved, most)
    return Tilings(
        forward=Tiling(forward, moved, warps if lanes > 64 else 4),
        queries=Tiling(kept, moved, 4),
        keys=Tiling(moved, kept, 4),
    )
