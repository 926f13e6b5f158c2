"""A conversation is written as the training data write it, and fits its window."""

import json

import pytest
from transformers import AutoTokenizer

from rlhf_jax.data import world
from rlhf_jax.data.byte_tokenizer import byte_tokenizer
from rlhf_jax.data.tokenize import tokenize_prompts
from rlhf_jax.inference.conversation import (
    TURN_FORMAT,
    Conversation,
    Turn,
    by_template,
    by_turns,
)


def test_a_question_has_the_ids_of_the_quickstart_s_prompts() -> None:
    records = world.prompt_records("eval")[:12]
    rows, _ = tokenize_prompts(records, byte_tokenizer(), max_length=64, overlong="drop")
    encode = by_turns(byte_tokenizer(), TURN_FORMAT).encode
    for row in rows:
        question = row.prompt.removeprefix("Human: ").removesuffix(" Assistant:")
        assert encode([Turn(question)], "") == row.tokens.tolist()
        assert encode([Turn(row.prompt)], "") == row.tokens.tolist(), (
            "written in full it is the same"
        )


@pytest.mark.parametrize(
    ("turn_format", "gap"),
    [
        ("Human: {} Assistant:", " "),
        ("Human: {}\nAssistant:", "\n"),
        ("\n\nHuman: {}\n\nAssistant:", ""),
    ],
)
def test_turns_stand_behind_each_other(turn_format: str, gap: str) -> None:
    """What stands between them the format says itself, or it is what stands before an answer."""
    tokenizer = byte_tokenizer()
    form = by_turns(tokenizer, turn_format)
    first, second = (turn_format.replace("{}", question) for question in "ac")
    turns, text = [Turn("a", " b\n"), Turn("c")], f"{first} b{gap}{second}"
    assert form.encode(turns, "") == tokenizer.encode(text)
    assert form.encode(turns, "Be kind.") == tokenizer.encode("Be kind." + gap + text)
    assert form.next_turn == "Human:"


def test_a_question_written_as_a_transcript_is_taken_as_it_is() -> None:
    encode = by_turns(byte_tokenizer(), "\n\nHuman: {}\n\nAssistant:").encode
    text = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    assert encode([Turn(text)], "") == byte_tokenizer().encode(text)


@pytest.mark.parametrize("turn_format", ["{}\n\n", "\n\n{}", " {} "])
def test_white_space_around_a_question_is_a_format_too(turn_format: str) -> None:
    encode, text = by_turns(byte_tokenizer(), turn_format).encode, turn_format.format("hello")
    assert encode([Turn("hello")], "") == byte_tokenizer().encode(text)
    assert encode([Turn(text)], "") == byte_tokenizer().encode(text)


def test_a_format_needs_one_place_for_the_question() -> None:
    for turn_format in ("Human:", "{} {}", ""):
        with pytest.raises(ValueError, match="must have one {}"):
            by_turns(byte_tokenizer(), turn_format)


def conversation(room: int, **options) -> Conversation:
    """A letter is a token."""
    return Conversation(
        lambda turns, system: [ord(c) for part in (system, *map(said, turns)) for c in part],
        room,
        **options,
    )


def said(turn: Turn) -> str:
    return turn.question + (turn.answer or "")


def text(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_the_oldest_turns_go_first_and_whole() -> None:
    talk = conversation(10)
    for question, answer, prompt, forgotten in [
        ("aa", "AA", "aa", 0),
        ("bb", "BB", "aaAAbb", 0),
        ("cc", "CC", "aaAAbbBBcc", 0),
        ("dd", "DD", "bbBBccCCdd", 1),
        ("eeeeeeeee", "E", "eeeeeeeee", 4),
    ]:
        assert text(talk.prompt(question)) == prompt
        assert talk.forgotten == forgotten
        talk.record(question, answer)


def test_a_question_that_does_not_fit_alone_is_an_error() -> None:
    with pytest.raises(ValueError, match="that is 11 tokens, there is room for 10: shorten it"):
        conversation(10).prompt("a" * 11)


def test_such_a_question_forgets_nothing() -> None:
    talk = conversation(10)
    talk.record("a", "A")
    with pytest.raises(ValueError, match="shorten it"):
        talk.prompt("b" * 11)
    assert text(talk.prompt("b")) == "aAb"


def test_instructions_stay_in_front_whatever_is_forgotten() -> None:
    talk = conversation(8)
    talk.system = "ss"
    talk.record("aa", "AA")
    assert text(talk.prompt("bb")) == "ssaaAAbb"
    assert text(talk.prompt("bbb")) == "ssbbb"
    talk.clear()
    assert text(talk.prompt("b")) == "ssb"
    talk.system = ""
    assert text(talk.prompt("b")) == "b"


def test_turns_can_stand_alone_and_be_cleared() -> None:
    alone, talk = conversation(10, keeps_history=False), conversation(10)
    for each in (alone, talk):
        each.prompt("a")
        each.record("a", "A")
    assert text(alone.prompt("b")) == "b"
    assert text(talk.prompt("b")) == "aAb"
    talk.clear()
    assert text(talk.prompt("b")) == "b"


def test_a_chat_template_gives_the_ids_of_transformers(shared_data) -> None:
    directory = shared_data("smollm2-135m-instruct")
    golden = json.loads((directory / "golden.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    encode = by_template(tokenizer).encode
    assert encode([Turn("What is the capital of France?")], "") == golden["chat_prompt_ids"]
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    want = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert encode([Turn("Hi")], "Be kind.") == want["input_ids"]


def test_a_template_that_refuses_instructions_is_explained() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    encode = by_template(tokenizer).encode
    assert encode([Turn("a")], "") == [97]
    with pytest.raises(ValueError, match="template cannot be run: no system here"):
        encode([Turn("a")], "Be kind.")
