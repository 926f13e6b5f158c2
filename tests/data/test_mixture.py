"""Weighted blends: proportions in every epoch, every row in turn, the same from every start."""

from collections import Counter

import numpy as np
import pytest

from rlhf_jax.data.loader import Loader
from rlhf_jax.data.mixture import Mixture, shares

SIZES, WEIGHTS = (100, 10, 50), (1.0, 2.0, 1.0)
SOURCES = [n for n, size in enumerate(SIZES) for _ in range(size)]


@pytest.mark.parametrize(
    ("total", "weights", "expected"),
    [
        (10, (1, 1), [5, 5]),
        (10, (1, 2, 1), [3, 5, 2]),
        (7, (0.5, 0.25, 0.25), [3, 2, 2]),
        (10, (1e6, 1.0), [9, 1]),
        (2, (1, 1, 1), [1, 1, 1]),
    ],
)
def test_shares_add_up_and_leave_nobody_out(total: int, weights: tuple, expected: list) -> None:
    assert shares(total, weights) == expected


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_an_epoch_has_the_proportions_and_the_size_of_all_sources(epoch: int) -> None:
    order = Mixture.of(SOURCES, WEIGHTS).order(epoch, seed=3)
    counts = Counter(SOURCES[row] for row in order)
    assert counts == {0: 40, 1: 80, 2: 40}


def test_no_row_is_seen_twice_before_all_of_its_source_are() -> None:
    mixture = Mixture.of(SOURCES, WEIGHTS)
    seen: list[Counter[int]] = [Counter() for _ in SIZES]
    for epoch in range(20):
        for row in mixture.order(epoch, seed=3):
            seen[SOURCES[row]][row] += 1
        for size, counts in zip(SIZES, seen, strict=True):
            times = [counts[row] for row in counts] + [0] * (size - len(counts))
            assert max(times) - min(times) <= 1
    assert [len(counts) for counts in seen] == list(SIZES)


def test_each_pass_has_an_order_of_its_own() -> None:
    mixture = Mixture.of([0] * 40 + [1] * 40, (1, 1))
    orders = [mixture.order(epoch, seed=3) for epoch in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(80))
    assert orders[0].tolist() != orders[1].tolist()
    assert orders[0].tolist() != mixture.order(0, seed=4).tolist()


def test_a_loader_keeps_proportions_and_starts_anywhere() -> None:
    def loader() -> Loader[np.ndarray]:
        return Loader(
            range(160),
            lambda rows, size: np.asarray(rows),
            batch_size=16,
            seed=5,
            mixture=Mixture.of(SOURCES, WEIGHTS),
        )

    whole = dict(loader().batches(0, 40))
    counts = Counter(SOURCES[row] for batch in whole.values() for row in batch)
    assert counts == {0: 160, 1: 320, 2: 160}
    assert {SOURCES[row] for row in whole[0]} == {0, 1, 2}, "sources are mixed in a batch"
    later = dict(loader().batches(17, 23))
    assert all(later[step].tolist() == whole[step].tolist() for step in range(17, 23))


def test_a_source_without_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"source 1 has weight 2\.0 and no rows"):
        Mixture.of([0, 0, 2], WEIGHTS)
    with pytest.raises(ValueError, match="needs shuffle=True"):
        Loader(
            [1], lambda rows, size: rows, batch_size=1, seed=0, shuffle=False,
            mixture=Mixture.of([0], (1.0,)),
        )  # fmt: skip
