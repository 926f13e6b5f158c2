"""The byte tokenizer: every text is `<bos>` and its bytes, and comes back."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rlhf_jax.data import byte_tokenizer as tok


@pytest.mark.parametrize(
    "text", ["", "abc", " a  b\n\t", "héllo 漢字 🦜", "<bos> and <pad><eos>", "\x00\x7f"]
)
def test_tokenizer_is_bos_and_the_bytes_and_round_trips(text: str) -> None:
    tokenizer = tok.byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids == [tok.BOS_ID, *text.encode()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == list(text.encode())


def test_tokenizer_knows_every_byte_and_its_special_tokens() -> None:
    tokenizer = tok.byte_tokenizer()
    assert len(tokenizer) == 259 <= tok.VOCAB_ROWS
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        256,
        257,
        258,
    )
    every_byte = bytes(range(256)).decode("latin-1").encode("latin-1")
    assert tokenizer.decode(list(every_byte)) == every_byte.decode("utf-8", errors="replace")
    assert tokenizer.decode([*b"ab", tok.EOS_ID, tok.PAD_ID], skip_special_tokens=True) == "ab"


def test_tokenizer_survives_a_round_trip_through_its_files(tmp_path: Path) -> None:
    original = tok.byte_tokenizer()
    original.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "Human: reverse abgk Assistant: kgba <eos> é"
    assert again(text)["input_ids"] == original(text)["input_ids"]
    assert again.decode(again(text)["input_ids"], skip_special_tokens=True) == text
    assert again.special_tokens_map == original.special_tokens_map
    assert again.padding_side == "right"
