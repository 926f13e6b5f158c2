"""Packing: every row once, whole, in a sequence that holds it, and nothing depends on what ran."""

from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.data.loader import Loader
from rlhf_jax.data.packing import (
    Packing,
    collate_packed,
    collate_packed_pairs,
)
from rlhf_jax.data.tokenize import PairRow, SftRow
from rlhf_jax.objectives.losses import prediction_mask

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, 40, 300)
PACKING = Packing(LENGTHS, 48)


def row(length: int, prompt_length: int) -> SftRow:
    return SftRow(RNG.integers(3, 99, length).astype(np.int32), prompt_length)


def test_every_row_is_in_one_sequence_that_holds_it() -> None:
    order = RNG.permutation(len(LENGTHS))
    sequences = PACKING.pack(order)
    assert Counter(np.concatenate(sequences).tolist()) == Counter(range(len(LENGTHS)))
    filled = np.array([LENGTHS[rows].sum() for rows in sequences])
    assert filled.max() <= 48
    # A new sequence is opened only for a row that no other has room for.
    assert (np.sort(filled)[:2].sum()) > 48
    assert PACKING.filled == LENGTHS.sum() / (len(sequences) * 48)


def test_the_lengths_alone_decide_how_many_rows_each_sequence_has() -> None:
    packed = [PACKING.pack(RNG.permutation(len(LENGTHS))) for _ in range(2)]
    first, second = ([LENGTHS[rows].tolist() for rows in each] for each in packed)
    assert first == second
    assert packed[0][0].tolist() != packed[1][0].tolist()
    assert PACKING.num_sequences == len(first)
    assert PACKING.most_rows == max(map(len, first))


def test_rows_that_fill_a_sequence_stand_alone_and_longer_ones_are_refused() -> None:
    whole = Packing(np.array([5, 5, 5]), 5)
    assert [rows.tolist() for rows in whole.pack(np.array([2, 0, 1]))] == [[2], [0], [1]]
    with pytest.raises(ValueError, match="a row of 6 tokens does not fit a sequence of 5"):
        Packing(np.array([5, 6]), 5)


def test_rows_of_like_length_get_longer_sequences() -> None:
    """Forty tokens fill 48 to 83 % and nine times forty 384 to 94 %."""

    def length_for(lengths: list[int], multiple: int = 1) -> int:
        return Packing.of(lengths, 16, batch_size=64, multiple=multiple).length

    assert length_for([40] * 90) == 384
    assert length_for([48] * 90) == 48
    assert length_for(LENGTHS.tolist()) == 48
    # 16 sequences of 384 on as many devices would have twice the tokens of 64 rows.
    assert length_for([40] * 90, multiple=16) == 48


def packed_loader(seed: int = 7) -> Loader[list[list[int]]]:
    return Loader(
        range(len(LENGTHS)), lambda rows, size: [*rows], batch_size=4, seed=seed, packing=PACKING
    )


def epoch_of(loader: Loader[list[list[int]]], epoch: int) -> list[list[int]]:
    first = epoch * loader.num_batches
    return [rows for n in range(loader.num_batches) for rows in loader.batch(first + n)]


def test_an_epoch_shows_every_row_once_in_new_company() -> None:
    loader = packed_loader()
    assert loader.num_batches == -(-PACKING.num_sequences // 4)
    epochs = [epoch_of(loader, epoch) for epoch in range(2)]
    for epoch in epochs:
        assert Counter(row for rows in epoch for row in rows) == Counter(range(len(LENGTHS)))
    assert epochs[0] != epochs[1]
    assert {frozenset(rows) for rows in epochs[0]} != {frozenset(rows) for rows in epochs[1]}
    assert epoch_of(packed_loader(8), 0) != epochs[0]


def test_resuming_at_a_step_equals_never_having_stopped() -> None:
    steps = packed_loader().num_batches
    whole = list(packed_loader().batches(0, steps + 3))
    assert list(packed_loader().batches(steps - 2, steps + 3)) == whole[steps - 2 :]


@pytest.mark.parametrize("answers_only", [False, True])
def test_packed_rows_count_what_they_count_alone(answers_only: bool) -> None:
    sequences = [[row(6, 4), row(3, 0), row(4, 4), row(1, 1)], [row(9, 1), row(2, 1)]]
    batch = collate_packed(sequences, 3, length=16, answers_only=answers_only)
    for n, rows in enumerate(sequences):
        at = 0
        for each in rows:
            here = slice(at, at + len(each.tokens))
            np.testing.assert_array_equal(batch.tokens_BT[n, here], each.tokens)
            assert set(batch.starts_BT[n, here]) == {at}
            alone = prediction_mask(
                jnp.array([len(each.tokens)]), jnp.array([each.prompt_length]), jnp.array([1.0]),
                width=len(each.tokens), train_on="completion" if answers_only else "all",
            )  # fmt: skip
            targets = np.concatenate([[0], np.asarray(alone)[0, :-1]])
            np.testing.assert_array_equal(batch.counted_BT[n, here], targets)
            at = here.stop
        assert not batch.counted_BT[n, at:].any()
        assert set(batch.starts_BT[n, at:]) == {at}
    assert not batch.tokens_BT[2].any()
    assert not batch.counted_BT[2].any()


def test_the_scores_of_a_packed_pair_are_read_at_its_last_tokens() -> None:
    def pair(chosen: int, rejected: int, margin: float) -> PairRow:
        return PairRow(row(chosen, 2).tokens, row(rejected, 2).tokens, 2, margin)

    sequences = [[pair(5, 3, 0.5), pair(2, 4, 0.0)], [pair(7, 6, 0.0)]]
    batch = collate_packed_pairs(sequences, 3, length=20, most_pairs=2)
    np.testing.assert_array_equal(batch.valid_BN, [[1, 1], [1, 0], [0, 0]])
    np.testing.assert_array_equal(batch.margin_BN, [[0.5, 0], [0, 0], [0, 0]])
    for n, rows in enumerate(sequences):
        for m, each in enumerate(rows):
            for side, ends in (
                (each.chosen, batch.chosen_ends_BN), (each.rejected, batch.rejected_ends_BN)
            ):  # fmt: skip
                end = ends[n, m]
                start = batch.starts_BT[n, end]
                np.testing.assert_array_equal(batch.tokens_BT[n, start : end + 1], side)


@pytest.mark.parametrize(("multiple", "want"), [(1, 21), (8, 24), (32, 32), (48, 48)])
def test_a_batch_of_sequences_holds_the_rows_of_a_batch_on_average(
    multiple: int, want: int
) -> None:
    """Three rows fill a sequence, so 64 rows fill 21.3 of them."""
    packing = Packing(np.full(90, 16), 48)
    assert packing.sequences_per_batch(64, multiple) == want
