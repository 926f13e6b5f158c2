"""The GSM8K verifier against answers judged by hand, and against the data set itself."""

import gzip
import json

import pytest

from rlhf_jax.rewards.gsm8k import gsm8k_correct

SOLUTION = "She has 2 * 21 = <<2*21=42>>42 apples.\n#### 42"


def judge(completion: object, solution: str | None = SOLUTION) -> list[float | None]:
    return gsm8k_correct(["How many?"], [completion], answer=[solution], question=["unused"])


@pytest.mark.parametrize(
    "answer",
    [
        "42",
        "#### 42",
        "####42.",
        "First 7, then 42.",
        "It is $42.00 in total",
        "#### 42\nA check: 42 - 1 = 41",
        "not #### 41 but #### 42",
        "from 40-42",
        "between 7,42",
    ],
)
def test_right_answers(answer: str) -> None:
    assert judge(answer) == [1.0]


@pytest.mark.parametrize(
    "answer",
    ["", "forty-two", "41", "42, no, 43", "#### 43 (I first had 42)", "-42", "4 2", "420", "4,2"],
)
def test_wrong_answers(answer: str) -> None:
    assert judge(answer) == [0.0]


def test_thousands_and_decimals_are_numbers() -> None:
    assert judge("1,234,567", "x\n#### 1234567") == [1.0]
    assert judge("1234567", "x\n#### 1,234,567") == [1.0]
    assert judge("0.50", "x\n#### .5") == [1.0]
    assert judge("-3", "x\n#### -3") == [1.0]


def test_messages_are_read_as_their_text() -> None:
    assert judge([{"role": "assistant", "content": "so 42"}]) == [1.0]


def test_a_row_of_other_data_is_not_judged() -> None:
    assert judge("42", None) == [None]


def test_a_solution_without_its_mark_is_an_error() -> None:
    with pytest.raises(ValueError, match="no number behind ####"):
        judge("42", "42")


def test_every_solution_of_the_data_set_is_right_and_every_other_one_is_not(shared_data) -> None:
    """The neighbour's solution is right only where two neighbours have the same number."""
    file = shared_data("gsm8k") / "gsm8k_test.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        solutions = [json.loads(line)["answer"] for line in lines]
    everyone = gsm8k_correct(solutions, solutions, answer=solutions)
    assert everyone == [1.0] * len(solutions)
    shifted = [*solutions[1:], solutions[0]]
    right = gsm8k_correct(solutions, shifted, answer=solutions)
    same = [
        a.split("####")[1].strip() == b.split("####")[1].strip()
        for a, b in zip(solutions, shifted, strict=True)
    ]
    assert right == [float(x) for x in same]
    assert sum(same) < 0.05 * len(same)
