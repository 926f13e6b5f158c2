"""Files with odd names, shards that are missing, rows that have more than the first one."""

import json
from pathlib import Path

import datasets
import pytest

from rlhf_jax.data.records import Record
from rlhf_jax.data.sources import Source, load_source


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def loaded(path: Path, stage: str = "sft") -> Source:
    source = load_source(str(path), split="train", stage=stage)  # pyright: ignore
    assert source is not None
    return source


def write(path: Path, *rows: dict) -> Path:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(list(rows)).to_parquet(path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["a[1].parquet", "a?.parquet", "a*.parquet", "[v2]/a1.parquet"])
def test_a_name_is_no_pattern(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a1.parquet", {"text": "other"})
    assert loaded(write(tmp_path / name, {"text": "this"})).records == [Record("", "this")]


@pytest.mark.parametrize(
    "names",
    [
        ["train-00000-of-00002.jsonl"],
        ["train-00001-of-00002.jsonl"],
        ["train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"],
        ["train-00000-of-00001.jsonl", "train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"],
    ],
)
def test_shards_that_are_missing_or_of_two_sets_are_an_error(
    tmp_path: Path, names: list[str]
) -> None:
    for name in names:
        write(tmp_path / name, {"text": name})
    with pytest.raises(ValueError, match="not all shards of one data set, each once: train-0000"):
        loaded(tmp_path)


@pytest.mark.parametrize("first", [0, 1])
def test_shards_are_counted_from_zero_or_one(tmp_path: Path, first: int) -> None:
    for n in (0, 1):
        write(tmp_path / f"train-{first + n:05d}-of-00002.jsonl", {"text": str(n)})
    assert loaded(tmp_path).records == [Record("", "0"), Record("", "1")]


def test_a_column_that_the_first_row_lacks_is_none_there_and_said(tmp_path: Path) -> None:
    rows = [{"prompt": "p"}, {"prompt": "q", "gold": "7"}, {"prompt": "r", "level": 1}]
    source = loaded(write(tmp_path / "a.jsonl", *rows), "ppo")
    assert [record.columns for record in source.records] == [
        {"gold": None, "level": None},
        {"gold": "7", "level": None},
        {"gold": None, "level": 1},
    ]
    assert str(source).endswith("read as prompt (columns for reward functions: gold, level)")


def test_a_margin_counts_though_the_first_row_has_none(tmp_path: Path) -> None:
    row = {"prompt": "p", "chosen": "c", "rejected": "r"}
    source = loaded(write(tmp_path / "a.jsonl", row, row | {"margin": 2}), "reward")
    assert [record.margin for record in source.records] == [None, 2.0]
    assert str(source).endswith("2 rows with margins")


def test_a_label_that_the_first_row_lacks_is_an_error(tmp_path: Path) -> None:
    row = {"prompt": "p", "completion": "c"}
    path = write(tmp_path / "a.jsonl", row, row | {"label": False})
    with pytest.raises(ValueError, match=r"line 2: it has a 'label' and the first row has none"):
        loaded(path)
    assert len(loaded(path, "ppo").records) == 2


def test_a_line_of_white_space_is_blank(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n  \t\n two\n")
    assert loaded(tmp_path / "a.txt").records == [Record("", "one"), Record("", " two")]
