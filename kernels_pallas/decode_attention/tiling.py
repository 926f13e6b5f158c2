"""How the decode kernel is cut into programs, and why.

`scripts/bench_kernels.py --sweep` times the alternatives on the card at hand.
"""

from dataclasses import dataclass

from kernels_pallas.triton import SMALLEST_DOT, next_power_of_2

STREAMING_MULTIPROCESSORS = 132  # H100 and H200; only a target for the number of programs
MOST_WARPS = 4


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
    batch: int, kv_heads: int, heads_per_group: int, head_size: int, cached: int, window: int | None
) -> Tiling:
    """The tiling for these shapes.

    Timed on an H200 with one query head a group, K=64 and 64 rows: one warp that reads 32 positions
    at a time was the fastest, and one program for each row and head; with 8 rows one program of 4
    warps that read 128 (11.3 us; 4 splits of one warp with their reduction 12.6). The rest is
    derived: a wider head keeps the numbers per thread; fewer rows are split until there are
    `programs_per_sm`; at 4 query heads a group the vector form needs more instructions for a loaded
    number than the memory's speed leaves them, and (K=128, 2 warps) more registers than a thread
    has.
    """
    use_dot = heads_per_group >= 4
    if use_dot:
        block, num_warps, programs_per_sm = 64, 4, 4
    else:
        block, num_warps, programs_per_sm = 32, max(1, next_power_of_2(head_size) // 64), 8
    live = cached if window is None else min(cached, window)
    wanted = STREAMING_MULTIPROCESSORS * programs_per_sm // (batch * kv_heads)
    if 1 < wanted * num_warps <= MOST_WARPS and live >= 2 * block * wanted:
        more = next_power_of_2(wanted)
        return Tiling(block * more, num_warps * more, 1, use_dot)
    most = max(1, live // (2 * block))
    return Tiling(block, num_warps, min(max(1, wanted), most), use_dot)
