"""A short name of token rows, by which a resumed run knows those of its checkpoint."""

import zlib
from collections.abc import Sequence
from typing import Any

from rlhf_jax.data.tokenize import PairRow


def fingerprint(rows: Sequence[Any]) -> str:
    """`90 rows (checksum 1c291ca3)`: of all tokens of SFT, pair or prompt rows, in their order.

    The same in every process and on every mesh; a million rows of 300 tokens take a second.
    """
    checksum = 0
    for row in rows:
        texts = (row.chosen, row.rejected) if isinstance(row, PairRow) else (row.tokens,)
        for tokens in texts:
            checksum = zlib.crc32(tokens, checksum)
    return f"{len(rows)} rows (checksum {checksum:08x})"
