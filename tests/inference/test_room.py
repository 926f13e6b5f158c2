"""Rows that are answered at once follow from the free memory; the memory itself is made up."""

import logging
import re

import pytest

import rlhf_jax
from rlhf_jax.engine.memory import Rows
from rlhf_jax.inference import room

PROMPTS = [[1, 10 + n] for n in range(12)]


def asked(model: rlhf_jax.Model, rows: int) -> Rows:
    return Rows(rows, 16 + 8, 8)


def test_devices_that_do_not_say_are_taken_to_have_room(llama) -> None:
    assert room.free_bytes() is None
    assert room.rows_that_fit(llama._memory, asked(llama, 2**20)) == 2**20


@pytest.mark.parametrize(("wanted", "found"), [(8, 8), (64, 16), (16, 16), (27, 14)])
def test_as_many_rows_as_fit(llama, monkeypatch, caplog, wanted: int, found: int) -> None:
    """Room for 20 rows: halves until one fits. What fits is not talked about."""
    free = llama._memory.generating(asked(llama, 20))
    monkeypatch.setattr(room, "free_bytes", lambda: free)
    with caplog.at_level(logging.WARNING):
        assert room.rows_that_fit(llama._memory, asked(llama, wanted)) == found
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (wanted != found)
    line = rf"{wanted} rows at once need .* {found} are answered at once"
    assert all(re.search(line, text) for text in said)


def test_fewer_rows_give_the_same_answers(llama, monkeypatch) -> None:
    def answers() -> list[list[int]]:
        given = llama.generate(PROMPTS, max_new_tokens=8, stop_ids=list(range(4, 20)), seed=3)
        return [answer.tokens for answer in given]

    want = answers()
    free = llama._memory.generating(asked(llama, 5))
    monkeypatch.setattr(room, "free_bytes", lambda: free)
    batches: list[int] = []
    monkeypatch.setattr(
        rlhf_jax.inference.session, "dealt",
        lambda count, shares: batches.append(count) or range(count),
    )  # fmt: skip
    assert answers() == want
    assert batches == [4 * rlhf_jax.inference.session.TURNS]


def test_what_cannot_fit_is_refused_before_it_compiles(llama, monkeypatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"answers of 8 tokens to prompts of 16 need about"):
        llama.generate(PROMPTS, max_new_tokens=8)
