"""Scores that are made of length, of quality, or of both come apart again."""

from collections import defaultdict

import numpy as np
import pytest

from rlhf_jax.evaluation.lengths import Answers, at_equal_length, decompose, near_pairs


def answers(rng: np.random.Generator, mean_length: int, bonus: float, slope: float) -> Answers:
    """600 answers of 20 to 120 tokens, whose score is prompt + slope · length + bonus."""
    prompts = np.random.default_rng(7).normal(size=600)
    lengths = np.clip(rng.poisson(mean_length, 600) + rng.integers(-20, 20, 600), 20, 120)
    return Answers(prompts + slope * lengths + bonus, lengths)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def test_a_gain_of_length_alone_is_found_to_be_one(rng) -> None:
    before, after = answers(rng, 60, 0.0, 0.05), answers(rng, 75, 0.0, 0.05)
    parts = decompose(before, after)
    assert parts is not None
    assert parts.gain.value == pytest.approx(0.75, abs=0.05)
    # Inside a bin of ten the longer policy is still a little longer.
    assert abs(parts.at_equal_length.value) < 0.1 * parts.gain.value
    assert parts.length_share == pytest.approx(1, abs=0.1)
    linear = at_equal_length(before, after)
    assert linear is not None
    assert linear.value == pytest.approx(0, abs=1e-9)


def test_a_gain_that_no_length_explains_stays_whole(rng) -> None:
    before, after = answers(rng, 60, 0.0, 0.0), answers(rng, 75, 0.4, 0.0)
    parts, linear = decompose(before, after), at_equal_length(before, after)
    near = near_pairs(before, after)
    assert parts is not None
    assert linear is not None
    assert near is not None
    for got in (linear, near.gain):
        assert got.value == pytest.approx(0.4, abs=1e-9)
    assert parts.at_equal_length.low < 0.4 < parts.at_equal_length.high
    assert parts.from_length.low < 0 < parts.from_length.high


def test_the_parts_are_those_of_the_formula(rng) -> None:
    """Kitagawa's sums, written out over the bins that the result names."""
    before, after = answers(rng, 60, 0.0, 0.03), answers(rng, 70, 0.5, 0.02)
    parts = decompose(before, after)
    assert parts is not None
    by_bin = defaultdict(lambda: ([], []))
    for n, bin in enumerate(parts.bins):
        for side, policy in enumerate((before, after)):
            for score, length in zip(policy.scores_N, policy.lengths_N, strict=True):
                if bin.low <= length <= bin.high:
                    by_bin[n][side].append(score)
    assert sum(len(a) + len(b) for a, b in by_bin.values()) == 1200
    equal = length = 0.0
    for a, b in by_bin.values():
        equal += (len(a) + len(b)) / 1200 * (np.mean(b) - np.mean(a))
        length += (np.mean(a) + np.mean(b)) / 2 * (len(b) - len(a)) / 600
    assert parts.at_equal_length.value == pytest.approx(equal)
    assert parts.from_length.value == pytest.approx(length)
    assert parts.gain.value == pytest.approx(after.scores_N.mean() - before.scores_N.mean())
    assert len(parts.bins) == 10


def test_the_linear_estimate_is_the_fit_with_a_constant_for_every_prompt(rng) -> None:
    before, after = answers(rng, 60, 0.0, 0.03), answers(rng, 70, 0.5, 0.02)
    first, second = np.arange(40), np.arange(40, 80)
    cut = [Answers(a.scores_N[:40], a.lengths_N[:40]) for a in (before, after)]
    design = np.zeros((80, 42))
    design[first, first] = design[second, first] = 1  # a constant for every prompt
    design[second, 40] = 1
    design[:, 41] = np.concatenate([a.lengths_N for a in cut])
    scores = np.concatenate([a.scores_N for a in cut])
    gain = np.linalg.lstsq(design, scores)[0][40]
    got = at_equal_length(*cut)
    assert got is not None
    assert got.value == pytest.approx(gain)
    assert got.low < gain < got.high


def test_lengths_that_never_meet_give_no_comparison() -> None:
    short = Answers(np.zeros(50), np.full(50, 10))
    long = Answers(np.ones(50), np.full(50, 90))
    assert decompose(short, long) is None
    assert at_equal_length(short, long) is None
    assert near_pairs(short, long) is None


def test_an_interval_holds_the_truth_nineteen_times_of_twenty() -> None:
    """Of 100 experiments with noise; the bounds are three deviations of a binomial count."""
    held = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(20, 60, (2, 80))
        scores = 0.1 * lengths + rng.normal(size=(2, 80)) + np.array([[0.0], [0.5]])
        got = at_equal_length(Answers(scores[0], lengths[0]), Answers(scores[1], lengths[1]))
        assert got is not None
        held += got.low < 0.5 < got.high
    assert held >= 88
