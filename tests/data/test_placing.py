"""Rows whose lengths are known late: they share sequences of few sizes, shard by shard."""

import numpy as np
import pytest

from rlhf_jax.data.placing import SIZES, Groups, alone, balance, longest_sequence, place, sizes

WIDTH = 32


def lengths(size: int, seed: int = 0, *, shortest: int = 2) -> np.ndarray:
    """A heavy tail, as answers have it."""
    rng = np.random.default_rng(seed)
    drawn = shortest + rng.lognormal(1.6, 0.8, size)
    return np.minimum(drawn, WIDTH).astype(np.int64)


@pytest.mark.parametrize(("shards", "parts"), [(1, 1), (4, 1), (1, 4), (4, 2)])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", ["packed", "alone"])
def test_rows_of_a_group_fill_its_sequences_without_overlap(
    way: str, shards: int, parts: int, seed: int
) -> None:
    """Group (shard, part) is every `parts`-th row of the shard's block of the batch."""
    rows = lengths(64, seed)
    rows[5] = 0
    groups = Groups(shards, parts)
    packed = place(rows, groups, width=WIDTH, unpacked=WIDTH)
    assert packed is not None
    found = alone(rows, groups, WIDTH) if way == "alone" else packed
    block = 64 // shards
    for shard in range(shards):
        for part in range(parts):
            taken = np.zeros(found.num_tokens, int)
            for row in range(shard * block + part, (shard + 1) * block, parts):
                begin, length = int(found.begins_B[row]), int(rows[row])
                taken[begin : begin + length] += 1
                if length:
                    assert begin // found.length == (begin + length - 1) // found.length
            assert taken.max() == 1
            assert taken.sum() == rows[shard * block : (shard + 1) * block][part::parts].sum()
    np.testing.assert_array_equal(found.lengths_B, rows)


def test_sizes_are_eighths_of_the_widest_rows_and_the_smallest_that_holds_them_is_taken() -> None:
    seen = set()
    for seed in range(40):
        rows = lengths(64, seed, shortest=seed // 2)
        found = place(rows, Groups(1), width=WIDTH, unpacked=WIDTH)
        assert found is not None
        share = found.num_tokens / (64 * WIDTH)
        assert share * SIZES == int(share * SIZES)
        assert rows.sum() <= found.num_tokens < rows.sum() * 1.1 + 64 * WIDTH / SIZES
        seen.add((found.num_sequences, found.length))
        assert found.length <= longest_sequence(64, WIDTH)
    assert 2 <= len(seen) < SIZES


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 13, 64])
def test_whatever_the_rows_it_never_costs_more_than_seven_eighths(num_rows: int) -> None:
    count, allowed = sizes(num_rows, WIDTH)
    assert allowed == sorted(allowed)
    packed = 0
    for seed in range(20):
        rows = np.random.default_rng(seed).integers(1, WIDTH + 1, num_rows)
        for unpacked in (WIDTH, 24):
            rows = np.minimum(rows, unpacked)
            found = place(rows, Groups(1), width=WIDTH, unpacked=unpacked)
            if found is None:
                continue
            packed += 1
            assert found.num_sequences == count
            assert found.length in allowed
            assert found.num_tokens <= num_rows * unpacked * 7 / 8
    assert packed > 0


def test_full_rows_stay_as_they_are() -> None:
    assert place(np.full(64, WIDTH), Groups(4, 2), width=WIDTH, unpacked=WIDTH) is None
    assert place(np.full(64, WIDTH - 2), Groups(1), width=WIDTH, unpacked=WIDTH) is None
    one_full = np.full(64, 4)
    one_full[:8] = WIDTH
    assert place(one_full, Groups(8), width=WIDTH, unpacked=WIDTH) is None
    assert place(one_full[balance(one_full, Groups(8))], Groups(8), width=WIDTH, unpacked=WIDTH)


@pytest.mark.parametrize(("shards", "parts"), [(1, 1), (4, 1), (2, 4)])
def test_balanced_groups_have_all_rows_and_like_sums(shards: int, parts: int) -> None:
    rows, groups = lengths(64, 7), Groups(shards, parts)
    order = balance(rows, groups)
    assert sorted(order) == list(range(64))
    sums = groups.split(rows[order]).sum(1)
    assert sums.max() - sums.min() <= 2 + rows.max() // 4
    np.testing.assert_array_equal(groups.join(groups.split(order)), order)
