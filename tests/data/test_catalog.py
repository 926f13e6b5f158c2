"""Every data set of the catalog reads a row as its makers wrote it.

The rows have the fields of the data sets' cards; what DeepSpeed-Chat makes of its own is written
out here by hand from `raw_datasets.py`.
"""

import json
from pathlib import Path

import datasets
import pytest

from rlhf_jax.data.catalog import CATALOG
from rlhf_jax.data.reading import naming_of
from rlhf_jax.data.records import Dialogue, Example, Message, Record, Stage
from rlhf_jax.data.sources import load_source


def turns(*contents: str) -> tuple[Message, ...]:
    """What a person and the model say in turn."""
    return tuple(Message(("user", "assistant")[n % 2], text) for n, text in enumerate(contents))


def chat(*contents: str) -> list[dict[str, str]]:
    return [message._asdict() for message in turns(*contents)]


HH = {"prompt": "\n\nHuman: Hi\n\nAssistant:", "response": " y", "chosen": " y", "rejected": " n"}
PAIR = Record(" Human: Why? Assistant:", " good", " bad")
ONE = Record(" Human: Why? Assistant:", " good")
MIRACL = {
    "query_id": "1", "query": "Why?",
    "positive_passages": [{"docid": "1", "title": "t", "text": "good"}, {"text": "other"}],
    "negative_passages": [{"docid": "2", "title": "t", "text": "bad"}],
}  # fmt: skip
MKQA = {
    "query": "Why?", "queries": {"zh_cn": "Why?", "ja": "Why?", "en": "x"},
    "answers": {lang: [{"type": 1, "text": "good"}] for lang in ("zh_cn", "ja")},
}  # fmt: skip
SCORES = {"correctness": 4, "coherence": 4, "complexity": 2, "verbosity": 2}
TLDR = {
    "info": {"id": "a", "post": "P.", "title": "T", "subreddit": "dogs", "article": None},
    "summaries": [{"text": " bad", "policy": "x"}, {"text": " good", "policy": "y"}], "choice": 1,
}  # fmt: skip
TLDR_PROMPT = "SUBREDDIT: r/dogs\n\nTITLE: T\n\nPOST: P.\n\nTL;DR:"

