"""Windows count every token once, and perplexity is that of the golden log-probabilities."""

import json
import math

import numpy as np
import pytest

from rlhf_jax.evaluate import main
from rlhf_jax.evaluation.perplexity import cut


@pytest.mark.parametrize("length", [1, 5, 7, 20, 64])
@pytest.mark.parametrize(("prefix", "overlap"), [([1], 0), ([1], 3), ([], 1), ([], 5)])
def test_every_token_counts_once_behind_what_stands_before_it(length, prefix, overlap) -> None:
    ids = list(range(100, 100 + length))
    windows = list(cut(ids, prefix, 8, overlap))
    assert all(len(window.tokens) <= 8 for window in windows)
    counted = [token for window in windows for token in window.tokens[window.first :]]
    assert counted == (ids if prefix else ids[1:])
    for window in windows:
        body = list(window.tokens[len(prefix) :])
        assert body == list(range(body[0], body[0] + len(body)))
        seen = window.first - len(prefix)
        assert seen >= overlap or body[0] == ids[0]


def run(tmp_path, *argv: str) -> dict:
    target = tmp_path / "report.json"
    assert main(["perplexity", *argv, "--mesh=1x1", f"--output={target}"]) == 0
    return json.loads(target.read_text())


def test_it_is_the_published_one_of_a_story(shared_data, tmp_path) -> None:
    directory = shared_data("stories260K-hf")
    golden = json.loads((directory / "golden.json").read_text())
    (tmp_path / "story.txt").write_text(golden["prompt"])
    report = run(tmp_path, str(directory), str(tmp_path / "story.txt"))
    assert report["tokens"] == len(golden["prompt_ids"]) - 1
    assert report["nll"] == pytest.approx(golden["prompt_mean_nll"], rel=1e-4)
    assert report["perplexity"] == pytest.approx(math.exp(golden["prompt_mean_nll"]), rel=1e-4)


def test_chunks_and_sliding_windows_are_those_of_the_logits(llama, directory_of, tmp_path) -> None:
    """The definition, window by window, from the logits of transformers' golden model."""
    words = np.random.default_rng(0).integers(4, 90, 50)
    (tmp_path / "text.txt").write_text(" ".join(f"w{word}" for word in words))
    argv = (str(directory_of("llama")), str(tmp_path / "text.txt"), "--window=16")
    for overlap, starts in ((0, [0, 15, 30, 45]), (10, list(range(0, 36, 5)))):
        total, counted = 0.0, 0
        for start in starts:
            row = [1, *words[start : start + 15]]
            (logits,) = llama.logits([row])
            for place in range(1, len(row)):
                if start + place > counted:
                    at = logits[place - 1]
                    total += math.log(np.exp(at).sum()) - at[row[place]]
                    counted += 1
        report = run(tmp_path, *argv, f"--overlap={overlap}")
        assert (report["tokens"], report["windows"]) == (50, len(starts)) == (counted, len(starts))
        assert report["nll"] == pytest.approx(total / 50, rel=1e-5)


def test_a_mark_of_the_byte_order_is_no_text(directory_of, tmp_path) -> None:
    for name, mark in (("plain.txt", b""), ("marked.txt", b"\xef\xbb\xbf")):
        (tmp_path / name).write_bytes(mark + b"w4 w5 w6")
    model = str(directory_of("llama"))
    plain, marked = (run(tmp_path, model, str(tmp_path / f"{n}.txt")) for n in ("plain", "marked"))
    assert marked["nll"] == plain["nll"]


def test_of_prompts_and_answers_the_answers_count(llama, directory_of, tmp_path) -> None:
    rows = [
        {"prompt": "w10 w11", "completion": "w12 w13 w14"},
        {"prompt": "w20", "completion": "w21"},
        {"prompt": "w30 " * 70, "completion": "w31"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = run(tmp_path, str(directory_of("llama")), str(tmp_path / "rows.jsonl"))
    assert report["rows"] == "2 rows, 1 dropped (over 64 tokens)"
    total = 0.0
    for row, first in (([1, 10, 11, 12, 13, 14, 2], 3), ([1, 20, 21, 2], 2)):
        (logits,) = llama.logits([row])
        for place in range(first, len(row)):
            total += math.log(np.exp(logits[place - 1]).sum()) - logits[place - 1][row[place]]
    assert report["tokens"] == 6
    assert report["nll"] == pytest.approx(total / 6, rel=1e-5)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{llama}", "{dir}/empty.txt"], "is empty: there is no text"),
        (["{llama}", "{dir}/none.txt"], "no such file"),
        (["{scorer}", "{dir}/text.txt"], "is a reward model, it has no perplexity"),
        (["{llama}", "{dir}/text.txt", "--window=65"], "more than the model's 64 positions"),
        (["{llama}", "quickstart", "--window=65"], "more than the model's 64 positions"),
        (["{llama}", "{dir}/text.txt", "--window=8", "--overlap=7"], "leaves nothing new"),
        (["{llama}", "{dir}/text.txt", "--max-rows=3"], "is one document: leave it out"),
        (["{dir}", "{dir}/text.txt"], "holds no trained policy"),
        (["{llama}", "{dir}/text.txt", "--output={dir}/no/file"], "in a directory that exists"),
    ],
)
def test_what_cannot_be_done_is_explained(argv, message, directory_of, tmp_path, capsys) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "text.txt").write_text("w10 w11")
    places = {
        "dir": tmp_path,
        "llama": directory_of("llama"),
        "scorer": directory_of("llama_scorer"),
    }
    assert main(["perplexity", *(each.format(**places) for each in argv), "--mesh=1x1"]) == 1
    assert message in capsys.readouterr().err
