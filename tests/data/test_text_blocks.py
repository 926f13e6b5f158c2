"""Blocks of running text: every token once and in order, but for those behind the last block."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from rlhf_jax.data.byte_tokenizer import BOS_ID, EOS_ID, byte_tokenizer
from rlhf_jax.data.text_blocks import load_text_blocks


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def write(path: Path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def test_blocks_are_the_documents_in_order(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    paths = [write(tmp_path / "a.jsonl", "one", "ü"), write(tmp_path / "b.jsonl", "three")]
    blocks, report = load_text_blocks(paths, tokenizer, 5)
    stream = [token for text in ("one", "ü", "three") for token in (BOS_ID, *text.encode(), EOS_ID)]
    assert [token for block in blocks for token in block.tolist()] == stream[:15]
    assert {(len(block), str(block.dtype)) for block in blocks} == {(5, "int32")}
    assert (report.documents, report.blocks, report.left_over) == (3, 3, len(stream) - 15)
    assert "3 blocks of 5 tokens out of 3 documents, 1 tokens left over" in str(report)


def test_text_that_makes_no_block_is_an_error(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write(tmp_path / "a.jsonl", "one")
    with pytest.raises(ValueError, match=r"a\.jsonl: 5 tokens make no block of 6"):
        load_text_blocks([path], tokenizer, 6)


def test_conversations_are_no_running_text(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk}))
    with pytest.raises(ValueError, match=r"a\.jsonl: its rows are conversations; running text"):
        load_text_blocks([str(tmp_path / "a.jsonl")], tokenizer, 6)
