"""Adapters added to their weights in float64, one module at a time."""

from typing import Any

import numpy as np


def merged_matrix(base: Any, side: Any, core: Any, scale: float) -> np.ndarray:
    """`base + scale * side @ core`."""
    base, side, core = (np.asarray(array, np.float64) for array in (base, side, core))
    return base + scale * side @ core


def merged_groups(
    base: Any, side: Any, core: Any, scale: float, rows: tuple[int, ...], ranks: tuple[int, ...]
) -> np.ndarray:
    """The fused projection: query, key and value of each group have adapters of their own.

    Those of the query are the first `ranks[0]` columns of `side` and rows of `core`, and so on;
    what `side` has elsewhere is not read.
    """
    base, side, core = (np.asarray(array, np.float64) for array in (base, side, core))
    out = base.copy()
    for first in range(0, len(base), sum(rows)):
        row, rank = first, 0
        for num_rows, width in zip(rows, ranks, strict=True):
            block = slice(row, row + num_rows), slice(rank, rank + width)
            out[block[0]] += scale * side[block] @ core[block[1]]
            row, rank = row + num_rows, rank + width
    return out


def merge(params: Any) -> Any:
    """A decoder of NumPy arrays without adapters, in float32."""

    def one(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, np.ndarray):
            return leaf
        parts = leaf.base_FD, leaf.side_FA, leaf.core_AD, leaf.scale
        whole = merged_groups(*parts, leaf.rows, leaf.ranks) if leaf.rows else merged_matrix(*parts)
        return whole.astype(np.float32)

    names = ("qkv_ED", "out_ED", "gate_FD", "up_FD", "down_FD")
    layers = [
        layer.replace(**{name: one(getattr(layer, name)) for name in names})
        for layer in params.layers
    ]
    return params.replace(layers=layers)
