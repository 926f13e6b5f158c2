"""What the attention kernels share: which tiles a program visits, and what a query sees in one.

Query i sees keys starts[i]..i. Starts never fall along a row, so a tile of queries sees one range
of tiles of keys, and a tile of keys is seen by one range of tiles of queries. Those in the middle
are seen whole and need no mask. Without starts every query sees all keys up to its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from kernels_pallas.attention.tiling import Tiling

MASKED = -1e30  # finite: a difference of two of them is 0, not NaN

type Step = Callable[[jax.Array, Any, bool], Any]
"""(number of a tile, state, whether it has to be masked) to the next state."""


class Visits(NamedTuple):
    """Tiles low..high-1, of which full..end_full-1 are seen whole."""

    low: jax.Array
    full: jax.Array
    end_full: jax.Array
    high: jax.Array

    def run(self, step: Step, state: Any) -> Any:
        """The state after all tiles, in ascending order."""
        full = jnp.clip(self.full, self.low, self.high)
        end_full = jnp.clip(self.end_full, full, self.high)
        state = lax.fori_loop(self.low, full, lambda i, s: step(i, s, True), state)
        state = lax.fori_loop(full, end_full, lambda i, s: step(i, s, False), state)
        return lax.fori_loop(end_full, self.high, lambda i, s: step(i, s, True), state)


def keys_seen(first: jax.Array, starts: jax.Array | None, length: int, tiling: Tiling) -> Visits:
    """Tiles of keys that the queries from `first` on see."""
    stop = jnp.minimum(first + tiling.queries, length)
    zero = jnp.zeros_like(first)
    return Visits(
        low=zero if starts is None else div(jnp.min(starts), tiling.keys),
        full=zero if starts is None else ceil_div(jnp.max(starts), tiling.keys),
        end_full=div(first + 1, tiling.keys),
        high=ceil_div(stop, tiling.keys),
    )


def queries_seeing(
    first: jax.Array, ends: tuple[jax.Array, jax.Array], length: int, tiling: Tiling
) -> Visits:
    """Tiles of queries that see the keys from `first` on.

    `ends` are the ends of what sees the first, and any, of them.
    """
    of_first, of_any = ends
    return Visits(
        low=div(first, tiling.queries),
        full=ceil_div(first + (tiling.keys - 1), tiling.queries),
        end_full=div(jnp.minimum(of_first, length), tiling.queries),
        high=ceil_div(jnp.minimum(of_any, length), tiling.queries),
    )


def load_rows(ref: Any, rows_ok: jax.Array | None, head_size: int) -> jax.Array:
    """A tile `[rows, lanes]` of heads, with zeros where a row or lane is none."""
    lanes = ref.shape[-1]
    lanes_ok = None if lanes == head_size else jnp.arange(lanes) < head_size
    ok = tile_mask(ref.shape, rows_ok, lanes_ok)
    return plt.load(ref) if ok is None else plt.load(ref, mask=ok, other=0.0)


def store_rows(ref: Any, tile: jax.Array, rows_ok: jax.Array, head_size: int) -> None:
    """Writes what is real of a tile, in the ref's dtype."""
    lanes_ok = None if ref.shape[-1] == head_size else jnp.arange(ref.shape[-1]) < head_size
    plt.store(ref, tile.astype(ref.dtype), mask=tile_mask(ref.shape, rows_ok, lanes_ok))


def tile_mask(
    shape: tuple[int, ...], rows_ok: jax.Array | None, lanes_ok: jax.Array | None
) -> jax.Array | None:
    """Both as one mask of a tile; None where everything is real."""
    if rows_ok is None and lanes_ok is None:
        return None
    if rows_ok is None:
        assert lanes_ok is not None
        return jnp.broadcast_to(lanes_ok[None, :], shape)
    rows = jnp.broadcast_to(rows_ok[:, None], shape)
    return rows if lanes_ok is None else rows & lanes_ok[None, :]


def div(number: jax.Array, by: int) -> jax.Array:
    """The quotient of two that are not negative, rounded down."""
    return lax.div(number, jnp.int32(by))


def ceil_div(number: jax.Array, by: int) -> jax.Array:
    """The quotient, rounded up."""
    return lax.div(number + (by - 1), jnp.int32(by))
