"""Every way rows can lie somewhere gives the same records; every way they can be wrong is named."""

import gzip
import json
from pathlib import Path

import datasets
import pytest

from rlhf_jax.data import sources
from rlhf_jax.data.records import Dialogue, Example, Message, Record, Stage
from rlhf_jax.data.sources import Split, load_source

ROWS = [{"prompt": f"p{n} ü", "chosen": " yes", "rejected": " no"} for n in range(3)]
RECORDS = [Record(f"p{n} ü", " yes", " no") for n in range(3)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)


def load_records(path: str, *, split: Split = "train", stage: Stage = "sft") -> list[Example]:
    """The records of a split that is there."""
    source = load_source(path, split=split, stage=stage)
    assert source is not None
    return source.records


def json_lines(rows: list[dict]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def write(path: Path, rows: list[dict] = ROWS) -> Path:
    """Rows as a file, in the format that its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name
    if name.endswith(".parquet"):
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif name.endswith(".arrow"):
        datasets.Dataset.from_list(rows).save_to_disk(path.parent / ".saved")
        (path.parent / ".saved/data-00000-of-00001.arrow").rename(path)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(json_lines(rows).encode()))
    else:
        path.write_text(json_lines(rows) if name.endswith("l") else json.dumps(rows, indent=1))
    return path


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "a.json.gz", "a.arrow"]
)
def test_formats_hold_the_same_records(tmp_path: Path, name: str) -> None:
    assert load_records(str(write(tmp_path / name)), stage="reward") == RECORDS


def test_json_may_be_lines_and_lines_may_be_blank(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("\n" + json_lines(ROWS).replace("\n", "\n\n"))
    assert load_records(str(file)) == RECORDS


def test_lines_of_plain_text_are_rows(tmp_path: Path) -> None:
    file = tmp_path / "wiki.txt"
    file.write_text("one\n\n two \n")
    assert load_records(str(file)) == [Record("", "one"), Record("", " two ")]


@pytest.mark.parametrize(
    ("train", "evaluation"),
    [
        ("train.jsonl", "eval.jsonl"),
        ("data/train.json", "data/eval.json"),
        ("train.jsonl.gz", "test.jsonl.gz"),
        ("data/train-00000-of-00001.parquet", "data/validation-00000-of-00001.parquet"),
        # As a cache of `datasets` names them.
        ("rows-train.arrow", "rows-test.arrow"),
        ("rows-train-00000-of-00001.arrow", "rows-test.arrow"),
    ],
)
def test_a_folder_gives_both_splits(tmp_path: Path, train: str, evaluation: str) -> None:
    write(tmp_path / train)
    write(tmp_path / evaluation, ROWS[:1])
    write(tmp_path / "training-notes.jsonl", [{"other": "file"}])
    assert load_records(str(tmp_path), split="train") == RECORDS
    assert load_records(str(tmp_path), split="eval") == RECORDS[:1]


def test_shards_are_one_split_in_order(tmp_path: Path) -> None:
    for n in range(3):
        write(tmp_path / f"train-0000{n}-of-00003.jsonl", ROWS[n : n + 1])
    assert load_records(str(tmp_path)) == RECORDS


def test_two_files_for_one_split_are_an_error(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl")
    write(tmp_path / "train.json")
    with pytest.raises(ValueError, match=r"several files claim to be train: train\.json, train"):
        load_records(str(tmp_path))


def test_what_save_to_disk_wrote_is_read(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(
        tmp_path / "both"
    )
    table.save_to_disk(tmp_path / "one")
    assert load_records(str(tmp_path / "both"), split="train") == RECORDS
    assert load_records(str(tmp_path / "both"), split="eval") == RECORDS[:1]
    assert load_records(str(tmp_path / "one")) == RECORDS
    assert load_source(str(tmp_path / "one"), split="eval", stage="sft") is None


def test_shards_without_what_save_to_disk_says_of_them_are_all_train(tmp_path: Path) -> None:
    for n in range(2):
        write(tmp_path / f"data-0000{n}-of-00002.arrow", ROWS[n : n + 1])
    assert load_records(str(tmp_path)) == RECORDS[:2]
    assert load_source(str(tmp_path), split="eval", stage="sft") is None


def test_an_arrow_file_may_be_a_table(tmp_path: Path) -> None:
    import pyarrow as pa

    table = pa.Table.from_pylist(ROWS)
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    assert load_records(str(tmp_path / "a.arrow")) == RECORDS


def test_messages_are_read_from_every_format(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    expected = Dialogue((Message("user", "Hi"),), (Message("assistant", "Hello"),))
    for name in ("a.jsonl", "a.parquet", "a.arrow"):
        assert load_records(str(write(tmp_path / name, [{"messages": talk}]))) == [expected]


def test_further_columns_are_kept_for_stage_ppo_alone(tmp_path: Path) -> None:
    rows = [{**row, "level": n, "tags": ["a"]} for n, row in enumerate(ROWS)]
    for name in ("a.jsonl", "a.parquet"):
        path = str(write(tmp_path / name, rows))
        columns = [record.columns for record in load_records(path, stage="ppo")]
        assert columns == [{"level": n, "tags": ["a"]} for n in range(3)]
        assert not any(record.columns for record in load_records(path, stage="reward"))


def test_a_column_that_a_later_row_lacks_is_none_there(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.jsonl", [{"prompt": "p", "level": 1}, {"prompt": "q"}]))
    columns = [record.columns for record in load_records(path, stage="ppo")]
    assert columns == [{"level": 1}, {"level": None}]


def test_margins_are_read_and_may_be_unknown(tmp_path: Path) -> None:
    rows = [{**row, "margin": margin} for row, margin in zip(ROWS, (2, -0.5, None), strict=True)]
    for name in ("a.jsonl", "a.parquet"):
        records = load_records(str(write(tmp_path / name, rows)), stage="reward")
        assert [record.margin for record in records] == [2.0, -0.5, None]
        ppo = load_records(str(tmp_path / name), stage="ppo")
        assert not any(record.columns for record in ppo)


def test_completions_that_are_labelled_bad_are_no_examples(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": str(n), "label": label} for n, label in
            enumerate((True, False, 0, 1))]  # fmt: skip
    source = load_source(str(write(tmp_path / "a.jsonl", rows)), split="train", stage="sft")
    assert source is not None
    assert [record.chosen for record in source.records] == ["0", "3"]
    assert source.dropped == {"label is false": 2}


@pytest.mark.parametrize("label", ["false", "true", "good", 2, 0.5, None, [0]])
def test_a_label_that_is_neither_true_nor_false_is_named(tmp_path: Path, label: object) -> None:
    rows = [{"prompt": "p", "completion": "c", "label": each} for each in (True, label)]
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: column 'label' holds .*, not true or"):
        load_records(str(write(tmp_path / "a.jsonl", rows)))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prmpt": "q", "chosen": "a", "rejected": "b"},
         ", read as chosen+rejected (columns not used: prmpt)"),
        ({**ROWS[0], "id": 1, "text": "t", "margin": 1},
         " with margins, read as prompt+chosen+rejected (columns not used: id, text)"),
        ({**ROWS[0], "margin": 1}, " with margins"),
        ({"prompt": "p", "completion": "c", "label": True}, ""),
        (ROWS[0], ""),
    ],
)  # fmt: skip
def test_columns_that_are_not_used_are_said_with_the_shape(
    tmp_path: Path, row: dict, said: str
) -> None:
    for name in ("a.jsonl", "a.parquet"):
        path = str(write(tmp_path / name, [row]))
        assert str(load_source(path, split="train", stage="sft")) == f"{path}: 1 rows{said}"


def test_columns_are_said_to_be_for_reward_functions_where_those_get_them(tmp_path: Path) -> None:
    for n, rows in enumerate([[{"prompt": "p", "level": 1}], [{"prompt": "q"}]]):
        write(tmp_path / f"train-0000{n}-of-00002.jsonl", rows)
    source = load_source(str(tmp_path), split="train", stage="ppo")
    assert str(source).endswith(": 2 rows, read as prompt (columns for reward functions: level)")


def test_a_single_file_has_no_eval_split(tmp_path: Path) -> None:
    assert load_source(str(write(tmp_path / "a.jsonl")), split="eval", stage="sft") is None


def test_a_hub_id_gives_its_splits_and_config(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, data_dir: None) -> datasets.DatasetDict:
        asked.append((name, config))
        table = datasets.Dataset.from_list(ROWS)
        return datasets.DatasetDict({"train": table, "validation": table.select([2])})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_records("some/data", stage="reward") == RECORDS
    assert load_records("some/data:part", split="eval", stage="reward") == RECORDS[2:]
    assert asked == [("some/data", None), ("some/data", "part")]


def test_a_hub_id_that_cannot_be_fetched_says_so_and_keeps_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no route to the Hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(FileNotFoundError, match="some/data: no such file.*no route") as error:
        load_records("some/data")
    assert isinstance(error.value.__cause__, ConnectionError)


@pytest.mark.parametrize("path", ["nowhere", "./no/such", "no/such.jsonl", "/a/b/c", "a/b/c"])
def test_a_path_of_no_known_form_names_both_that_were_tried(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("the Hub was asked"))
    with pytest.raises(FileNotFoundError, match="no such file or folder.*no Hub id either"):
        load_records(path)


def test_a_folder_without_a_train_file_lists_what_is_there(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl")
    with pytest.raises(FileNotFoundError, match=r"no train\.\*.*rows\.jsonl"):
        load_records(str(tmp_path))


def test_a_file_of_another_kind_names_those_allowed(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("prompt\n")
    with pytest.raises(ValueError, match=r"rows\.csv.*\.jsonl, \.json, \.parquet") as error:
        load_records(str(file))
    assert str(error.value).endswith('Dataset.from_csv("rows.csv").to_json("rows.jsonl")')


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.jsonl.gz"])
def test_utf_16_is_called_so(tmp_path: Path, name: str, encoding: str) -> None:
    """As Windows writes it, with a mark of the byte order."""
    content = f"\ufeff{json_lines(ROWS)}".encode(encoding)
    file = tmp_path / name
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(ValueError, match=rf"{name}: this is UTF-16: save it as UTF-8$"):
        load_records(str(file))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_utf_8_may_begin_with_a_mark_of_the_byte_order(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name)
    file.write_text(f"\ufeff{file.read_text()}", encoding="utf-8")
    assert load_records(str(file), stage="reward") == RECORDS


def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.txt"):
        (tmp_path / name).write_bytes(b'{"text": "a"}\n{"text": "\xfc"}\n')
        with pytest.raises(ValueError, match=f"{name}, line 2: not UTF-8 text: 'utf-8' codec"):
            load_records(str(tmp_path / name))


@pytest.mark.parametrize("content", ["", "\n\n", "[]"])
def test_an_empty_data_set_is_an_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"a\.json: the train data set is empty"):
        load_records(str(file))


def test_a_data_set_of_dropped_rows_alone_says_why(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"chosen": "one", "rejected": "one"}] * 2)
    with pytest.raises(ValueError, match=r"empty.*2 dropped \(answers are equal\)"):
        load_records(str(file), stage="reward")


def test_dropped_rows_are_counted(tmp_path: Path) -> None:
    rows = [*ROWS, {**ROWS[0], "chosen": None}]
    source = load_source(str(write(tmp_path / "a.jsonl", rows)), split="train", stage="sft")
    assert source is not None
    assert source.records == RECORDS
    assert source.dropped == {"a value is null": 1}
    assert str(source).endswith("a.jsonl: 3 rows, 1 dropped (a value is null)")


@pytest.mark.parametrize(
    ("name", "compress"), [("a.jsonl", False), ("a.jsonl.gz", True), ("a.json", False)]
)
def test_a_malformed_line_is_named(tmp_path: Path, name: str, compress: bool) -> None:
    content = (json_lines(ROWS) + '{"prompt": oops}\n').encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if compress else content)
    with pytest.raises(ValueError, match=f"{name}, line 4: malformed JSON, .* at character 12"):
        load_records(str(tmp_path / name))


def test_a_line_that_breaks_off_is_malformed_at_its_end(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": \n{"text": "b"}\n')
    with pytest.raises(ValueError, match="line 1: malformed JSON, Expecting value at character 10"):
        load_records(str(file))


def test_a_malformed_array_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('[\n{"text": "a"},\n{"text" "b"}]')
    with pytest.raises(ValueError, match=r"a\.json, line 3: malformed JSON"):
        load_records(str(file))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'["text"]', r"line 1: a list, not a JSON object"),
        (b'{"text": "\xff"}', r"line 1: not UTF-8"),
        (b'{"text": ["a"]}', r"line 1: column 'text', message 0: a str, not a message"),
        (b'{"text": 3}', r"line 1: column 'text' holds a int, not text or messages"),
        (
            b'{"prompt": "p", "chosen": "c", "rejected": "r", "margin": "much"}',
            r"line 1: column 'margin' holds 'much', not a finite number",
        ),
    ],
)
def test_a_line_that_is_no_row_of_text_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(line)
    with pytest.raises(ValueError, match=message):
        load_records(str(file))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_missing_columns_name_file_columns_and_allowed_shapes(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, [{"question": "q", "answer": "a"}])
    with pytest.raises(ValueError, match="answer, question") as error:
        load_records(str(file))
    for part in (name, "prompt+completion", "prompt+chosen+rejected", "text"):
        assert part in str(error.value)


def test_a_later_row_that_lacks_a_column_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [*ROWS, {"prompt": "p", "chosen": "c"}])
    with pytest.raises(ValueError, match=r"line 4: column 'rejected' is missing.*chosen, prompt"):
        load_records(str(file))


def test_a_stage_is_refused_rows_that_it_cannot_use(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"text": "t"}])
    with pytest.raises(ValueError, match="stage reward cannot use: it takes prompt\\+chosen"):
        load_records(str(file), stage="reward")


@pytest.mark.parametrize(
    "content", [b"not gzip", gzip.compress(b'{"text": "a"}' * 99)[:-9]], ids=["other", "cut"]
)
def test_a_damaged_archive_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz: damaged"):
        load_records(str(file))


@pytest.mark.parametrize(("name", "kind"), [("a.parquet", "a Parquet"), ("a.arrow", "an Arrow")])
def test_a_damaged_table_is_named(tmp_path: Path, name: str, kind: str) -> None:
    file = tmp_path / name
    file.write_bytes(b"PAR1 nonsense")
    with pytest.raises(ValueError, match=f"{name}: not {kind} file"):
        load_records(str(file))


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_the_built_in_data_serves_every_stage(split, stage) -> None:
    source = load_source(sources.QUICKSTART, split=split, stage=stage)
    assert source is not None
    assert source.records
    assert not source.dropped
