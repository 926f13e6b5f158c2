"""Two models side by side: their answers are `generate`'s, their scores the judge's."""

import json
import shutil

import numpy as np
import pytest

import rlhf_jax
from rlhf_jax.evaluate import main
from rlhf_jax.evaluation import tables
from rlhf_jax.evaluation.compare import longest_answer, verdict
from rlhf_jax.evaluation.reading import DEFAULT_PROMPTS

FLAGS = ("--mesh=1x1", "--turn-format={}", "--max-new-tokens=6")
PROMPTS = ["w10 w11", "w40", "w20 w21 w22"]


@pytest.fixture
def compared(directory_of, tmp_path):
    """A function that compares the golden Llama and Mistral, and returns the report."""
    (tmp_path / "prompts.txt").write_text("\n".join([*PROMPTS, "", "w5 " * 60]))

    def run(*argv: str, flags: tuple[str, ...] = FLAGS) -> dict:
        names = [str(directory_of(name)) for name in ("llama", "mistral")]
        target = tmp_path / "report.json"
        given = (f"--prompts={tmp_path / 'prompts.txt'}", f"--output={target}")
        assert main(["compare", *names, *flags, *given, *argv]) == 0
        return json.loads(target.read_text())

    return run


def test_answers_and_scores_are_those_of_the_python_surface(
    compared, llama, scorer, directory_of, capsys
) -> None:
    report = compared(f"--judge={directory_of('llama_scorer')}")
    answers = llama.generate(PROMPTS, max_new_tokens=6, temperature=0.0)
    assert [row["prompt"] for row in report["samples"]] == PROMPTS
    assert [row["baseline"]["text"] for row in report["samples"]] == [a.text for a in answers]
    assert report["left_out"] == {"over_length": 1}
    prompts = [[1, 10, 11], [1, 40], [1, 20, 21, 22]]
    rows = [[*ids, *a.tokens] for ids, a in zip(prompts, answers, strict=True)]
    scores = [row["baseline"]["score"] for row in report["samples"]]
    np.testing.assert_allclose(scores, scorer.score(rows), rtol=1e-5, atol=1e-6)
    assert report["scores"]["baseline_mean"] == pytest.approx(np.mean(scores))
    better = [row["model"]["score"] > row["baseline"]["score"] for row in report["samples"]]
    assert report["scores"]["wins"] == sum(better)
    assert "another tokenizer" not in " ".join(report["notes"])
    assert "win rate" in capsys.readouterr().out


def test_the_share_of_answers_that_ended_is_no_count() -> None:
    side = {"name": "a", "mean_tokens": 8.0, "ended": 1.0}
    report = {"baseline": side, "model": side, "settings": {"max_new_tokens": 8}, "rows": 3}
    report |= {"samples": [], "equal_answers": 0, "prompts": "", "left_out": {}, "notes": []}
    with tables.console.capture() as captured:
        tables.show_compare(report, 0)
    (row,) = [line for line in captured.get().splitlines() if "ended by itself" in line]
    assert row.count("1.000") == 2


