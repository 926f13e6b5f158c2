"""How the decode kernel is cut into programs, and why.

`scripts/bench_kernels.py --sweep` times the alternatives on the card at hand.
"""

from dataclasses import dataclass

from kernels_pallas.triton import SMALLEST_DOT, next_power_of_2

STREAMING_MULTIPROCESSORS = 132  # H100 and H200; only a target for the number of programs
MOST_WARPS = 4
MANY = 512  # programs that keep all multiprocessors loading


@dataclass(frozen=True)
class Tiling:
    """One way to run the kernel.

    block: cached positions read at a time (power of two).
    num_warps: warps of a program (power of two).
    num_splits: programs that share one row and key/value head; more than 1 adds a reduction.
    use_dot: all query heads of a group at once on the tensor cores, in place of one after another
      on the vector units.
    """

    block: int
    num_warps: int
    num_splits: int
    use_dot: bool

    def __post_init__(self) -> None:
        for name, value in (("block", self.block), ("num_warps", self.num_warps)):
            if value < 1 or value != next_power_of_2(value):
                raise ValueError(f"Tiling.{name}={value}: use a power of two")
        if self.num_splits < 1:
            raise ValueError(f"Tiling.num_splits={self.num_splits}: use at least 1")
        if self.use_dot and self.block < SMALLEST_DOT:
            raise ValueError(f"Tiling.block={self.block} with use_dot: use {SMALLEST_DOT} or more")


def choose(
    batch: int,
    kv_heads: int,
    heads_per_group: int,
    head_size: int,
    cached: int,
    window: int | None,
    itemsize: int = 2,
) -> Tiling:
    """The tiling for these shapes and a cache of numbers of so many bytes.

    Timed on an H200 with 384 of 512 positions (docs/log.md). Numbers of two bytes go to the tensor
    cores even where only one of their 16 rows is used: the vector units are busy with conversions
    and sums while they could load. Only with wide heads or a group does that pay with few programs.
    Others, which are converted either way (float32 is rounded there), go to them from four heads a
    group on; else those of one byte take one warp a row and head that reads 32 positions, float32
    as many warps as keep the numbers per thread.
    """
    live = cached if window is None else min(cached, window)
    programs = batch * kv_heads
    many = programs >= MANY
    two_bytes = itemsize == 2
    use_dot = heads_per_group >= 4 or (
        two_bytes and (many or heads_per_group > 1 or head_size >= 128)
    )
    lanes = next_power_of_2(head_size)
    if many and not use_dot:
        return Tiling(32, 1 if itemsize == 1 else max(1, lanes // 64), 1, False)
    if many:
        return Tiling(64, min(MOST_WARPS, max(1, lanes // 32)), 1, True)
    if programs >= STREAMING_MULTIPROCESSORS and live >= 256:
        return Tiling(128, MOST_WARPS, 1, use_dot)
    splits = min(-(-MANY // programs), max(1, live // 64))
    return Tiling(64, MOST_WARPS, splits, use_dot)
