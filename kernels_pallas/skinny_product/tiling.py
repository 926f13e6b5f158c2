"""How the skinny products are cut into programs, and why.

A product of few rows is as fast as its weights are read: every multiprocessor needs a share of them
and enough loads under way. `scripts/bench_kernels.py --only half_layer` times the choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kernels_pallas.triton import SMALLEST_DOT, next_power_of_2

MOST_ROWS = 64  # what was timed; with more rows XLA's choice has more to work on
MOST_ROWS_NARROW = 256  # of one byte a number, in blocks of 64 rows: XLA would widen the matrix
SMALL = 2**21  # numbers of a matrix that takes as long to start as to read: also up to 256 rows
MOST_SPLITS = 8
FULL = 128  # programs that fill the card's 132 multiprocessors
UNEVEN = 112  # fewer leave too many of them idle


@dataclass(frozen=True)
class Tiling:
    """One way to run a product.

    tile: columns of the output that a program computes.
    block: how much of the contracted dimension it reads at a time.
    num_splits: programs that share one tile, each with a part of the contracted dimension.
    num_warps: warps of a program.
    num_stages: blocks under way at once.
    rows: of x that a program has; None: all of them, up to 64.
    matrix_first: the tensor cores' left operand is the tile of the matrix (64 columns or more), and
      not the rows; of `product_up`.
    """

    tile: int
    block: int
    num_splits: int
    num_warps: int
    num_stages: int
    rows: int | None = None
    matrix_first: bool = False

    def rows_of(self, M: int) -> int:
        """Rows of a program's tensor-core operand; those beyond M are padding."""
        return self.rows or padded_rows(M)


def most_rows(itemsize: int, size: int) -> int:
    """Up to how many rows the kernels are for, by the bytes of a number of the matrix and how many
    it has.
    """
    return MOST_ROWS_NARROW if itemsize == 1 or size <= SMALL else MOST_ROWS


def padded_rows(M: int) -> int:
    """Rows of the tensor-core operand: of one program, where there are more than 64."""
    return min(MOST_ROWS, max(SMALLEST_DOT, next_power_of_2(M)))


def choose_up(M: int, F: int, D: int, itemsize: int = 2) -> Tiling | None:
    """The tiling of `[M, D]` times `[F, D]`; None where no tile divides the sizes.

    Timed on an H200 at 64, 8 and 1 rows with OPT-1.3B's matrices, at 32 with OPT-6.7B's and at 64
    with Llama-3.1-8B's: the matrix as the left operand reads up to 5 % faster, but for many rows
    where programs are fewer than multiprocessors: these need more blocks under way. For numbers of
    one byte the rest is derived; they come in blocks of as many bytes.
    """
    many = M > SMALLEST_DOT
    wide = itemsize > 1
    tile = _largest(F, (64, 32, 16) if many or wide else (32, 16))
    matrix_first = wide and tile == 64 and (not many or F // tile >= FULL)
    large = matrix_first or not (many or wide)
    block = _largest(D, _blocks(128 if large else 64, itemsize))
    if tile is None or block is None:
        return None
    stages = min(8, 512 // block) if wide else 4
    return Tiling(tile, block, 1, num_warps=4, num_stages=stages, matrix_first=matrix_first)


def choose_down(M: int, F: int, D: int, itemsize: int = 2) -> Tiling | None:
    """The tiling of `[M, F]` times `[F, D]`; None where no tile divides the sizes.

    Timed as above: with many rows one program a multiprocessor is best, since every part is written
    and read again; where tiles do not come out even (80 of OPT-13B's) several smaller ones.
    """
    many = M > SMALLEST_DOT
    tile, block = _largest(D, (64, 32, 16)), _largest(F, _blocks(64, itemsize))
    if tile is None or block is None:
        return None
    num_tiles, num_blocks = D // tile, F // block
    wanted = min(MOST_SPLITS, (FULL if many else 2 * FULL) // num_tiles, num_blocks // 4)
    splits = next(n for n in (8, 4, 2, 1) if n <= max(1, wanted) and num_blocks % n == 0)
    if many and itemsize > 1 and M <= MOST_ROWS and num_tiles * splits < UNEVEN <= num_tiles * 8:
        return _several(tile, num_tiles, F)
    return Tiling(tile, block, splits, num_warps=4, num_stages=_stages(many, itemsize))


def _several(tile: int, num_tiles: int, F: int) -> Tiling:
    """More than two programs a multiprocessor, each with two warps and fewer blocks under way."""
    block = _largest(F, (128, 64, 32, 16))
    assert block is not None
    even = [n for n in (1, 2, 4, 8) if F // block % n == 0]
    splits = next((n for n in even if n * num_tiles >= 2 * FULL), even[-1])
    return Tiling(tile, block, splits, num_warps=2, num_stages=3)


def num_parts(M: int, F: int, D: int) -> int:
    """Of a product of many rows by XLA: tiles of 128 x 128 for each multiprocessor, and 1024 or
    more to add up in each (timed on an H200 with 256 rows and OPT-1.3B's matrices).
    """
    tiles = -(-M // 128) * -(-D // 128)
    return next((n for n in (8, 4, 2) if n * tiles <= FULL and F % (1024 * n) == 0), 1)


def _blocks(most: int, itemsize: int) -> list[int]:
    """Sizes of a block, the largest first: `most` numbers of two bytes, or twice as many of one."""
    return [n for n in (256, 128, 64, 32, 16) if n <= most * 2 // min(itemsize, 2)]


def _stages(many: bool, itemsize: int) -> int:
    """Blocks under way: larger blocks of rows and a gate leave shared memory for four."""
    return 6 if many and itemsize > 1 else 4


def _largest(size: int, candidates: Sequence[int]) -> int | None:
    """The first candidate that divides `size`."""
    return next((n for n in candidates if size % n == 0), None)
