"""Rows come in few shapes that hold them."""

import pytest

from rlhf_jax.inference.rows import batch_rows, bucket, chunks


def test_buckets_hold_every_length_up_to_the_limit_and_are_few() -> None:
    buckets = {length: bucket(length, 100) for length in range(1, 101)}
    assert all(length <= size <= 100 for length, size in buckets.items())
    assert set(buckets.values()) == {16, 32, 64, 100}


@pytest.mark.parametrize("divisor", [1, 3, 4])
@pytest.mark.parametrize("limit", [1, 8, 32])
def test_batches_divide_over_the_mesh_and_stay_below_the_limit(divisor: int, limit: int) -> None:
    for count in range(1, 70):
        size = batch_rows(count, divisor, limit)
        assert size % divisor == 0
        assert size <= max(limit, divisor)
        assert size >= count or size * 2 > limit
        parts = list(chunks(range(count), size))
        assert [row for part in parts for row in part] == list(range(count))
        assert all(len(part) <= size for part in parts)
