"""The split among stages against hand-computed cases, and the blend of several sources."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_jax.data.blend import (
    DataConfig,
    load_stage_records,
    split_indices,
)

# (rows, split, sizes of the parts). By hand: 4 rows in 2,4,4 are 0.8, 1.6, 1.6, rounded 1, 2, 2:
# boundaries 1, 3, 5, one too many, so 0, 2, 4. Python rounds halves to even.
SIZES = [
    (10, "2,4,4", (2, 4, 4)),
    (7, "2,4,4", (1, 3, 3)),
    (4, "2,4,4", (0, 2, 2)),
    (6, "2,4,4", (2, 2, 2)),
    (3, "2,4,4", (1, 1, 1)),
    (5, "1,1", (3, 2)),
    (25, "9,1", (23, 2)),
    (11, "10,0,0", (11, 0, 0)),
    (3, "0,5,5", (0, 1, 2)),
    (0, "2,4,4", (0, 0, 0)),
]


def write_prompts(path: Path, letter: str, num_rows: int) -> str:
    rows = [{"prompt": f"{letter}{n}", "completion": " x"} for n in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts(records) -> list[str]:
    return [record.prompt for record in records]


@pytest.mark.parametrize(("num_rows", "data_split", "sizes"), SIZES)
def test_parts_are_slices_of_one_permutation(num_rows, data_split, sizes) -> None:
    parts = [split_indices(num_rows, data_split, n, seed=1234) for n in range(len(sizes))]
    assert tuple(map(len, parts)) == sizes
    # NumPy's own permutation draws the same numbers as shuffling 0 … N-1.
    expected = np.random.RandomState(1234).permutation(num_rows)
    np.testing.assert_array_equal(np.concatenate(parts), expected)


def test_the_split_of_one_seed_never_changes() -> None:
    # NumPy guarantees RandomState's stream; these numbers were recorded with NumPy 2.5.
    assert split_indices(10, "2,4,4", 0, 1234).tolist() == [7, 2]
    assert split_indices(10, "2,4,4", 2, 1234).tolist() == [4, 5, 6, 3]


@pytest.mark.parametrize("data_split", ["", "2,x,4", "0,0,0", "2,-1,4", "2;4;4", "nan,1,1"])
def test_a_split_that_is_no_list_of_shares_is_an_error(data_split: str) -> None:
    with pytest.raises(ValueError, match="data_split"):
        split_indices(10, data_split, 0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_path": ()}, "data_path is empty"),
        ({"data_split": "9,1"}, "has 2 parts: it needs 3"),
        ({"eval_fraction": 1.0}, "eval_fraction"),
        ({"overlong": "keep"}, "one of drop, cut, cut_turns"),
        ({"max_rows": 0}, "max_rows"),
        ({"margins": "all"}, "margins='all': it must be one of none, column, scores"),
        ({"chat_format": "chatml"}, "chat_format='chatml': it must be one of template, human_ass"),
        ({"data_weights": (1, 2)}, "data_weights has 2 weights for 1 sources: give one for each"),
        (
            {"data_path": ("a", "b"), "sft_only_data_path": ("c",), "data_weights": (1, 2)},
            "2 weights for 3 sources",
        ),
        ({"data_weights": (-1.0,)}, r"-1.0 is no weight, they are above 0"),
        ({"data_weights": (0.0,)}, r"0.0 is no weight"),
        ({"data_weights": (float("inf"),)}, r"inf is no weight"),
    ],
)
def test_config_ranges(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**change)


def test_stages_share_no_row_and_none_is_lost(tmp_path: Path) -> None:
    config = DataConfig(data_path=(write_prompts(tmp_path / "a.jsonl", "a", 100),))
    seen = []
    for stage, num_train, num_eval in (("sft", 18, 2), ("ppo", 36, 4)):
        records = load_stage_records(config, stage, seed=5)  # pyright: ignore[reportArgumentType]
        assert (len(records.train), len(records.eval)) == (num_train, num_eval)
        seen += prompts(records.train) + prompts(records.eval)
    assert len(set(seen)) == 60


def test_one_source_follows_the_documented_rule(tmp_path: Path) -> None:
    config = DataConfig(
        data_path=(write_prompts(tmp_path / "a.jsonl", "a", 20),), eval_fraction=0.0
    )
    order = np.random.RandomState(7).permutation(20)
    records = load_stage_records(config, "ppo", seed=7)
    assert prompts(records.train) == [f"a{n}" for n in order[12:]]
    assert not records.eval
    assert "ppo gets 8 train and 0 eval rows" in records.notes[0]


def test_several_sources_are_concatenated_then_permuted_with_the_same_seed(tmp_path: Path) -> None:
    paths = tuple(write_prompts(tmp_path / f"{c}.jsonl", c, n) for c, n in (("a", 10), ("b", 15)))
    config = DataConfig(data_path=paths, eval_fraction=0.0)
    a, b = (np.random.RandomState(3).permutation(n) for n in (10, 15))
    together = [f"a{n}" for n in a[:2]] + [f"b{n}" for n in b[:3]]
    order = np.random.RandomState(3).permutation(5)
    assert prompts(load_stage_records(config, "sft", seed=3).train) == [together[n] for n in order]


def test_sft_only_sources_give_all_rows_to_sft_and_none_to_others(tmp_path: Path) -> None:
    config = DataConfig(
        data_path=(write_prompts(tmp_path / "a.jsonl", "a", 10),),
        sft_only_data_path=(write_prompts(tmp_path / "b.jsonl", "b", 6),),
        eval_fraction=0.0,
    )
    sft, ppo = (prompts(load_stage_records(config, s, seed=1).train) for s in ("sft", "ppo"))
    assert sorted(p for p in sft if p[0] == "b") == [f"b{n}" for n in range(6)]
    assert len(sft) == 8
    assert {p[0] for p in ppo} == {"a"}


def test_an_eval_split_of_its_own_is_split_like_the_train_rows(tmp_path: Path) -> None:
    write_prompts(tmp_path / "train.jsonl", "t", 20)
    write_prompts(tmp_path / "eval.jsonl", "e", 10)
    records = load_stage_records(DataConfig(data_path=(str(tmp_path),)), "ppo", seed=2)
    assert len(records.train) == 8
    assert prompts(records.eval) == [f"e{n}" for n in np.random.RandomState(2).permutation(10)[6:]]


def test_without_a_split_every_stage_sees_all_rows_and_max_rows_limits_them(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "a.jsonl", "a", 20)
    config = DataConfig(data_path=(path,), data_split="", eval_fraction=0.25)
    sft, ppo = (load_stage_records(config, s, seed=0) for s in ("sft", "ppo"))
    assert sft.train == ppo.train
    assert sorted(prompts(sft.train + sft.eval)) == sorted(f"a{n}" for n in range(20))
    few = load_stage_records(
        DataConfig(data_path=(path,), data_split="", eval_fraction=0.25, max_rows=3), "sft", seed=0
    )
    assert (few.train, few.eval) == (sft.train[:3], sft.eval[:3])


def test_a_stage_left_without_rows_is_an_error(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "a.jsonl", "a", 4)
    config = DataConfig(data_path=(path,), eval_fraction=0.0)
    with pytest.raises(ValueError, match="'2,4,4' leaves stage sft none of the rows"):
        load_stage_records(config, "sft", seed=0)


@pytest.mark.parametrize(("data_split", "stage"), [("0,5,5", "sft"), ("10,0,0", "ppo")])
def test_a_stage_without_a_share_is_an_error(tmp_path: Path, data_split: str, stage: Any) -> None:
    """Also where rounding gives it a row: 25 rows in `0,5,5` are 1, 12 and 12."""
    path = write_prompts(tmp_path / "a.jsonl", "a", 25)
    config = DataConfig(data_path=(path,), data_split=data_split, eval_fraction=0.0)
    with pytest.raises(ValueError, match=f"--data.data-split={data_split} has a share of 0 for st"):
        load_stage_records(config, stage, seed=0)
    if stage == "sft":
        own = replace(config, sft_only_data_path=(path,))
        assert len(load_stage_records(own, stage, seed=0).train) >= 25


def test_held_out_rows_that_ask_what_train_rows_ask_are_counted(tmp_path: Path) -> None:
    """Not where the data say what is held out, and not text without prompts."""

    def note(prompts: list[str], **changes: Any) -> str:
        rows = [{"prompt": prompt, "completion": f" {n}"} for n, prompt in enumerate(prompts)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        for name in ("train.jsonl", "eval.jsonl"):
            (tmp_path / name).write_text(text)
        path = (str(tmp_path / changes.pop("file", "train.jsonl")),)
        config = DataConfig(data_path=path, data_split="", eval_fraction=0.25)
        (said,) = load_stage_records(config, "sft", seed=0).notes
        return said

    twice = [f"p{n // 2}" for n in range(16)]
    order = np.random.RandomState(0).permutation(16)
    shared = sum(twice[n] in {twice[m] for m in order[:12]} for n in order[12:])
    assert shared > 0
    end = f"; {shared} of 4 held-out rows have a prompt that is among the train rows"
    assert note(twice).endswith(f"12 train and 4 eval rows{end}")
    for said in (note([*map(str, range(16))]), note([""] * 16), note(twice, file="")):
        assert said.endswith(" eval rows")


def weighted(tmp_path: Path, **changes: object) -> DataConfig:
    letters = (("a", 20), ("b", 10), ("c", 6))
    a, b, c = (write_prompts(tmp_path / f"{c}.jsonl", c, n) for c, n in letters)
    settings = {
        "data_path": (a, b),
        "sft_only_data_path": (c,),
        "data_weights": (1.0, 3.0, 2.0),
        "data_split": "",
        "eval_fraction": 0.0,
    }
    return DataConfig(**settings | changes)  # pyright: ignore[reportArgumentType]


def test_rows_of_a_weighted_blend_know_their_source_and_none_is_lost(tmp_path: Path) -> None:
    config = weighted(tmp_path)
    sft, ppo = (load_stage_records(config, stage, seed=1) for stage in ("sft", "ppo"))
    assert (sft.weights, ppo.weights) == ((1.0, 3.0, 2.0), (1.0, 3.0))
    for records, letters in ((sft, "abc"), (ppo, "ab")):
        assert {"abc"[row.source] + str(row.prompt)[0] for row in records.train} == {
            letter * 2 for letter in letters
        }
    assert sorted(prompts(sft.train)) == sorted(
        f"{letter}{n}" for letter, size in (("a", 20), ("b", 10), ("c", 6)) for n in range(size)
    )


def test_max_rows_of_a_weighted_blend_are_shared_out_by_weight(tmp_path: Path) -> None:
    records = load_stage_records(weighted(tmp_path, max_rows=12), "sft", seed=1)
    assert [row.source for row in records.train] == [0] * 2 + [1] * 6 + [2] * 4


def test_a_weighted_source_that_gives_a_stage_nothing_is_an_error(tmp_path: Path) -> None:
    config = weighted(tmp_path, data_split="0,5,5", data_weights=(1, 1, 1))
    with pytest.raises(ValueError, match=r"a\.jsonl: 20 rows.*sft gets 0.*leave it out"):
        load_stage_records(config, "sft", seed=1)


@pytest.mark.parametrize(
    ("margins", "of_a_column", "of_scores"),
    [("none", {None}, {None}), ("column", {1.0, 2.0}, {None}), ("scores", {1.0, 2.0}, {0.1, 0.2})],
)
def test_margins_are_those_that_are_asked_for(
    tmp_path: Path, margins: Any, of_a_column: set, of_scores: set
) -> None:
    """In the rows to train on and in those to evaluate."""
    pair = {"prompt": "p", "chosen": "a", "rejected": "b"}
    plain, scored = tmp_path / "plain", tmp_path / "ultrafeedback_binarized"
    rows = {
        plain: [pair | {"margin": n} for n in (1, 2)],
        scored: [pair | {"score_chosen": n + 1, "score_rejected": 1} for n in (1, 2)],
    }
    for folder in rows:
        folder.mkdir()
        for split in ("train", "eval"):
            text = "".join(json.dumps(row) + "\n" for row in rows[folder])
            (folder / f"{split}.jsonl").write_text(text)
    for folder, expected in ((plain, of_a_column), (scored, of_scores)):
        config = DataConfig(data_path=(str(folder),), data_split="", margins=margins)
        records = load_stage_records(config, "reward", seed=0)
        for examples in (records.train, records.eval):
            assert {row.margin for row in examples} == expected
        assert ("with margins" in records.notes[0]) == (None not in expected)
