"""How training data write a question: read off their prompts."""

import pytest

from rlhf_jax.data.records import Dialogue, Message, Record
from rlhf_jax.data.turn_format import (
    BY_TEMPLATE,
    common_format,
    trained_format,
    transcript_format,
)

HH = "\n\nHuman: {}\n\nAssistant:"
QUESTIONS = ("Is the kettle in stock?", "Is the lamp in stock?", "Is it in stock?")
DIALOGUE = Dialogue((Message("user", "a"),))


@pytest.mark.parametrize(
    ("prompt", "turn_format"),
    [
        ("Human: start of oukn Assistant:", "Human: {} Assistant:"),
        ("\n\nHuman: a\nb\n\nAssistant: c\n\nHuman: d\n\nAssistant:", HH),
        ("Be kind.\n\nHuman: a\n\nAssistant:", HH),
        ("<|im_start|>user\nHuman: x<|im_end|>", None),
        ("Once upon", None),
    ],
)
def test_a_transcript_shows_how_questions_are_written(prompt, turn_format) -> None:
    assert transcript_format(prompt) == turn_format


@pytest.mark.parametrize(
    "turn_format",
    [
        "{}",
        "Q: {}\nA:",
        "Question: {} Answer:",
        "### Instruction:\n{}\n\n### Response:\n",
        "[INST] {} [/INST]",
        "<|user|>{}<|end|>\n<|assistant|>\n",
        "SUBREDDIT: r/{}\n\nTL;DR:",
    ],
)
def test_what_stands_around_every_question_is_found(turn_format: str) -> None:
    """Words that all questions share are no part of it, marks are all of it."""
    found = common_format(turn_format.replace("{}", question) for question in QUESTIONS)
    assert found == turn_format.replace("r/", "")


def test_one_question_tells_nothing_of_its_marks() -> None:
    assert common_format(["Q: a\nA:"] * 3) == "{}"
    assert common_format(["", "a"]) == "{}"


def test_a_place_in_the_marks_would_be_two() -> None:
    assert common_format(["{}: a", "{}: b"]) == "{}"


def test_most_examples_decide() -> None:
    transcripts = [Record(HH.replace("{}", question)) for question in QUESTIONS]
    questions = [Record(f"Q: {question}\nA:") for question in QUESTIONS]
    assert trained_format([*transcripts, *questions[:2]], "template") == HH
    assert trained_format([*transcripts[:2], *questions], "template") == "Q: {}\nA:"
    assert trained_format([*transcripts, DIALOGUE], "template") == HH
    assert trained_format([transcripts[0], DIALOGUE, DIALOGUE], "template") == BY_TEMPLATE


def test_conversations_have_the_form_that_they_are_written_in() -> None:
    assert trained_format([DIALOGUE], "template") == BY_TEMPLATE
    assert trained_format([DIALOGUE], "human_assistant") == HH


def test_text_without_prompts_says_nothing() -> None:
    assert trained_format([Record("", "Once upon a time")], "template") is None