FIXTURES: dict[str, tuple[list[dict], Example]] = {
    "Dahoas/rm-static": ([HH], Record(HH["prompt"], " y", " n")),
    "Dahoas/full-hh-rlhf": ([HH], Record(HH["prompt"], " y", " n")),
    "Dahoas/synthetic-instruct-gptj-pairwise": (
        [{"prompt": "Why?", "chosen": "good", "rejected": "bad"}],
        PAIR,
    ),
    "yitingxie/rlhf-reward-datasets": (
        [{"prompt": "Human: Why?\n\n", "chosen": "Assistant: good", "rejected": "Assistant: b"}],
        Record("Human: Why?\n\nAssistant:", " good", " b"),
    ),
    "openai/webgpt_comparisons": (
        [
            {
                "question": {"full_text": "Why?", "id": "1"}, "answer_0": "bad",
                "answer_1": "good [1, 2] (see [3])", "score_0": -0.5, "score_1": 0.5,
            }
        ],
        # The first citation ends at the first bracket that closes one.
        Record(" Human: Why? Assistant:", " good)", " bad"),
    ),
    "stanfordnlp/SHP": (
        [{"history": "Why?", "human_ref_A": "bad", "human_ref_B": "good", "labels": 0}],
        PAIR,
    ),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": (
        [{"prompt": "USER: Why? ASSISTANT:", "label": "good"}],
        Record("Human: Why? Assistant:", " good"),
    ),
    "wangrui6/Zhihu-KOL": ([{"INSTRUCTION": "Why?", "RESPONSE": "good", "SOURCE": "z"}], ONE),
    "Cohere/miracl-zh-queries-22-12": ([MIRACL], PAIR),
    "Cohere/miracl-ja-queries-22-12": ([MIRACL], PAIR),
    "Hello-SimpleAI/HC3-Chinese": (
        [{"question": "Why?", "human_answers": ["good", "x"], "chatgpt_answers": ["y"]}],
        ONE,
    ),
    "mkqa-Chinese": ([MKQA], ONE),
    "mkqa-Japanese": ([MKQA], ONE),
    "lmqg/qg_jaquad": ([{"question": "Why?", "sentence": "good", "answer": "g"}], ONE),
    "lmqg/qag_jaquad": ([{"questions": ["Why?", "x"], "paragraph": "good"}], ONE),
    "local/jsonfile": (
        [{"prompt": "Human: Why? Assistant:", "chosen": "good", "rejected": "bad"}],
        PAIR,
    ),
    "ultrafeedback_binarized": (
        [
            {
                "prompt": "Why?", "prompt_id": "1", "messages": chat("Why?", "good"),
                "chosen": chat("Why?", "good"), "rejected": chat("Why?", "bad"),
                "score_chosen": 8.5, "score_rejected": 6.0,
            }
        ],
        Dialogue(turns("Why?"), turns("", "good")[1:], turns("", "bad")[1:], margin=0.25),
    ),
    "nvidia/HelpSteer": (
        [
            {"prompt": "Why?", "response": text, "helpfulness": n, **SCORES}
            for text, n in (("fair", 2), ("bad", 1), ("good", 4))
        ],
        Dialogue(turns("Why?"), turns("", "good")[1:], turns("", "bad")[1:], margin=0.75),
    ),
    "nvidia/HelpSteer2": (
        [
            {
                "prompt": "Hi\n<extra_id_1>Assistant\nHello\n<extra_id_1>User\nWhy?",
                "response": text, "helpfulness": 3, **SCORES, "correctness": n,
            }
            for text, n in (("bad", 1), ("good", 4))
        ],
        Dialogue(turns("Hi", "Hello", "Why?"), turns("", "good")[1:], turns("", "bad")[1:], 0.0),
    ),
    "nvidia/HelpSteer2-preference": (
        [{"prompt": "Why?", "response_1": "bad", "response_2": "good", "preference_strength": 2}],
        Dialogue(turns("Why?"), turns("", "good")[1:], turns("", "bad")[1:], margin=2 / 3),
    ),
    "openai/summarize_from_feedback": ([TLDR], Record(TLDR_PROMPT, " good", " bad")),
    "hh-rlhf-chat": (
        [
            {
                "chosen": "\n\nHuman: Why?\n\nAssistant: good",
                "rejected": "\n\nHuman: Why?\n\nAssistant: bad",
            }
        ],
        Dialogue(turns("Why?"), turns("", "good")[1:], turns("", "bad")[1:]),
    ),
    "gsm8k": (
        [{"question": "Why?", "answer": "good"}],
        Dialogue(turns("Why?"), turns("", "good")[1:]),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def write(file: Path, rows: list[dict]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


def read(path: str, stage: Stage) -> list[Example]:
    source = load_source(path, split="train", stage=stage)
    assert source is not None
    return source.records


def test_every_entry_has_rows_here() -> None:
    assert [entry.name for entry in CATALOG] == list(FIXTURES)


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("form", ["json", "arrow"])
def test_an_entry_reads_its_rows(tmp_path: Path, name: str, form: str) -> None:
    rows, expected = FIXTURES[name]
    path = tmp_path / name
    if form == "json":
        write(path / "train.jsonl", rows)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    assert read(str(path), "sft") == [expected]


@pytest.mark.parametrize("name", FIXTURES)
def test_a_stage_without_what_it_needs_is_refused(tmp_path: Path, name: str) -> None:
    rows, expected = FIXTURES[name]
    path = write(tmp_path / name / "train.jsonl", rows)
    if expected.rejected is not None:
        assert read(path, "reward") == [expected]
        return
    with pytest.raises(ValueError, match=f"{name} has no pairs, which stage reward needs"):
        read(path, "reward")


def test_a_name_in_front_of_a_path_reads_it_as_that_data_set(tmp_path: Path) -> None:
    rows, expected = FIXTURES["stanfordnlp/SHP"]
    path = write(tmp_path / "mine.jsonl", rows)
    assert read(f"stanfordnlp/SHP@{path}", "reward") == [expected]
    wrong = write(tmp_path / "wrong.jsonl", [HH])
    with pytest.raises(ValueError, match="a row of stanfordnlp/SHP has the columns labels, his"):
        read(f"stanfordnlp/SHP@{wrong}", "reward")
    with pytest.raises(FileNotFoundError, match="Names in front of @ are columns, Dahoas/rm-st"):
        read(f"nobody/knows@{path}", "reward")


def test_rows_without_the_columns_of_a_named_data_set_are_read_by_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "gsm8k-mine.jsonl", [{"prompt": "p", "completion": " c"}])
    assert read(path, "sft") == [Record("p", " c")]
    name = "Dahoas/synthetic-instruct-gptj-pairwise"
    marked = write(tmp_path / name / "train.jsonl", FIXTURES[name][0])
    assert read(f"columns@{marked}", "sft") == [Record("Why?", "good", "bad")]


def test_the_longest_name_in_a_path_wins() -> None:
    names = ["nvidia/HelpSteer", "nvidia/HelpSteer2", "nvidia/HelpSteer2-preference"]
    for name in names:
        entry = naming_of(f"/data/{name}/train.jsonl").entry
        assert entry is not None
        assert entry.name == name


def test_reward_functions_get_the_columns_that_an_entry_keeps(tmp_path: Path) -> None:
    path = write(tmp_path / "gsm8k.jsonl", [{"question": "Why?", "answer": "1"}])
    assert [dict(record.columns) for record in read(path, "ppo")] == [{"answer": "1"}]
    assert not any(record.columns for record in read(path, "sft"))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("wangrui6/Zhihu-KOL", {"RESPONSE": None}, "a value is null"),
        ("Cohere/miracl-ja-queries-22-12", {"negative_passages": []}, "no negative_passages[0]"),
        ("nvidia/HelpSteer2-preference", {"preference_strength": 0}, "neither answer is better"),
        ("openai/webgpt_comparisons", {"score_0": None}, "no number score_0"),
        ("yitingxie/rlhf-reward-datasets", {"chosen": "good"}, "no assistant turn"),
        ("pvduy/sharegpt_alpaca_oa_vicuna_format", {"prompt": ""}, "no prompt"),
        ("openai/summarize_from_feedback", {"info": {"subreddit": "a", "title": "b"}}, "no info"),
    ],
)
def test_rows_that_say_nothing_are_dropped_and_counted(
    tmp_path: Path, name: str, changes: dict, reason: str
) -> None:
    row, expected = FIXTURES[name][0][0], FIXTURES[name][1]
    path = write(tmp_path / name / "train.jsonl", [row, row | changes])
    source = load_source(path, split="train", stage="sft")
    assert source is not None
    assert source.records == [expected]
    ((why, count),) = source.dropped.items()
    assert (why[: len(reason)], count) == (reason, 1)
    assert f"1 rows of {name}" in str(source)
    assert f", 1 dropped ({reason}" in str(source)


