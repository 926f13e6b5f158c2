"""How the skinny products are cut into programs, and why.

A product of few rows is as fast as its weights are read: every multiprocessor needs a share of them
and enough loads under way. `scripts/bench_kernels.py --only half_layer` times the choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kernels_pallas.triton import SMALLEST_DOT, next_power_of_2

MOST_ROWS = 64  # what was timed; with more rows XLA's choice has more to work on
MOST_ROWS_NARROW = 256  # of one byte a number, in blocks of 64 rows: XLA would widen the matrix
MOST_SPLITS = 8


@dataclass(frozen=True)
class Tiling:
    """One way to run a product.

    tile: columns of the output that a program computes.
    block: how much of the contracted dimension it reads at a time.
    num_splits: programs that share one tile, each with a part of the contracted dimension.
    num_warps: warps of a program.
    num_stages: blocks under way at once.
    """

    tile: int
    block: int
    num_splits: int
    num_warps: int
    num_stages: int


def most_rows(itemsize: int) -> int:
    """Up to how many rows the kernels are for, by the bytes of a number of the matrix."""
    return MOST_ROWS_NARROW if itemsize == 1 else MOST_ROWS


def padded_rows(M: int) -> int:
    """Rows of the tensor-core operand: of one program, where there are more than 64."""
    return min(MOST_ROWS, max(SMALLEST_DOT, next_power_of_2(M)))


def choose_up(M: int, F: int, D: int, itemsize: int = 2) -> Tiling | None:
    """The tiling of `[M, D]` times `[F, D]`; None where no tile divides the sizes.

    Timed on an H200 at 64, 8 and 1 rows with OPT-1.3B's matrices; the rest is derived. Numbers of
    one byte come in blocks of as many bytes.
    """
    many = M > SMALLEST_DOT
    tile = _largest(F, (64, 32, 16) if many else (32, 16))
    block = _largest(D, _blocks(64 if many else 128, itemsize))
    if tile is None or block is None:
        return None
    return Tiling(tile, block, 1, num_warps=4, num_stages=_stages(many, itemsize))


def choose_down(M: int, F: int, D: int, itemsize: int = 2) -> Tiling | None:
    """The tiling of `[M, F]` times `[F, D]`; None where no tile divides the sizes.

    Timed as above: with many rows more than one program a multiprocessor does not pay, since every
    part is written and read again.
    """
    many = M > SMALLEST_DOT
    tile, block = _largest(D, (64, 32, 16)), _largest(F, _blocks(64, itemsize))
    if tile is None or block is None:
        return None
    num_tiles, num_blocks = D // tile, F // block
    wanted = min(MOST_SPLITS, (128 if many else 256) // num_tiles, num_blocks // 4)
    splits = next(n for n in (8, 4, 2, 1) if n <= max(1, wanted) and num_blocks % n == 0)
    return Tiling(tile, block, splits, num_warps=4, num_stages=_stages(many, itemsize))


def _blocks(most: int, itemsize: int) -> list[int]:
    """Sizes of a block, the largest first: `most` numbers of two bytes, or twice as many of one."""
    return [n for n in (256, 128, 64, 32, 16) if n <= most * 2 // min(itemsize, 2)]


def _stages(many: bool, itemsize: int) -> int:
    """Blocks under way: larger blocks of rows and a gate leave shared memory for four."""
    return 6 if many and itemsize > 1 else 4


def _largest(size: int, candidates: Sequence[int]) -> int | None:
    """The first candidate that divides `size`."""
    return next((n for n in candidates if size % n == 0), None)
