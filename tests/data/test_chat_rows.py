"""Conversations as token rows: the template's own tokens, once each, and whole turns.

The truth is the template's text of the whole conversation, tokenised by itself.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlhf_jax.data.byte_tokenizer import BOS_ID, EOS_ID, byte_tokenizer
from rlhf_jax.data.records import Dialogue, Message, Record
from rlhf_jax.data.render import Renderer
from rlhf_jax.data.tokenize import tokenize_pairs, tokenize_prompts, tokenize_sft

LIMIT = {"max_length": 999, "overlong": "drop"}
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def turns(*contents: str) -> tuple[Message, ...]:
    return tuple(Message(("user", "assistant")[n % 2], text) for n, text in enumerate(contents))


TALK = turns("Hi", "Hello", "Why?")
GOOD, BAD = (Message("assistant", "Because."),), (Message("assistant", "No."),)


@pytest.fixture(scope="module")
def smollm(shared_data: Callable[[str], Path]) -> PreTrainedTokenizerFast:
    folder = shared_data("smollm2-135m-instruct")
    return AutoTokenizer.from_pretrained(folder, eos_token="<|im_end|>")


def with_template(template: str | None, special: bool = False) -> PreTrainedTokenizerFast:
    """The byte tokenizer with a chat template; `special`: EOS in a text is one token."""
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = not special
    tokenizer.chat_template = template
    return tokenizer


def test_a_row_is_what_the_template_writes_up_to_its_stop_token(
    smollm: PreTrainedTokenizerFast,
) -> None:
    whole = smollm.apply_chat_template(
        [message._asdict() for message in (*TALK, *GOOD)], tokenize=False
    )
    ids = smollm(str(whole), add_special_tokens=False)["input_ids"]
    (row,), _ = tokenize_sft([Dialogue(TALK, GOOD)], smollm, **LIMIT)
    # The line break behind <|im_end|> is never sampled.
    assert row.tokens.tolist() == ids[:-1]
    assert smollm.decode(row.tokens[row.prompt_length :]) == "Because.<|im_end|>"
    assert row.tokens.tolist().count(smollm.eos_token_id) == 5, "system, three turns, the answer"


def test_prompts_are_equal_in_all_stages_and_end_where_the_model_answers(
    smollm: PreTrainedTokenizerFast,
) -> None:
    dialogue = Dialogue(TALK, GOOD, BAD, margin=2.0, columns={"level": 3})
    (sft,), _ = tokenize_sft([dialogue], smollm, **LIMIT)
    (pair,), _ = tokenize_pairs([dialogue], smollm, **LIMIT)
    (prompt,), _ = tokenize_prompts([dialogue], smollm, **LIMIT)
    size = len(prompt.tokens)
    assert sft.prompt_length == pair.prompt_length == size
    for tokens in (sft.tokens, pair.chosen, pair.rejected):
        assert tokens[:size].tolist() == prompt.tokens.tolist()
    assert prompt.prompt.endswith("user\nWhy?<|im_end|>\n<|im_start|>assistant\n")
    assert (pair.margin, dict(prompt.columns)) == (2.0, {"level": 3})


def test_a_template_whose_turns_end_in_no_stop_token_gets_eos() -> None:
    tokenizer = with_template(CHATML)
    (row,), _ = tokenize_sft([Dialogue(TALK, GOOD)], tokenizer, **LIMIT)
    text = "<user>Hi<end>\n<assistant>Hello<end>\n<user>Why?<end>\n<assistant>Because.<end>\n"
    assert row.tokens.tolist() == [*text.encode(), EOS_ID]
    assert row.prompt_length == text.index("Because.")


def test_the_models_other_stop_tokens_end_an_answer_too() -> None:
    tokenizer = with_template(CHATML.replace("<end>\n", "#"))
    (row,), _ = tokenize_sft([Dialogue(TALK, GOOD)], tokenizer, **LIMIT, stop_ids=(ord("#"),))
    assert bytes(row.tokens[row.prompt_length :].tolist()) == b"Because.#"


def test_bos_is_the_templates_own() -> None:
    bos = with_template("<bos>" + CHATML.replace("<end>", "<eos>"), special=True)
    (row,), _ = tokenize_prompts([Dialogue(turns("Why?"))], bos, **LIMIT)
    assert row.tokens.tolist() == [BOS_ID, *b"<user>Why?", EOS_ID, *b"\n<assistant>"]
    (cut,), _ = tokenize_prompts([Dialogue(turns("Why?"))], bos, max_length=5, overlong="cut")
    assert cut.tokens.tolist() == [BOS_ID, *b"ant>"]
    (row,), _ = tokenize_prompts([Dialogue(turns("Why?"))], with_template(CHATML), **LIMIT)
    assert row.tokens.tolist() == [*b"<user>Why?<end>\n<assistant>"]
    (text,), _ = tokenize_prompts([Record("Why?")], bos, **LIMIT)
    assert text.tokens.tolist() == [BOS_ID, *b"Why?"]


def test_a_template_that_changes_the_prompt_behind_an_answer_is_an_error() -> None:
    thinking = CHATML.replace("<assistant>{% endif", "<assistant><think>{% endif")
    with pytest.raises(ValueError, match=r"where it asks .*<think>.*stands behind it .*Because"):
        tokenize_sft([Dialogue(TALK, GOOD)], with_template(thinking), **LIMIT)


def test_what_a_template_refuses_is_dropped_and_counted() -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    told = (Message("system", "Be kind."), *TALK)
    rows, report = tokenize_sft(
        [Dialogue(told, GOOD), Dialogue(TALK, GOOD)], with_template(refusing + CHATML), **LIMIT
    )
    assert len(rows) == 1
    assert str(report) == "1 rows, 1 dropped (the chat template refuses it: no system)"


def test_a_tokenizer_without_template_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"no chat template: use a model.*chat-format=human_ass"):
        tokenize_prompts([Dialogue(TALK)], with_template(None), **LIMIT)


def test_transcripts_are_an_option_that_needs_no_template() -> None:
    told = (Message("system", "Be kind."), *TALK)
    (row,), _ = tokenize_sft(
        [Dialogue(told, GOOD)], with_template(None), **LIMIT, chat_format="human_assistant"
    )
    prompt = b"Be kind.\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant:"
    assert row.tokens.tolist() == [BOS_ID, *prompt, *b" Because.", EOS_ID]
    assert row.prompt_length == 1 + len(prompt)
    used = (*TALK[:2], Message("tool", "42"), *TALK[2:])
    rows, report = tokenize_sft(
        [Dialogue(used, GOOD)], with_template(CHATML), **LIMIT, chat_format="human_assistant"
    )
    assert (rows, dict(report.refused)) == ([], {"a transcript has no turn of tool": 1})


LONG = turns("one", "ONE", "two", "TWO", "three")
WRITTEN = "\n\nHuman: one\n\nAssistant: ONE\n\nHuman: two\n\nAssistant: TWO\n\nHuman: three"


@pytest.mark.parametrize(
    ("room", "kept"), [(113, "one"), (112, "two"), (78, "two"), (77, "three"), (43, "three")]
)
def test_the_oldest_turns_of_a_conversation_go_whole(room: int, kept: str) -> None:
    told = (Message("system", "s"), *LONG)
    limit = {"max_length": room, "overlong": "cut_turns"}
    (row,), report = tokenize_prompts([Dialogue(told)], with_template(CHATML), **limit)
    whole = (
        "<user>one<end>\n<assistant>ONE<end>\n<user>two<end>\n<assistant>TWO<end>\n"
        "<user>three<end>\n<assistant>"
    )
    expected = "<system>s<end>\n" + whole[whole.index(f"<user>{kept}") :]
    assert bytes(row.tokens.tolist()).decode() == row.prompt == expected
    assert row.messages is not None
    again = Renderer(with_template(CHATML), "template").record(Dialogue(row.messages), ())
    assert again.prompt == expected
    assert len(expected) <= room
    assert (report.cut_turns, report.dropped, report.cut) == (kept != "one", 0, 0)


@pytest.mark.parametrize(("room", "kept"), [(99, "one"), (60, "two"), (40, "three"), (20, None)])
def test_the_oldest_turns_of_a_transcript_go_whole(room: int, kept: str | None) -> None:
    record = Record(f"{WRITTEN}\n\nAssistant:", " yes", " n")
    rows, report = tokenize_pairs([record], byte_tokenizer(), max_length=room, overlong="cut_turns")
    if kept is None:
        assert (rows, report.dropped) == ([], 1)
        return
    (row,) = rows
    prompt = record.prompt[record.prompt.index(f"\n\nHuman: {kept}") :].encode()
    assert row.chosen.tolist() == [BOS_ID, *prompt, *b" yes", EOS_ID]
    assert row.rejected.tolist() == [BOS_ID, *prompt, *b" n", EOS_ID]
    assert len(row.chosen) <= room
    assert report.cut_turns == (kept != "one")


def test_the_report_counts_rows_without_their_oldest_turns() -> None:
    records = [Dialogue(LONG, GOOD), Dialogue(turns("a"), GOOD)]
    _, report = tokenize_sft(records, with_template(CHATML), max_length=80, overlong="cut_turns")
    assert str(report) == "2 rows, 1 of them without their oldest turns (over 80 tokens)"


def test_an_empty_answer_is_dropped(smollm: PreTrainedTokenizerFast) -> None:
    silent = Dialogue(TALK, (Message("assistant", ""),))
    rows, report = tokenize_sft([silent], smollm, **LIMIT)
    assert (rows, report.empty) == ([], 1)
