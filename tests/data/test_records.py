"""Shapes of rows, and which stage takes which."""

import pytest

from rlhf_jax.data.records import (
    SHAPES,
    Record,
    Stage,
    require_stage,
    shape_for,
    shapes_of,
)

# What docs/data.md promises, written down a second time.
TAKES: dict[Stage, set[str]] = {
    "sft": {"prompt+chosen+rejected", "prompt+completion", "chosen+rejected", "text"},
    "reward": {"prompt+chosen+rejected", "chosen+rejected"},
    "ppo": {"prompt+chosen+rejected", "prompt+completion", "chosen+rejected", "prompt"},
}

ASK = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant:"


def transcripts(chosen: str, rejected: str) -> Record | str:
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
    ],
)
def test_transcripts_without_a_comparison_are_dropped_with_the_reason(
    chosen: str, rejected: str, reason: str
) -> None:
    assert transcripts(chosen, rejected) == reason


def test_records_made_in_code_are_checked_against_the_stage() -> None:
    records = [Record("p", "a", "b"), Record("p", "a")]
    require_stage(records, "sft", "made")
    require_stage(records, "ppo", "made")
    with pytest.raises(ValueError, match="made: 1 of 2 records have no `rejected`"):
        require_stage(records, "reward", "made")
