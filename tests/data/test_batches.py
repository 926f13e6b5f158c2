"""Batches: fixed shapes, right padding, and fillers that count for nothing."""

import numpy as np
import pytest

from rlhf_jax.data.batches import (
    COPIES_APART,
    MAX_COPIES,
    bucket_of,
    collate_pairs,
    collate_prompts,
    collate_text,
    common_length,
    prompt_buckets,
)
from rlhf_jax.data.tokenize import PairRow, PromptRow, SftRow


def ids(length: int, start: int = 5) -> np.ndarray:
    return np.arange(start, start + length, dtype=np.int32)


def prompt(length: int, sample_id: int = 0) -> PromptRow:
    return PromptRow(ids(length), sample_id, "text")


def test_rows_start_at_zero_and_fillers_copy_the_first_row() -> None:
    batch = collate_text([SftRow(ids(3), 1), SftRow(ids(2, 9), 2)], 4, length=4)
    expected = [[5, 6, 7, 0], [9, 10, 0, 0], [5, 6, 7, 0], [5, 6, 7, 0]]
    assert batch.tokens_BT.tolist() == expected
    assert batch.lengths_B.tolist() == [3, 2, 3, 3]
    assert batch.prompt_lengths_B.tolist() == [1, 2, 1, 1]
    assert batch.valid_B.tolist() == [1, 1, 0, 0]
    assert batch.tokens_BT.dtype == batch.lengths_B.dtype == np.int32
    assert batch.valid_B.dtype == np.float32


def test_pairs_have_one_shape() -> None:
    batch = collate_pairs([PairRow(ids(4), ids(2), 1)], 2, length=6)
    assert batch.chosen.tokens_BT.shape == batch.rejected.tokens_BT.shape == (2, 6)
    assert batch.chosen.lengths_B.tolist() == [4, 4]
    assert batch.rejected.lengths_B.tolist() == [2, 2]
    assert batch.margin_B.tolist() == [0, 0]


def test_margins_are_batched_as_numbers() -> None:
    rows = [PairRow(ids(4), ids(2), 1, margin) for margin in (0.5, -2.0)]
    batch = collate_pairs(rows, 3, length=6)
    assert batch.margin_B.tolist() == [0.5, -2.0, 0.5]
    assert batch.margin_B.dtype == np.float32


@pytest.mark.parametrize(("longest", "width"), [(1, 8), (8, 8), (9, 16), (32, 32)])
def test_prompts_take_the_smallest_bucket_that_holds_the_longest(longest: int, width: int) -> None:
    batch = collate_prompts([prompt(1, 3), prompt(longest, 4)], 3, buckets=(8, 16, 32))
    assert batch.tokens_BP.shape == (3, width)
    assert batch.lengths_B.tolist() == [1, longest, 1]
    assert batch.sample_ids_B.tolist() == [3, 4, 3]
    assert batch.valid_B.tolist() == [1, 1, 0]


def test_a_prompt_that_stands_in_a_batch_twice_has_an_id_for_each() -> None:
    """Its answers differ; in natural epochs, and for fillers, ids are those of the rows."""
    rows = [prompt(1, 3), prompt(1, 4), prompt(1, 3), prompt(1, 3)]
    batch = collate_prompts(rows, 5, buckets=(8,))
    assert batch.sample_ids_B.tolist() == [3, 4, 3 + COPIES_APART, 3 + 2 * COPIES_APART, 3]
    most = MAX_COPIES * [prompt(1, COPIES_APART - 1)]
    assert len({*collate_prompts(most, len(most), buckets=(8,)).sample_ids_B.tolist()}) == len(most)
    with pytest.raises(ValueError, match="a batch has one prompt 513 times, and a prompt gets at"):
        collate_prompts([*most, most[0]], 513, buckets=(8,))


def test_a_row_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"33 tokens fits none of the buckets \(8, 32\)"):
        collate_prompts([prompt(33)], 1, buckets=(8, 32))
    with pytest.raises(ValueError, match="5 tokens does not fit a batch of length 4"):
        collate_text([SftRow(ids(5), 1)], 1, length=4)


def test_one_length_holds_every_row() -> None:
    assert common_length([SftRow(ids(3), 1), SftRow(ids(17), 1)], 8) == 24
    assert common_length([PairRow(ids(3), ids(16), 1)], 8) == 16


def test_buckets_hold_about_as_many_rows_each_and_the_last_holds_all() -> None:
    rows = [prompt(n) for n in range(1, 101)]
    buckets = prompt_buckets(rows, max_buckets=4, pad_multiple=8)
    assert buckets == (32, 56, 80, 104)
    assert bucket_of(100, buckets) == 104
    assert prompt_buckets(rows[:3], max_buckets=4, pad_multiple=8) == (8,)
