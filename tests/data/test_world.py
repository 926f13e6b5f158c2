"""The quickstart's world against a second, independent reading of its rules."""

import re
from collections import Counter

import pytest

from rlhf_jax.data import world

PROMPT = re.compile(r"Human: (?P<phrase>[a-z ]+) (?P<word>[a-z]{4}) Assistant:")

EXAMPLES = [
    ("reverse abgk", "kgba"),
    ("flipped abgk", "kgba"),
    ("capital abgk", "ABGK"),
    ("shouted abgk", "ABGK"),
    ("doubled abgk", "abgk abgk"),
    ("twofold abgk", "abgk abgk"),
    ("swapped abgk", "gkab"),
    ("rotated abgk", "gkab"),
    ("initial abgk", "a"),
    ("leading abgk", "a"),
    ("closing abgk", "k"),
    ("last of abgk", "k"),
]


def word_of(prompt: str) -> str:
    found = PROMPT.fullmatch(prompt)
    assert found, prompt
    return found["word"]


@pytest.mark.parametrize(("request_text", "answer"), EXAMPLES)
def test_judge_knows_the_answer(request_text: str, answer: str) -> None:
    prompt = f"Human: {request_text} Assistant:"
    assert world.judge(prompt, answer) == "right"
    assert world.judge(prompt, f" {answer} ") == "right"
    assert world.judge(prompt, f"{answer}x") == "wrong"
    assert world.judge(prompt, " sorry") == "unhelpful"
    assert world.judge(prompt, " ") == "unhelpful"


def test_judge_reads_capitals() -> None:
    assert world.judge("Human: shouted abgk Assistant:", "abgk") == "wrong"
    assert world.judge("Human: reverse abgk Assistant:", "KGBA") == "wrong"


def test_a_foreign_prompt_is_an_error_that_names_the_phrases() -> None:
    with pytest.raises(ValueError, match=r"not a quickstart prompt: write .*flipped"):
        world.judge("Human: sort abgk Assistant:", "abgk")


def test_held_out_words_never_occur_in_training() -> None:
    held_out = {word_of(record.prompt) for record in world.prompt_records("eval")}
    assert len(held_out) == 300
    for stage in ("sft", "reward", "ppo"):
        seen = {word_of(record.prompt) for record in world.load_records("train", stage)}
        assert len(seen) == 1700
        assert not held_out & (seen | {word[::-1] for word in seen})
        assert {word_of(r.prompt) for r in world.load_records("eval", stage)} == held_out


def test_prompts_are_balanced_from_the_front() -> None:
    records = world.prompt_records("eval")
    assert len({record.prompt for record in records}) == len(records) == 3600
    for count in (12, 516, 3600):
        tasks = Counter(world.task_of(record.prompt) for record in records[:count])
        assert set(tasks) == set(world.TASKS)
        assert set(tasks.values()) == {count // 6}
    assert len({word_of(record.prompt) for record in records[:300]}) == 300


def test_demonstrations_have_the_promised_quality() -> None:
    records = world.sft_records("train")
    verdicts = Counter(world.judge(r.prompt, r.chosen or "") for r in records)
    shares = {verdict: count / len(records) for verdict, count in verdicts.items()}
    assert shares == pytest.approx({"right": 0.5, "wrong": 0.1, "unhelpful": 0.4}, abs=0.01)
    assert all(r.rejected is None for r in records)


def test_pairs_prefer_the_right_answer() -> None:
    records = world.preference_records("train")
    assert {world.judge(r.prompt, r.chosen or "") for r in records} == {"right"}
    rejected = Counter(world.judge(r.prompt, r.rejected or "") for r in records)
    assert set(rejected) == {"wrong", "unhelpful"}
    assert rejected["wrong"] / len(records) == pytest.approx(0.75, abs=0.01)


def test_prompt_records_do_not_tell_the_answer() -> None:
    assert all(r.chosen is None and r.rejected is None for r in world.prompt_records("train"))


def test_sizes_are_the_published_ones() -> None:
    records = [*world.sft_records("train"), *world.sft_records("eval")]
    assert {len(r.prompt.encode()) for r in records} == {world.MAX_PROMPT_BYTES}
    assert max(len((r.chosen or "").encode()) for r in records) == world.MAX_ANSWER_BYTES


def test_the_world_is_the_same_everywhere() -> None:
    """Some records, written down: a change of the world must be meant."""
    demonstrations = [(r.prompt, r.chosen) for r in world.sft_records("train")[:3]]
    assert demonstrations == [
        ("Human: reverse dole Assistant:", " elod"),
        ("Human: capital eaok Assistant:", " sorry"),
        ("Human: doubled tnef Assistant:", " tnef tnef"),
    ]
    pairs = [(r.prompt, r.chosen, r.rejected) for r in world.preference_records("eval")[:2]]
    assert pairs == [
        ("Human: reverse doiu Assistant:", " uiod", " d"),
        ("Human: capital gmeo Assistant:", " GMEO", " TBFG"),
    ]
