"""Shapes of rows, and which stage takes which."""

import pytest

from rlhf_jax.data.records import Dialogue, Example, Message, Record, Stage
from rlhf_jax.data.shapes import SHAPES, shape_for, shapes_of

# What docs/data.md promises, written down a second time.
CHATS = {"messages", "conversations", "conversation"}
TAKES: dict[Stage, set[str]] = {
    "sft": {"prompt+chosen+rejected", "prompt+completion", "chosen+rejected", "text", *CHATS},
    "reward": {"prompt+chosen+rejected", "chosen+rejected"},
    "ppo": {"prompt+chosen+rejected", "prompt+completion", "chosen+rejected", "prompt", *CHATS},
}

ASK = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant:"


def transcripts(chosen: str, rejected: str) -> Example | str:
    return shape_for(["chosen", "rejected"], "reward", "x").convert(
        {"chosen": chosen, "rejected": rejected}
    )


@pytest.mark.parametrize("stage", TAKES)
def test_a_stage_takes_the_documented_shapes(stage: Stage) -> None:
    assert {shape.name for shape in shapes_of(stage)} == TAKES[stage]


@pytest.mark.parametrize("stage", TAKES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_shape_that_a_stage_cannot_use_is_an_error_naming_those_it_takes(
    shape, stage: Stage
) -> None:
    if shape.name in TAKES[stage]:
        assert shape_for(shape.columns, stage, "rows.jsonl") is shape
        return
    with pytest.raises(ValueError, match=r"rows\.jsonl: its rows are .* cannot use") as error:
        shape_for(shape.columns, stage, "rows.jsonl")
    assert all(name in str(error.value) for name in TAKES[stage])


def test_all_columns_of_rows_that_a_stage_cannot_use_are_named() -> None:
    with pytest.raises(ValueError, match=r"its rows are prompt \(with better, worse\), which"):
        shape_for(["prompt", "worse", "better"], "sft", "x")


def test_further_columns_are_ignored_and_the_richest_shape_that_fits_is_taken() -> None:
    columns = ["id", "prompt", "chosen", "rejected", "text"]
    assert shape_for(columns, "sft", "x").name == "prompt+chosen+rejected"
    assert shape_for(["prompt", "text"], "sft", "x").name == "text"
    assert shape_for(["prompt", "text"], "ppo", "x").name == "prompt"


def test_a_transcript_is_cut_at_the_last_assistant_turn() -> None:
    record = transcripts(f"{ASK} Because.\n", f"{ASK} No.")
    assert record == Record(ASK, chosen=" Because.\n", rejected=" No.")


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        (f"{ASK} a", f"{ASK} a", "answers are equal"),
        (f"{ASK} a", f"\n\nHuman: Other{ASK} b", "prompts differ"),
        ("no marker", f"{ASK} b", "no assistant turn"),
        (f"{ASK} b", "no marker", "no assistant turn"),
    ],
)
def test_transcripts_without_a_comparison_are_dropped_with_the_reason(
    chosen: str, rejected: str, reason: str
) -> None:
    assert transcripts(chosen, rejected) == reason


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is"),
        ("The sky is blue.", "The sky is black.", "The sky is"),
        ("one two", "one two three", "one"),
        ("a\nb", "a\nc", "a"),
        ("yes", "no", ""),
        ("blue", "black", ""),
        ("", "no", ""),
    ],
)
def test_texts_without_turns_share_the_words_that_both_begin_with(
    chosen: str, rejected: str, prompt: str
) -> None:
    record = transcripts(chosen, rejected)
    assert isinstance(record, Record)
    assert record.prompt == prompt
    assert record.chosen is not None
    assert record.rejected is not None
    assert (prompt + record.chosen, prompt + record.rejected) == (chosen, rejected)
    swapped = transcripts(rejected, chosen)
    assert isinstance(swapped, Record)
    assert swapped.prompt == prompt, "which one is better does not matter"


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