def test_a_judge_with_another_tokenizer_reads_text_and_it_is_said(
    compared, directory_of, tmp_path
) -> None:
    """Its ids run the other way; a row is the text and, where the answer ended, EOS."""
    judge = tmp_path / "judge"
    shutil.copytree(directory_of("llama_scorer"), judge)
    tokenizer = json.loads((judge / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {
        word: 93 - number if word.startswith("w") else number for word, number in vocab.items()
    }
    (judge / "tokenizer.json").write_text(json.dumps(tokenizer))
    report = compared(f"--judge={judge}")
    assert "another tokenizer" in " ".join(report["notes"])
    model = rlhf_jax.load(judge, mesh="1x1")
    assert model.tokenizer.encode("w4") == [1, 89]
    for row in report["samples"]:
        (score,) = model.score(
            [row["prompt"] + row["baseline"]["text"]], add_eos=row["baseline"]["ended"]
        )
        assert row["baseline"]["score"] == pytest.approx(score, rel=1e-5, abs=1e-6)


def test_prompts_that_a_template_refuses_are_counted(directory_of, tmp_path, capsys) -> None:
    """One template has no place for a system message; a turn of a tool is shown as it is."""
    strict, free = directory_of("llama"), directory_of("mistral")
    turns = "{% for m in messages %}{{ m['content'] + ' </s> ' }}{% endfor %}"
    (free / "chat_template.jinja").write_text(turns)
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    (strict / "chat_template.jinja").write_text(refusal + turns)
    talk = [("system", "w9"), ("user", "w4"), ("assistant", "w6"), ("tool", "w7"), ("user", "w8")]
    messages = [{"role": role, "content": content} for role, content in talk]
    prompts, target = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    rows = [{"prompt": messages}, {"prompt": messages[1:]}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["compare", str(strict), str(free), "--mesh=1x1", "--max-new-tokens=2"]
    assert main([*argv, f"--prompts={prompts}", f"--output={target}"]) == 0
    report = json.loads(target.read_text())
    assert report["left_out"] == {"refused_by_a_chat_template": 1}
    (shown,) = report["samples"]
    assert shown["prompt"] == "user: w4\n\nassistant: w6\n\ntool: w7\n\nuser: w8"
    prompts.write_text(json.dumps(rows[0]))
    assert main([*argv, f"--prompts={prompts}"]) == 1
    assert "the chat templates refuse them all" in capsys.readouterr().err


def test_a_model_against_itself_ties(compared, directory_of, tmp_path, capsys) -> None:
    """Six built-in prompts, asked as a transcript; no judge, no scores."""
    name = str(directory_of("llama"))
    target = tmp_path / "same.json"
    argv = ("--mesh=1x1", "--max-new-tokens=4", f"--output={target}", "--temperature=0.8")
    assert main(["compare", name, name, *argv]) == 0
    report = json.loads(target.read_text())
    assert [row["prompt"] for row in report["samples"]] == list(DEFAULT_PROMPTS)
    assert report["equal_answers"] == report["rows"] == len(DEFAULT_PROMPTS)
    assert "scores" not in report
    assert "no chat template" in capsys.readouterr().out


def test_without_a_limit_answers_have_the_room_that_prompts_leave(compared, capsys) -> None:
    """The prompt of 61 tokens leaves 3 of 64 and is left out; of the others the longest has 4."""
    report = compared(flags=FLAGS[:2])
    assert report["settings"]["max_new_tokens"] == 64 - 4
    assert report["left_out"] == {"over_length": 1}
    assert "answers of at most 60 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("positions", "lengths", "longest"),
    [
        (64, [10, 48], 16),
        (64, [10, 49], 54),
        (64, [49], 16),
        (2048, [10, 1948], 100),
        (2048, [10, 1949], 100),
        (150, [100, 113], 37),
        (2, [1], 1),
    ],
)
def test_the_room_for_an_answer(positions: int, lengths: list[int], longest: int) -> None:
    """100 tokens at most; a prompt that leaves less than a quarter of the positions is no limit."""
    assert longest_answer(positions, [[0] * length for length in lengths]) == longest


def test_wins_ties_and_losses() -> None:
    found = verdict(np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 2.0, 2.0, 6.0]), seed=0)
    assert (found["wins"], found["ties"], found["losses"]) == (2, 1, 1)
    assert found["win_rate"]["value"] == 0.625
    assert found["difference"]["value"] == 0.5


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{scorer}", "{llama}"], "is a reward model, it gives no answers"),
        (["{llama}", "{llama}", "--judge={llama}"], "is a language model, it gives no scores"),
        (["{llama}", "{llama}", "--prompts={dir}/empty.txt"], "is empty: write a prompt"),
        (["{llama}", "{llama}", "--prompts={dir}/none.txt"], "no such file"),
        (["{llama}", "{llama}", "--max-new-tokens=64"], "leaves no room for a prompt"),
        (
            ["{llama}", "{llama}", "--prompts={dir}/long.txt"],
            "beside an answer of 16 tokens none fits into the 64 positions",
        ),
    ],
)
def test_what_cannot_be_done_is_explained(argv, message, directory_of, tmp_path, capsys) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "long.txt").write_text("w5 " * 48)
    places = {
        "dir": tmp_path,
        "llama": directory_of("llama"),
        "scorer": directory_of("llama_scorer"),
    }
    assert main(["compare", *(each.format(**places) for each in argv), "--mesh=1x1"]) == 1
    assert message in capsys.readouterr().err
