"""Reward functions by name, what they are called with, and what is said where they are wrong."""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.reward_calls import Answered, call, weighted_sum
from rlhf_jax.stages.reward_functions import (
    RewardFunction,
    check_columns,
    load_function,
    load_reward_functions,
)

SOURCE = """
    import math
    from neighbour import BONUS

    def length(prompts, completions, **columns):
        return [len(text) + BONUS for text in completions]

    class Judge:
        @staticmethod
        def fair(completions, **columns):
            return [0.0] * len(completions)

    def positional(prompts, completions, /, **columns):
        return []

    def bare(prompts, completions):
        return []

    async def later(prompts, completions, **columns):
        return []

    PI = math.pi
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with modules; the import system forgets them afterwards."""
    (tmp_path / "judges.py").write_text(textwrap.dedent(SOURCE), encoding="utf-8")
    (tmp_path / "neighbour.py").write_text("BONUS = 100\n", encoding="utf-8")
    (tmp_path / "broken.py").write_text("import nothing_like_this\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("judges", "neighbour", "broken"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("source", ["judges:length", "judges.py:length", "./judges.py:length"])
def test_functions_of_the_working_directory_and_of_files(folder: Path, source: str) -> None:
    assert load_function(source)(["p"], ["four"]) == [104]


def test_a_file_elsewhere_finds_its_neighbours(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert load_function(f"{folder}/judges.py:length")(["p"], [""]) == [100]


def test_an_attribute_of_a_class(folder: Path) -> None:
    assert load_function("judges:Judge.fair")(completions=["a", "b"]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("judges", "give module:function, or path/to/file.py:function"),
        ("judges:", "give module:function"),
        ("nowhere:f", "there is no module nowhere .looked in .*; a file is named as path"),
        ("nowhere.py:f", "reward-fn=nowhere.py:f: no such file: .*nowhere.py"),
        ("broken:f", "importing broken failed with ModuleNotFoundError: .*nothing_like_this"),
        ("broken.py:f", "importing broken.py failed with ModuleNotFound.*.broken.py, line 1."),
        ("judges:size", "judges has no size; it defines length, positional, bare, later"),
        ("judges:PI", "PI is a float, not a function"),
        ("judges:later", "judges:later is async, and nothing awaits it"),
        ("judges:positional", r"does not take prompts, completions: .*end its parameters in"),
        ("judges:bare", r"does not take completion_ids: .*now \(prompts, completions\)\)"),
    ],
)
def test_what_cannot_be_loaded(folder: Path, source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_function(source)


def test_weights_and_names(folder: Path) -> None:
    (folder / "others.py").write_text("def length(**columns):\n    return []\n", encoding="utf-8")
    one, two, three = load_reward_functions(
        ["judges:length", "others.py:length", "judges:Judge.fair"], [1.0, 0.5, -2.0]
    )
    assert (one.name, two.name, three.name) == ("judges.length", "others.length", "Judge.fair")
    assert (one.weight, two.weight, three.weight) == (1.0, 0.5, -2.0)
    assert [f.weight for f in load_reward_functions(["judges:length"])] == [1.0]


def test_a_function_that_is_named_twice(folder: Path) -> None:
    with pytest.raises(ValueError, match="names judges:length twice"):
        load_reward_functions(["judges:length", "judges:length"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_model_weight": 0}, "reward_model_weight=0 and no reward_fn: nothing scores"),
        ({"reward_fn": ("a:b",), "reward_fn_weights": (1.0, 2.0)}, "has 2 weights for 1 functions"),
        ({"reward_fn_weights": (1.0,)}, "has 1 weights for 0 functions"),
        ({"reward_fn": ("a:b",), "reward_fn_weights": (float("inf"),)}, "must be finite"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)


def judge_with_answer(prompts: Any, completions: Any, answer: Any, hint: str = "", **_: Any) -> Any:
    return [float(a == c) for a, c in zip(answer, completions, strict=True)]


def narrow(prompts: Any, completions: Any, completion_ids: Any, answer: Any) -> Any:
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("function", "columns", "message"),
    [
        (judge_with_answer, ["question"], "m:f needs answer, which .* further columns: question"),
        (judge_with_answer, [], "needs answer, .* further columns: none. .*copy it to a column of"),
        (narrow, ["answer", "id"], "m:f does not take id: .*end its parameters in"),
        (narrow, ["answer", "prompts"], "the data set has columns prompts, which reward"),
    ],
)
def test_columns_that_do_not_fit_are_known_before_the_run(
    function: Any, columns: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_columns([RewardFunction("m:f", "f", 1.0, function)], columns)


def test_columns_that_fit() -> None:
    check_columns([RewardFunction("m:f", "f", 1.0, judge_with_answer)], ["answer", "id"])
    check_columns([RewardFunction("m:f", "f", 1.0, narrow)], ["answer"])
    check_columns([], ["prompts"])


ANSWERED = Answered(["p", "q"], ["one", "two"], [[1, 2], [3]], {"answer": ["one", "one"]})


def returning(value: Any) -> RewardFunction:
    def function(**given: Any) -> Any:
        return value(given) if callable(value) else value

    return RewardFunction("m:f", "f", 1.0, function)


def test_a_function_gets_keywords_as_in_trl() -> None:
    seen: dict[str, Any] = {}
    call(returning(lambda given: seen.update(given) or [0, 0]), ANSWERED)
    assert seen == {
        "prompts": ["p", "q"],
        "completions": ["one", "two"],
        "completion_ids": [[1, 2], [3]],
        "answer": ["one", "one"],
    }


@pytest.mark.parametrize(
    "value", [[1, 0.5], (True, np.float32(0.5)), np.array([1, 0.5]), [np.int64(1), 0.5]]
)
def test_numbers_of_every_kind(value: Any) -> None:
    scores = call(returning(value), ANSWERED)
    assert scores.dtype == np.float32
    assert scores.tolist() == [1.0, 0.5]


def test_none_is_left_out_of_the_sum() -> None:
    one, two = call(returning([None, 2]), ANSWERED), call(returning([5, None]), ANSWERED)
    np.testing.assert_array_equal(one, [np.nan, 2])
    functions = [RewardFunction("m:f", "f", weight, len) for weight in (0.5, -1.0)]
    total = weighted_sum(functions, np.stack([one, two]))
    assert total.tolist() == [-5.0, 1.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "function m:f returned 1 scores, expected a list of 2 numbers"),
        ([1.0, 2.0, 3.0], "returned 3 scores, expected a list of 2 numbers"),
        ([1.0, float("nan")], r"m:f returned nan for answer 1 \('two'\), expected a finite"),
        ([float("-inf"), 1.0], r"m:f returned -inf for answer 0 \('one'\), expected a finite"),
        ([1e39, 1.0], r"m:f returned 1e\+39 for answer 0"),
        (1.0, r"m:f returned 1.0, expected a list of 2 numbers"),
        (None, r"m:f returned None \(NoneType\), expected a list of 2"),
        ("ab", r"m:f returned 'ab' \(str\), expected a list of 2"),
        ({"a": 1, "b": 2}, r"m:f returned .*\(dict\), expected a list of 2"),
        (["1", 2], r"m:f returned '1' \(str\) for answer 0"),
        ([[1.0], 2], r"m:f returned \[1.0\] \(list\) for answer 0"),
        (np.ones((2, 1)), r"m:f returned .*\(ndarray\), expected a list of 2"),
    ],
)
def test_what_a_function_may_not_return(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(returning(value), ANSWERED)


def test_an_exception_names_the_function_and_its_line() -> None:
    def fails(given: Any) -> Any:
        return [{}["missing"]]

    message = r"m:f failed on 2 answers with KeyError: 'missing' \(test_reward_functions.py, line"
    with pytest.raises(ValueError, match=message):
        call(returning(fails), ANSWERED)
