"""The loader: batches are a function of the step, and every epoch is the data set once."""

import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from rlhf_jax.data.loader import Loader


def collate(rows: Sequence[int], batch_size: int) -> np.ndarray:
    return np.array([*rows, *[-1] * (batch_size - len(rows))])


def loader(num_rows: int = 10, **changes) -> Loader[np.ndarray]:
    return Loader(range(num_rows), collate, **{"batch_size": 4, "seed": 7, **changes})


def epoch_of(load: Loader[np.ndarray], epoch: int) -> list[int]:
    first = epoch * load.num_batches
    rows = np.concatenate([load.batch(first + n) for n in range(load.num_batches)])
    return rows.tolist()


def test_an_epoch_holds_every_row_once_and_fills_its_last_batch() -> None:
    load = loader()
    assert load.num_batches == 3
    assert [load.size(step) for step in range(6)] == [4, 4, 2] * 2
    for epoch in range(3):
        assert Counter(epoch_of(load, epoch)) == Counter([*range(10), -1, -1])


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    assert epoch_of(loader(), 1) == epoch_of(loader(), 1)
    orders = [epoch_of(loader(40), 0), epoch_of(loader(40), 1), epoch_of(loader(40, seed=8), 0)]
    assert len({tuple(order) for order in orders}) == 3


def test_without_shuffling_rows_keep_their_order() -> None:
    load = loader(shuffle=False)
    assert epoch_of(load, 0) == epoch_of(load, 5) == [*range(10), -1, -1]


def test_resuming_at_a_step_equals_never_having_stopped() -> None:
    whole = list(loader().batches(0, 8))
    assert [step for step, _ in whole] == list(range(8))
    resumed = list(loader().batches(5, 8))
    for (step, batch), (resumed_step, resumed_batch) in zip(whole[5:], resumed, strict=True):
        assert step == resumed_step
        np.testing.assert_array_equal(batch, resumed_batch)
        np.testing.assert_array_equal(batch, loader().batch(step))


def test_groups_share_batches_and_no_row_is_lost() -> None:
    load = loader(43, group_of=lambda row: row % 2)
    for epoch in range(2):
        rows = epoch_of(load, epoch)
        assert Counter(row for row in rows if row >= 0) == Counter(range(43))
        batches = np.array(rows).reshape(-1, 4)
        mixed = [len({row % 2 for row in batch if row >= 0}) > 1 for batch in batches]
        assert sum(mixed) <= 1
    parities = [load.batch(n)[0] % 2 for n in range(load.num_batches)]
    assert parities not in (sorted(parities), sorted(parities, reverse=True))


def test_batches_are_made_ahead_in_the_background() -> None:
    made, ahead = [], threading.Event()

    def watch(rows: Sequence[int], batch_size: int) -> np.ndarray:
        made.append(threading.current_thread())
        if len(made) >= 3:
            ahead.set()
        return collate(rows, batch_size)

    steps = Loader(range(40), watch, batch_size=4, seed=0).batches(0, 10, prefetch=3)
    next(steps)
    assert ahead.wait(timeout=30)
    assert threading.main_thread() not in made


def test_an_exception_reaches_the_consumer_when_its_batch_is_due() -> None:
    def fail(rows: Sequence[int], batch_size: int) -> np.ndarray:
        if 9 in rows:
            raise ValueError("row 9 is broken")
        return collate(rows, batch_size)

    steps = Loader(range(12), fail, batch_size=4, seed=0, shuffle=False).batches(0, 3)
    assert [next(steps)[0], next(steps)[0]] == [0, 1]
    with pytest.raises(ValueError, match="row 9 is broken"):
        next(steps)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: loader(0), "no rows"),
        (lambda: loader(batch_size=0), "batch_size=0"),
        (lambda: loader(shuffle=False, group_of=int), "needs shuffle=True"),
        (lambda: loader().batch(-1), "step=-1"),
        (lambda: next(loader().batches(0, 1, prefetch=0)), "prefetch=0"),
    ],
)
def test_what_cannot_be_is_an_error(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
