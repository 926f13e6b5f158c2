"""Token rows: the prompt is a prefix, EOS is one id, and nothing leaves without being counted."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from rlhf_jax.data.byte_tokenizer import BOS_ID, EOS_ID, byte_tokenizer
from rlhf_jax.data.records import Record
from rlhf_jax.data.tokenize import (
    TokenizeReport,
    tokenize_pairs,
    tokenize_prompts,
    tokenize_sft,
)

LIMIT = {"max_length": 12, "overlong": "drop"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def marking_tokenizer(template: str = "<s> $A") -> PreTrainedTokenizerFast:
    """As SentencePiece does: spaces are ▁ and every text gets one in front."""
    letters = [chr(n) for n in range(0x61, 0x7B)]
    vocab = {t: n for n, t in enumerate(["<s>", "</s>", "<unk>", "▁", "\n", *letters])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=template, pair=f"{template} $B", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def utf8(text: str) -> list[int]:
    return list(text.encode())


def test_a_row_is_bos_prompt_answer_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    (row,), report = tokenize_sft([Record("aß", " b")], tokenizer, **LIMIT)
    assert row.tokens.tolist() == [BOS_ID, *utf8("aß"), *utf8(" b"), EOS_ID]
    assert row.tokens.dtype == np.int32
    assert row.prompt_length == 4
    assert report == TokenizeReport(kept=1, dropped=0, cut=0, empty=0, equal=0, max_length=12)


@pytest.mark.parametrize("kind", ["bytes", "marking"])
def test_a_prompt_has_the_same_ids_in_all_three_stages(kind: str) -> None:
    tokenizer = byte_tokenizer() if kind == "bytes" else marking_tokenizer()
    records = [Record("why", " so", " no"), Record("who is", "\nit", "he")]
    limit = {"max_length": 99, "overlong": "drop"}
    sft, _ = tokenize_sft(records, tokenizer, **limit)
    pairs, _ = tokenize_pairs(records, tokenizer, **limit)
    asked, _ = tokenize_prompts(records, tokenizer, **limit)
    for row, pair, prompt in zip(sft, pairs, asked, strict=True):
        ids = prompt.tokens.tolist()
        assert row.prompt_length == pair.prompt_length == len(ids)
        for tokens in (row.tokens, pair.chosen, pair.rejected):
            assert tokens[: len(ids)].tolist() == ids
        np.testing.assert_array_equal(row.tokens, pair.chosen)


@pytest.mark.parametrize("template", ["<s> $A", "$A", "<s> $A </s>"])
def test_what_a_tokenizer_puts_behind_a_text_never_ends_a_prompt(template: str) -> None:
    tokenizer = marking_tokenizer(template)
    (row,), _ = tokenize_prompts([Record("ab")], tokenizer, **LIMIT)
    bos = [0] if template.startswith("<s>") else []
    assert row.tokens.tolist() == [*bos, *map(tokenizer.convert_tokens_to_ids, "▁ab")]


def test_a_mark_of_the_begin_stands_before_the_prompt_alone() -> None:
    tokenizer = marking_tokenizer()
    records = [Record("ab", " cd"), Record("", "cd")]
    rows, _ = tokenize_sft(records, tokenizer, **LIMIT)
    tokens = [tokenizer.convert_ids_to_tokens(row.tokens.tolist()) for row in rows]
    # The same pieces as the tokenizer gives for the whole text "ab cd".
    assert tokens[0] == ["<s>", *tokenizer.tokenize("ab cd"), "</s>"]
    assert tokens[0] == ["<s>", "▁", "a", "b", "▁", "c", "d", "</s>"]
    assert tokens[1] == ["<s>", "▁", "c", "d", "</s>"]


def test_overlong_rows_are_dropped_or_lose_their_end(tokenizer: PreTrainedTokenizerFast) -> None:
    records = [Record("abc", "d" * 7), Record("abc", "d" * 8), Record("a" * 11, "d")]
    rows, report = tokenize_sft(records, tokenizer, **LIMIT)
    assert [len(row.tokens) for row in rows] == [12]
    assert (report.kept, report.dropped, report.cut) == (1, 2, 0)
    rows, report = tokenize_sft(records, tokenizer, max_length=12, overlong="cut")
    assert rows[1].tokens.tolist() == [BOS_ID, *utf8("abc" + "d" * 8)]
    # The last record's prompt fills the row: there is no answer to learn.
    assert (report.kept, report.dropped, report.cut) == (2, 1, 1)
    assert str(report) == "2 rows, 1 of them cut to 12 tokens, 1 dropped (over 12 tokens)"


def test_the_longer_answer_decides_over_a_pair(tokenizer: PreTrainedTokenizerFast) -> None:
    records = [Record("ab", "yes", "n" * 20), Record("ab", "yes", "no")]
    rows, report = tokenize_pairs(records, tokenizer, **LIMIT)
    assert (len(rows), report.dropped) == (1, 1)
    rows, report = tokenize_pairs(records, tokenizer, max_length=12, overlong="cut")
    assert (report.kept, report.cut) == (2, 1)
    assert rows[0].chosen.tolist() == [BOS_ID, *utf8("abyes"), EOS_ID]
    assert rows[0].rejected.tolist() == [BOS_ID, *utf8("ab" + "n" * 9)]


def test_pairs_whose_answers_are_or_become_equal_are_counted(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    records = [Record("a", "b", "c"), Record("a", "b", "b"), Record("a", "n" * 20, "n" * 30)]
    _, report = tokenize_pairs(records, tokenizer, max_length=12, overlong="cut")
    assert (report.kept, report.equal, report.cut, report.dropped) == (1, 2, 0, 0)


def test_prompts_are_cut_at_the_front_behind_bos(tokenizer: PreTrainedTokenizerFast) -> None:
    records = [Record("0123456789abcdef", "ref"), Record("ok")]
    rows, report = tokenize_prompts(records, tokenizer, max_length=6, overlong="cut")
    assert rows[0].tokens.tolist() == [BOS_ID, *utf8("bcdef")]
    assert rows[0].prompt == "0123456789abcdef"
    assert (report.kept, report.cut) == (2, 1)
    rows, report = tokenize_prompts(records, tokenizer, max_length=6, overlong="drop")
    # The number stays that of the record, so randomness does not depend on what was dropped.
    assert [row.sample_id for row in rows] == [1]
    assert (report.kept, report.dropped) == (1, 1)


def test_text_that_became_the_end_token_inside_an_answer_is_counted() -> None:
    """Not at the end of an answer, in a prompt, or where a chat template wrote it."""
    tokenizer = marking_tokenizer()
    ends = tokenizer.eos_token_id
    inside, behind = Record("ab", "a</s>b", "c"), Record("a</s>", "b</s>", "c")
    templated = Record("ab", "a</s>b</s>", "c", templated=True)
    for records, count in (([inside, behind], 1), ([behind, templated], 0), ([inside] * 2, 2)):
        rows, report = tokenize_sft(records, tokenizer, **LIMIT)
        assert report.ending_within == count
        assert sum(ends in row.tokens[row.prompt_length : -2] for row in rows) >= count
    assert str(report) == (
        "2 rows, 2 of them with text inside an answer that became the end token (training stops "
        "and goes on behind it)"
    )
    other = Record("ab", "c", "a</s>b")
    equal = Record("ab", "a</s>b", "a</s>b")
    _, pairs = tokenize_pairs([other, equal, behind], tokenizer, **LIMIT)
    assert (pairs.kept, pairs.equal, pairs.ending_within) == (2, 1, 1)
    assert tokenize_prompts([inside, behind], tokenizer, **LIMIT)[1].ending_within == 0
    stop_ids = [tokenizer.get_vocab()["x"]]
    _, stops = tokenize_sft([Record("a", "bxc")], tokenizer, **LIMIT, stop_ids=stop_ids)
    assert stops.ending_within == 1


def test_empty_answers_and_prompts_are_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    _, report = tokenize_sft([Record("a", ""), Record("a", "b")], tokenizer, **LIMIT)
    assert report.empty == 1
    pairs = [Record("a", "b", ""), Record("a", "b", "c")]
    assert tokenize_pairs(pairs, tokenizer, **LIMIT)[1].empty == 1
    assert tokenize_prompts([Record(""), Record("a")], tokenizer, **LIMIT)[1].empty == 1


def test_where_no_row_is_left_the_report_says_why(tokenizer: PreTrainedTokenizerFast) -> None:
    rows, report = tokenize_sft([Record("a" * 20, "b")], tokenizer, **LIMIT)
    assert (rows, str(report)) == ([], "0 rows, 1 dropped (over 12 tokens)")


def test_a_tokenizer_without_eos_is_an_error() -> None:
    tokenizer = marking_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="EOS is None"):
        tokenize_sft([Record("a", "b")], tokenizer, **LIMIT)


def test_blocks_do_not_show(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [Record(f"p{n}", f" {n}", " x") for n in range(7)]
    whole = [row.chosen.tolist() for row in tokenize_pairs(records, tokenizer, **LIMIT)[0]]
    monkeypatch.setattr("rlhf_jax.data.tokenize.BLOCK", 3)
    monkeypatch.setattr("rlhf_jax.data.encoder.BLOCK", 2)
    assert whole == [row.chosen.tolist() for row in tokenize_pairs(records, tokenizer, **LIMIT)[0]]
