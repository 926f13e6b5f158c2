"""How products of int8 digits are cut into programs. `rows` are rows of digits: two a row of x.

`scripts/bench_kernels.py --only half_layer --cases int8` times the choice.
"""

from kernels_pallas.row_digits import program_rows
from kernels_pallas.skinny_product.tiling import FULL, MOST_SPLITS, Tiling
from kernels_pallas.triton import SMALLEST_DOT

SMALLEST_BLOCK = 32  # contracted positions that a tensor-core instruction takes
SHARED_MEMORY = 200_000

# By 8 or 64 rows, R, C, and in parts or not: the fastest of those timed on an H200 (OPT-6.7B).
MEASURED = {
    (8, 16384, 4096, False): Tiling(64, 256, 1, 4, 3, 16),
    (8, 4096, 4096, True): Tiling(64, 256, 4, 4, 4, 16),
    (8, 4096, 16384, True): Tiling(128, 256, 4, 4, 3, 16),
    (64, 16384, 4096, False): Tiling(128, 128, 1, 8, 4, 64),
    (64, 4096, 4096, True): Tiling(128, 128, 4, 8, 6, 128),
}


def choose(
    M: int, shape: tuple[int, ...], num_matrices: int = 1, *, in_parts: bool = False
) -> Tiling:
    """The tiling of `[M, C]` times `[R, C]`, in parts of the contracted dimension or whole.

    R and C are multiples of 16. Between the sizes that were timed: 64 columns a program,
    with blocks as large as were fastest for few rows and for many.
    """
    R, C = shape
    rows = program_rows(M)
    if num_matrices == 1 and (rows // 2, R, C, in_parts) in MEASURED:
        return MEASURED[rows // 2, R, C, in_parts]
    few = rows <= 32
    if not in_parts:
        rows = min(64, rows)
    most = (256 if in_parts or num_matrices > 1 else 512) if few else 128
    tile = next(n for n in (64, 32, SMALLEST_DOT) if R % n == 0)
    block = next(
        n for n in (512, 256, 128, 64, SMALLEST_BLOCK, SMALLEST_DOT) if n <= most and C % n == 0
    )
    splits = 1
    if in_parts:
        wanted = min(MOST_SPLITS, 2 * FULL * tile // R, C // block // 2)
        splits = next(n for n in (8, 4, 2, 1) if n <= max(1, wanted) and C // block % n == 0)
    warps = 8 if few and not in_parts and tile == 64 else 4
    stages = min(6, (4 if in_parts else 3) * most // block)
    stages = min(stages, SHARED_MEMORY // (block * (rows + num_matrices * tile)))
    return Tiling(tile, block, splits, warps, stages, rows)
