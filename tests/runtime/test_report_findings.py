"""The warnings of a report: each appears for its reason alone, and not in a healthy run."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_jax.runtime.report.findings import correlation, fifth, find
from rlhf_jax.runtime.report.reading import read_run
from tests.runtime.runs import NUM_ROWS, ppo_rows, write_run


def titles(directory: Path) -> list[str]:
    return [finding.title for finding in find(read_run(directory))]


def test_a_healthy_run_warns_of_nothing(tmp_path: Path) -> None:
    assert titles(write_run(tmp_path, ppo_rows())) == []


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({"objective__kl": lambda n: math.exp(n / 10)}, "The reward rises while KL runs away"),
        ({"objective__kl": lambda n: -0.1 * n}, "KL to the reference is negative"),
        ({"response_length__clip_ratio": lambda n: 0.6}, "Most answers are cut off"),
        ({"response_length__clip_ratio": lambda n: n / 30}, "All answers are cut off"),
        ({"objective__scores_clipped": lambda n: 0.5}, "Many scores are cut off"),
        ({"policy__entropy_avg": lambda n: 1.5 * math.exp(-n / 8)}, "The entropy has collapsed"),
        ({"critic__vf_explained_var": lambda n: -0.3}, "The critic is worse than a constant"),
        ({"val__skipped": lambda n: float(n == 7)}, "Numbers were not finite"),
        (
            {"rollout__logprob_diff_mean": lambda n: 0.2},
            "Sampler and training disagree about probabilities",
        ),
        ({"objective__scores": lambda n: float(n % 2)}, "The reward is flat"),
        ({"objective__scores": lambda n: -0.1 * n}, "The reward fell"),
        (
            {
                "eval__objective__scores": lambda n: n / 10,
                "eval__sampled_right": lambda n: 0.1 + n / 800,
                "eval__sampled_wrong": lambda n: 0.4 + n / 100,
            },
            "The score rose, and wrong answers more than right ones",
        ),
        ({"policy__clipfrac_avg": lambda n: 0.4}, "Updates are clipped much"),
        (
            {"response_length__mean": lambda n: 20 + 5 * n},
            "Answers grow longer, and the reward with them",
        ),
    ],
)  # fmt: skip
def test_each_thing_that_goes_wrong_is_warned_of_alone(
    tmp_path: Path, changes: dict[str, Any], title: str
) -> None:
    assert titles(write_run(tmp_path, ppo_rows(**changes))) == [title]


def test_kl_that_has_settled_is_no_runaway(tmp_path: Path) -> None:
    settled = ppo_rows(objective__kl=lambda n: min(30.0, 3.0 * n))
    assert titles(write_run(tmp_path, settled)) == []


def test_a_score_that_rises_with_right_answers_is_fine(tmp_path: Path) -> None:
    rows = ppo_rows(
        eval__objective__scores=lambda n: n / 10,
        eval__sampled_right=lambda n: 0.1 + n / 100,
        eval__sampled_wrong=lambda n: 0.4 + n / 300,
    )
    assert titles(write_run(tmp_path, rows)) == []


@pytest.mark.parametrize(("slope", "warned"), [(0.02, True), (0.0, False)])
def test_length_is_blamed_where_it_goes_with_the_gain_of_the_samples(
    tmp_path: Path, slope: float, warned: bool
) -> None:
    rng = np.random.default_rng(0)
    gains = rng.integers(0, 100, size=24)
    noise = rng.normal(0, 0.3, size=24)
    samples = [
        {"step": NUM_ROWS - 1, "prompt": f"p{n}", "answer": "a" * (20 + int(longer)),
         "score": 1 + slope * float(longer) + float(noise[n]), "answer_before": "a" * 20,
         "score_before": 0.0}
        for n, longer in enumerate(gains)
    ]  # fmt: skip
    rows = ppo_rows(response_length__mean=lambda n: 20 + 5 * n)
    run = read_run(write_run(tmp_path, rows, samples={"ppo": samples}))
    (found, *_) = [*find(run), None]
    assert (found is not None) == warned
    if found is not None:
        expected = np.corrcoef(gains, [row["score"] for row in samples])[0, 1]
        assert f"gains over 24 samples: {expected:.2f}" in found.seen


def test_a_metric_that_was_not_finite_is_named(tmp_path: Path) -> None:
    rows = ppo_rows()
    rows[5] |= {"objective/kl": None, "nonfinite": ["objective/kl"]}
    (finding,) = find(read_run(write_run(tmp_path, rows)))
    assert (finding.title, finding.seen) == (
        "Numbers were not finite",
        "not finite: objective/kl",
    )


def test_steps_skipped_between_rows_are_known_from_the_summary(tmp_path: Path) -> None:
    rows = [{"stage": "sft", "step": 10, "time": 1.0, "loss": 1.0, "skipped": 0.0}]
    run = write_run(tmp_path, rows, summary={"sft": {"skipped": 3}})
    (finding,) = find(read_run(run))
    assert finding.seen == "3 steps skipped in all"


@pytest.mark.parametrize(
    ("stage", "name", "values", "title"),
    [
        ("reward", "eval/accuracy", [0.0, 0.52], "Held-out preferences are guessed"),
        ("reward", "eval/accuracy", [0.0, 0.7], None),
        ("dpo", "eval/rewards/accuracies", [0.0, 0.5], "Held-out preferences are guessed"),
        ("sft", "eval/cross_entropy", [3.0, 1.0, 1.2], "The held-out loss has risen"),
        ("sft", "eval/cross_entropy", [3.0, 1.0, 1.01], None),
        ("sft", "eval/cross_entropy", [5.9, 9.5], "The held-out loss has risen"),
        ("sft", "eval/cross_entropy", [5.9], None),
    ],
)
def test_warnings_of_the_other_stages(
    tmp_path: Path, stage: str, name: str, values: list[float], title: str | None
) -> None:
    rows = [{"stage": stage, "step": n, "time": 1.0, name: v} for n, v in enumerate(values)]
    assert titles(write_run(tmp_path, rows)) == ([title] if title else [])


@pytest.mark.parametrize(
    ("losses", "held_out", "warned"),
    [
        ([3.0, 1.0, 0.5], 1.1, True),
        ([3.0, 1.0, 0.5], 0.9, False),  # not twice as high
        ([3.0, 0.1, 0.01], 0.1, False),  # twice as high, but not by 0.1
        ([3.0, 1.0, 0.5, 0.1], 0.9, False),  # what was learned after the evaluation does not count
    ],
)
def test_two_evaluations_tell_a_held_out_loss_far_above_the_training_loss(
    tmp_path: Path, losses: list[float], held_out: float, warned: bool
) -> None:
    rows = [{"stage": "sft", "step": n, "time": 1.0, "loss": v} for n, v in enumerate(losses, 1)]
    rows[2]["eval/cross_entropy"] = held_out
    first = {"stage": "sft", "step": 0, "time": 1.0, "eval/cross_entropy": 3.0}
    found = titles(write_run(tmp_path, [first, *rows]))
    assert found == ["The held-out loss is far above the training loss"] * warned


@pytest.mark.parametrize(
    ("stage", "rows", "seen"),
    [
        ("sft", 17, "37 of 54 train rows: 30 over 52 tokens, 7 empty"),
        ("ppo", 332, "37 of 369 train rows: 30 over 52 tokens, 7 empty"),
        ("ppo", 333, None),
    ],
)
def test_more_than_a_tenth_of_the_rows_dropped_is_warned_of(
    tmp_path: Path, stage: str, rows: int, seen: str | None
) -> None:
    read = {stage: {"rows": rows, "dropped": {"over 52 tokens": 30, "empty": 7}, "notes": []}}
    logged = [{"stage": stage, "step": 0, "time": 1.0}]
    found = find(read_run(write_run(tmp_path, logged, read=read)))
    assert [finding.seen for finding in found] == ([seen] if seen else [])
    assert all(("--ppo.max-prompt" in f.advice) == (stage == "ppo") for f in found)


def test_few_rows_say_nothing(tmp_path: Path) -> None:
    assert titles(write_run(tmp_path, ppo_rows(objective__scores=lambda n: 0.0)[:4])) == []


def test_correlation_is_pearsons() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 30))
    found = correlation(x.tolist(), (x + y).tolist())
    assert found == pytest.approx(np.corrcoef(x, x + y)[0, 1])
    assert correlation([1.0, 2.0, 3.0], [5.0, 5.0, 5.0]) is None


def test_fifths_are_the_ends_and_the_middle() -> None:
    values = list(range(10))
    assert (fifth(values, 0), fifth(values, 0.5), fifth(values, 1)) == ([0, 1], [4, 5], [8, 9])


@pytest.mark.timeout(20)
def test_correlating_many_rows_is_no_matter_of_minutes() -> None:
    x = [float(n) for n in range(30_000)]
    assert correlation(x, x) == pytest.approx(1)
