"""Pieces of text join to the whole text, and no piece holds half of anything."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rlhf_jax.data.byte_tokenizer import EOS_ID, byte_tokenizer
from rlhf_jax.data.encoder import text_behind
from rlhf_jax.inference.pieces import BROKEN, Limit, common_length, text_pieces, trimmed, until

TEXT = "naïve 🙂 café — 日本語!"


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_come_whole_however_their_bytes_are_cut(size: int) -> None:
    tokenizer = byte_tokenizer()
    ids = [*TEXT.encode(), EOS_ID]
    chunks = [ids[n : n + size] for n in range(0, len(ids), size)]
    pieces = list(text_pieces(tokenizer, [65], chunks, (EOS_ID,)))
    assert "".join(pieces) == TEXT
    assert BROKEN not in "".join(pieces)
    assert len(pieces) > 4


def test_bytes_that_never_become_a_character_are_told_at_the_end() -> None:
    tokenizer = byte_tokenizer()
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = rng.integers(0, 256, 12).tolist()
        pieces = text_pieces(tokenizer, [65], [[i] for i in ids], (EOS_ID,))
        assert "".join(pieces) == text_behind([65], ids, tokenizer)


def test_what_follows_such_bytes_is_told_where_they_take_characters_back() -> None:
    """Llama 2's way: neighbouring bytes are characters together, or none of them is."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256}
    model = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    model.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model)
    ids = [256, *"é".encode(), 0xF0, 0x9F, 256, 256]
    assert text_behind([256], ids, tokenizer) == "a" + 4 * BROKEN + "aa"
    pieces = list(text_pieces(tokenizer, [256], [[i] for i in ids], ()))
    assert pieces == ["a", "é", 4 * BROKEN + "a", "a"]


@pytest.mark.parametrize("size", range(1, 9))
def test_an_answer_ends_where_the_next_turn_begins(size: int) -> None:
    def cut(text: str) -> list[str]:
        return list(until((text[n : n + size] for n in range(0, len(text), size)), "Human:"))

    assert "".join(cut("fine. Human: and Human: you")) == "fine. "
    assert "".join(cut("a HuHuman Hum")) == "a HuHuman Hum"
    assert all("H" not in piece for piece in cut("fine. Human: and"))


def test_nothing_is_read_behind_the_end() -> None:
    def pieces():
        yield "a Human:"
        raise AssertionError("read on")

    assert list(until(pieces(), "Human:")) == ["a "]


@pytest.mark.parametrize("size", range(1, 6))
def test_white_space_around_an_answer_is_left_out(size: int) -> None:
    for text in ("  \n a  b\n\nc \n ", "   ", "", "a", " a"):
        pieces = list(trimmed(text[n : n + size] for n in range(0, len(text), size)))
        assert "".join(pieces) == text.strip()
        assert all(pieces)


@pytest.mark.parametrize(
    ("chunks", "reached"),
    [
        ([[5, 6], [7, 8]], True),
        ([[5, 6], [7, EOS_ID]], False),
        ([[5, 6], [7]], False),
        ([[5, EOS_ID]], False),
    ],
)
def test_an_answer_is_cut_off_where_it_has_no_end(chunks: list[list[int]], reached: bool) -> None:
    limit = Limit(4, (EOS_ID,))
    assert list(limit.watch(chunks)) == chunks
    assert limit.reached == reached
    next(limit.watch(chunks))
    assert not limit.reached, "nobody waited for the end"


def test_common_length() -> None:
    for first, second, want in [("abc", "abX", 2), ("", "a", 0), ("ab", "abc", 2), ("ab", "ab", 2)]:
        assert common_length([*map(ord, first)], [*map(ord, second)]) == want
