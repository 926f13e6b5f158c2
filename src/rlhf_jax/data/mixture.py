"""Weighted blends: which rows of which source an epoch holds.

An epoch has as many rows as all sources together, and source i gives `weight_i` of them, as near
as whole rows allow and at least one. Each source goes on in the next epoch where it stopped in the
last one, and is reshuffled whenever all of its rows were seen: none is seen twice before all are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Mixture:
    """`rows[i]` are the row numbers of source i, and `weights[i]` is its share of an epoch."""

    rows: tuple[np.ndarray, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, sources: Sequence[int], weights: Sequence[float]) -> "Mixture":
        """The mixture of rows whose source numbers are `sources`.

        Raises:
            ValueError: a source has no rows.
        """
        numbers = np.asarray(sources)
        rows = tuple(np.flatnonzero(numbers == n) for n in range(len(weights)))
        empty = [n for n, of_source in enumerate(rows) if not len(of_source)]
        if empty:
            raise ValueError(f"source {empty[0]} has weight {weights[empty[0]]} and no rows")
        return cls(rows, tuple(weights))

    @property
    def counts(self) -> list[int]:
        """How many rows of each source an epoch has."""
        return shares(sum(map(len, self.rows)), self.weights)

    def order(self, epoch: int, seed: int) -> np.ndarray:
        """Row numbers of an epoch, source by source; a function of its arguments alone."""
        counts = self.counts
        drawn = [
            rows[_draws(len(rows), epoch * count, (epoch + 1) * count, (seed, source))]
            for source, (rows, count) in enumerate(zip(self.rows, counts, strict=True))
        ]
        return np.concatenate(drawn)


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """`total` cut in proportion to `weights`, at least 1 each; largest remainders first."""
    exact = np.asarray(weights, np.float64) / sum(weights) * total
    counts = np.maximum(np.floor(exact), 1).astype(int)
    while counts.sum() < total:
        counts[np.argmax(exact - counts)] += 1
    while counts.sum() > max(total, len(weights)):
        counts[np.argmax(np.where(counts > 1, counts - exact, -np.inf))] -= 1
    return counts.tolist()


def _draws(num_rows: int, start: int, stop: int, seed: tuple[int, ...]) -> np.ndarray:
    """Draws `start` … `stop`-1 of endless passes over `num_rows` rows, each in its own order."""
    passes = range(start // num_rows, -(-stop // num_rows))
    orders = [np.random.default_rng((*seed, n)).permutation(num_rows) for n in passes]
    first = passes.start * num_rows
    return np.concatenate(orders)[start - first : stop - first]
