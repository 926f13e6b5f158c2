"""Records made in code."""

import pytest

from rlhf_jax.data.records import Record, require_stage


def test_records_made_in_code_are_checked_against_the_stage() -> None:
    records = [Record("p", "a", "b"), Record("p", "a")]
    require_stage(records, "sft", "made")
    require_stage(records, "ppo", "made")
    with pytest.raises(ValueError, match="made: 1 of 2 records have no `rejected`"):
        require_stage(records, "reward", "made")