def test_equal_scores_make_no_pair(tmp_path: Path) -> None:
    row = {"prompt": "Why?", "response": "a", "helpfulness": 1, **SCORES}
    rows = [row, row | {"response": "b"}, row | {"prompt": "Q", "helpfulness": None}]
    good, expected = FIXTURES["nvidia/HelpSteer2"]
    path = write(tmp_path / "nvidia/HelpSteer2" / "train.jsonl", [*rows, *good])
    source = load_source(path, split="train", stage="reward")
    assert source is not None
    assert source.dropped == {"neither answer is better": 1, "no number best.helpfulness": 1}
    assert source.records == [expected]


def test_an_entry_knows_where_its_rows_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, data_dir: str | None) -> object:
        asked.append((name, config, data_dir))
        rows = {"apple/mkqa": [MKQA], "openai/gsm8k": FIXTURES["gsm8k"][0]}
        key = "nvidia/HelpSteer2-preference" if data_dir else "ultrafeedback_binarized"
        table = datasets.Dataset.from_list(rows.get(name, FIXTURES[key][0]))
        split = "train_prefs" if "ultra" in name else "train"
        return datasets.DatasetDict({"train_sft": table.select([]), split: table})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for path in ("mkqa-Japanese", "gsm8k", "openai/gsm8k:socratic"):
        assert read(path, "sft")
    assert read("nvidia/HelpSteer2-preference", "reward")
    assert read("HuggingFaceH4/ultrafeedback_binarized", "reward")
    assert asked == [
        ("apple/mkqa", None, None),
        ("openai/gsm8k", "main", None),
        ("openai/gsm8k", "socratic", None),
        ("nvidia/HelpSteer2", None, "preference"),
        ("HuggingFaceH4/ultrafeedback_binarized", None, None),
    ]
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data/train.json", FIXTURES["local/jsonfile"][0])
    assert read("local/jsonfile", "reward") == [FIXTURES["local/jsonfile"][1]]
