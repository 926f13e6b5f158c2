"""Messages in every form in which they are written down, and what is no message."""

import re

import pytest

from rlhf_jax.data.conversations import read_text
from rlhf_jax.data.records import Message

TALK = (Message("system", "s"), Message("user", "Hi"), Message("assistant", "Hello"))


@pytest.mark.parametrize(
    "value",
    [
        [{"role": role, "content": content, "weight": 1} for role, content in TALK],
        [
            {"from": "system", "value": "s"},
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Hello"},
        ],
        # How `datasets` reads a column of the old type Sequence({...}).
        {"role": [role for role, _ in TALK], "content": [content for _, content in TALK]},
    ],
)
def test_messages_are_read_in_every_form(value: object) -> None:
    assert read_text(value, "messages", "x") == TALK


def test_text_is_text_and_null_is_null() -> None:
    assert read_text("Hi", "prompt", "x") == "Hi"
    assert read_text(None, "prompt", "x") is None
    assert read_text([{"role": "user", "content": None}], "prompt", "x") is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "rows, line 2: column 'prompt' holds a int, not text or messages"),
        ([], "column 'prompt' holds an empty list"),
        ({"role": "user", "content": "Hi"}, "holds an object with role, content, not text or"),
        ({"role": ["user"], "content": ["Hi", "Ho"]}, "holds an object with role, content, not"),
        ("Hi \ud83d", r"column 'prompt': no Unicode text: half of a surrogate pair, '\ud83d'"),
        ([{"role": "user", "content": "\ude00"}], "message 0: no Unicode text"),
        (["Hi"], "column 'prompt', message 0: a str, not a message: it needs role and content"),
        ([{"role": "user"}], "message 0: an object with role, not a message"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 0: role or content is not"),
    ],
)
def test_what_is_neither_text_nor_messages_is_an_error(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_text(value, "prompt", "rows, line 2")