def system(text: str) -> Message:
    return Message("system", text)


def convert(columns: dict, stage: Stage) -> Example | str:
    return shape_for(columns, stage, "x").convert(columns)


# TRL's conversational types, and what each says: prompt, chosen and rejected.
TALK = (user("Hi"), assistant("Hello"), user("Why?"))
PAIR = (TALK, (assistant("Because."),), (assistant("No."),))
CONVERSATIONAL = [
    ({"messages": (*TALK, assistant("Because."))}, "sft", (*PAIR[:2], None)),
    ({"conversations": (*TALK, assistant("Because."))}, "ppo", (*PAIR[:2], None)),
    ({"prompt": TALK}, "ppo", (TALK, None, None)),
    ({"prompt": TALK, "completion": (assistant("Because."),)}, "sft", (*PAIR[:2], None)),
    ({"prompt": TALK, "completion": "Because."}, "sft", (*PAIR[:2], None)),
    ({"prompt": TALK, "chosen": PAIR[1], "rejected": PAIR[2]}, "reward", PAIR),
    ({"chosen": (*TALK, *PAIR[1]), "rejected": (*TALK, *PAIR[2])}, "reward", PAIR),
    (
        {"prompt": "Why?", "chosen": (*TALK, *PAIR[1]), "rejected": (*TALK, *PAIR[2])},
        "reward",
        PAIR,
    ),
    (
        {"prompt": "Why?", "chosen": PAIR[1], "rejected": PAIR[2]},
        "reward",
        ((user("Why?"),), *PAIR[1:]),
    ),
]


@pytest.mark.parametrize(("columns", "stage", "parts"), CONVERSATIONAL)
def test_conversations_come_in_every_shape(columns: dict, stage: Stage, parts: tuple) -> None:
    assert convert(columns, stage) == Dialogue(*parts)


def test_an_answer_may_hold_several_turns() -> None:
    more = (assistant("a"), user("b"), assistant("c"))
    said = convert({"chosen": (*TALK, *more), "rejected": (*TALK, *PAIR[2])}, "reward")
    assert said == Dialogue(TALK, more, PAIR[2])


def test_what_stands_behind_the_last_answer_is_no_part_of_the_example() -> None:
    messages = (system("Be kind."), *TALK, assistant("Because."), user("Oh"))
    expected = Dialogue((system("Be kind."), *TALK), PAIR[1])
    assert convert({"messages": messages}, "sft") == expected


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"messages": (assistant("Hi"), user("Oh"))}, "no user turn"),
        ({"messages": (assistant("Hi"), *TALK, *PAIR[1])}, "begins with a turn of assistant"),
        ({"messages": (user("Hi"),)}, "no assistant turn"),
        ({"messages": (user("Hi"), Message("narrator", "x"), assistant("y"))}, "unknown role"),
        ({"messages": "Hi"}, "text in column 'messages'"),
        ({"text": TALK}, "messages in column 'text'"),
        ({"prompt": (*TALK, *PAIR[1]), "completion": PAIR[1]}, "prompt ends with a turn of assi"),
        ({"prompt": TALK, "completion": (user("Oh"),)}, "answer is no turn of assistant"),
        ({"chosen": TALK, "rejected": TALK}, "answers are equal"),
        ({"chosen": (user("a"), *PAIR[1]), "rejected": (user("b"), *PAIR[1])}, "prompts differ"),
        ({"chosen": (user("a"), user("b")), "rejected": (user("a"), user("c"))}, "prompts differ"),
        ({"chosen": (*TALK, *PAIR[1]), "rejected": "No."}, "one answer is text, the other mess"),
    ],
)
def test_conversations_that_are_none_are_dropped_with_the_reason(
    columns: dict, reason: str
) -> None:
    said = convert(columns, "sft")
    assert isinstance(said, str)
    assert said.startswith(reason)
