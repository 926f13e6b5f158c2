"""The report on a reward model, against loops over its scores."""

import itertools
import json
import math

import numpy as np
import pytest

from rlhf_jax.data.tokenize import PairRow
from rlhf_jax.evaluate import main
from rlhf_jax.evaluation.pairs import by_difference, figures

RNG = np.random.default_rng(1)


def words(count: int) -> str:
    return " " + " ".join(f"w{n}" for n in RNG.integers(4, 90, count))


@pytest.fixture
def pairs(tmp_path) -> list[dict[str, str]]:
    rows = [
        {"prompt": "w10 w11", "chosen": words(c), "rejected": words(r)}
        for c, r in RNG.integers(1, 12, (24, 2)).tolist()
    ]
    rows.append({"prompt": words(60), "chosen": words(9), "rejected": words(3)})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows[:-1]


def test_scores_are_the_model_s_and_figures_those_of_a_loop(
    scorer, directory_of, pairs, tmp_path, capsys
) -> None:
    target = tmp_path / "report.json"
    argv = [str(directory_of("llama_scorer")), str(tmp_path / "pairs.jsonl"), "--mesh=1x1"]
    assert main(["reward", *argv, f"--output={target}"]) == 0
    report = json.loads(target.read_text())
    texts = [[row["prompt"] + row[side] for row in pairs] for side in ("chosen", "rejected")]
    chosen, rejected = (np.array(scorer.score(each)) for each in texts)
    assert (report["pairs"], report["rows"]) == (24, "24 rows, 1 dropped (over 64 tokens)")
    assert report["accuracy"]["value"] == pytest.approx((chosen > rejected).mean())
    loss = np.mean([math.log(1 + math.exp(r - c)) for c, r in zip(chosen, rejected, strict=True)])
    assert report["loss"] == pytest.approx(loss, rel=1e-5)
    lengths = [[len(row[side].split()) for row in pairs] for side in ("chosen", "rejected")]
    longer = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(*lengths, strict=True)]
    assert report["longer_wins_accuracy"]["value"] == pytest.approx(np.mean(longer))
    difference = report["accuracy_over_longer_wins"]
    want = report["accuracy"]["value"] - report["longer_wins_accuracy"]["value"]
    assert difference["value"] == pytest.approx(want)
    assert difference["low"] < difference["value"] < difference["high"]
    scores = np.append(chosen, rejected)
    correlation = np.corrcoef(scores, np.concatenate(lengths))[0, 1]
    assert report["length"]["score_pearson"] == pytest.approx(correlation, abs=1e-5)
    assert f"{report['accuracy']['value']:.3f}" in capsys.readouterr().out


def test_more_tokens_than_positions_are_refused(directory_of, pairs, tmp_path, capsys) -> None:
    argv = [str(directory_of("llama_scorer")), str(tmp_path / "pairs.jsonl"), "--mesh=1x1"]
    assert main(["reward", *argv, "--max-length=65"]) == 1
    assert "--max-length=65 is more than the model's 64 positions" in capsys.readouterr().err


def rows_of(lengths: list[int], others: list[int]) -> list[PairRow]:
    return [
        PairRow(np.zeros(4 + c, np.int32), np.zeros(4 + r, np.int32), 4)
        for c, r in zip(lengths, others, strict=True)
    ]


def test_a_model_that_counts_tokens_is_found_out() -> None:
    """Its scores are the lengths: equal to the rule that the longer answer wins, everywhere."""
    lengths, others = (RNG.integers(1, 30, 200).tolist() for _ in range(2))
    rows = rows_of(lengths, others)
    found = figures(rows, np.array(lengths, float), np.array(others, float), 10, 0)
    assert found["accuracy_over_longer_wins"] == {"value": 0, "low": 0, "high": 0}
    assert found["length"]["score_pearson"] == pytest.approx(1)
    assert found["length"]["prefers_longer"] == 1
    for group in found["length"]["by_difference"]:
        assert group["accuracy"] == group["longer_wins_accuracy"]


def test_groups_hold_every_pair_once_and_equal_differences_together() -> None:
    longer = np.array([-7, -3, -3, 0, 0, 0, 0, 0, 0, 2, 2, 9])
    groups = by_difference(np.ones(len(longer)), longer)
    assert sum(group["count"] for group in groups) == len(longer)
    assert all(a["to"] < b["from"] for a, b in itertools.pairwise(groups))
    assert len(groups) > 2


def test_constant_scores_and_lengths_have_figures_too() -> None:
    found = figures(rows_of([3, 3], [3, 3]), np.zeros(2), np.zeros(2), 10, 0)
    assert found["accuracy"]["value"] == 0.5
    assert found["equal_scores"] == 2
    assert found["length"]["score_pearson"] is None
    assert found["length"]["prefers_longer"] is None
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{llama}", "{dir}/pairs.jsonl"], "is a language model, it gives no scores"),
        (["{scorer}", "{dir}/pairs.jsonl", "--max-length=2"], "no pair is left to evaluate"),
        (["{scorer}", "{dir}/nothing.jsonl"], "data set is empty"),
        (["{dir}", "{dir}/pairs.jsonl"], "holds no reward model: there is no reward/"),
    ],
)
def test_what_cannot_be_done_is_explained(
    argv, message, directory_of, pairs, tmp_path, capsys
) -> None:
    (tmp_path / "nothing.jsonl").write_text("")
    places = {
        "dir": tmp_path,
        "llama": directory_of("llama"),
        "scorer": directory_of("llama_scorer"),
    }
    assert main(["reward", *(each.format(**places) for each in argv), "--mesh=1x1"]) == 1
    assert message in capsys.readouterr().err
