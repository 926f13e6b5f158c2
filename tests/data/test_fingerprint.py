"""Rows of every kind have a name, which other tokens, another order or another number change."""

from typing import Any

import numpy as np
import pytest

from rlhf_jax.data.fingerprint import fingerprint
from rlhf_jax.data.tokenize import PairRow, PromptRow, SftRow


def sft(*tokens: int) -> SftRow:
    return SftRow(np.array(tokens, np.int32), 1)


def chosen(*tokens: int) -> PairRow:
    return PairRow(np.array(tokens, np.int32), np.array([9], np.int32), 1)


def rejected(*tokens: int) -> PairRow:
    return PairRow(np.array([9], np.int32), np.array(tokens, np.int32), 1)


def prompt(*tokens: int) -> PromptRow:
    return PromptRow(np.array(tokens, np.int32), 0, "")


def test_it_is_the_same_for_whoever_asks() -> None:
    assert fingerprint([sft(1, 2), sft(3)]) == "2 rows (checksum 24535d06)"


def test_all_that_training_reads_is_in_it() -> None:
    tokens = np.array([1, 2, 3], np.int32)
    rows = [
        [SftRow(tokens, 1)], [SftRow(tokens, 2)],
        [PairRow(tokens, tokens, 1)], [PairRow(tokens, tokens, 2)],
        [PairRow(tokens, tokens, 1, margin=1.0)],
        [PromptRow(tokens, 0, "")], [PromptRow(tokens, 0, "", {"answer": "3"})],
        [sft(1), sft(2, 3)], [sft(1, 2), sft(3)],
    ]  # fmt: skip
    assert len({*map(fingerprint, rows)}) == len(rows)


@pytest.mark.parametrize("row", [sft, chosen, rejected, prompt])
def test_other_rows_have_another_one(row: Any) -> None:
    first = fingerprint([row(1, 2), row(3, 4)])
    assert first == fingerprint([row(1, 2), row(3, 4)])
    others = [
        [row(1, 2)], [row(3, 4), row(1, 2)], [row(1, 2), row(3, 5)], [row(1, 2), row(3, 4, 5)],
    ]  # fmt: skip
    assert len({first, *map(fingerprint, others)}) == 5
