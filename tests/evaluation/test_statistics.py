"""Figures against literal loops, and against what is known in advance."""

import math

import numpy as np
import pytest

from rlhf_jax.evaluation.statistics import (
    bootstrap,
    calibration,
    calibration_error,
    pearson,
    ranks,
    spearman,
    wins,
)

RNG = np.random.default_rng(0)


def test_an_interval_has_the_width_of_the_normal_one() -> None:
    """For many rows the bootstrap's ends are 1.96 standard errors away."""
    values = RNG.normal(3, 2, 4000)
    found = bootstrap(values)
    error = values.std() / math.sqrt(len(values))
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.1 * error)
    assert bootstrap(values) == found
    assert bootstrap(values, seed=1) != found


def test_an_interval_covers_the_truth_about_19_times_in_20() -> None:
    inside = 0
    for seed in range(60):
        sample = np.random.default_rng(seed).random(150) < 0.3
        found = bootstrap(sample.astype(float), seed=seed)
        inside += found.low <= 0.3 <= found.high
    assert 51 <= inside <= 60


def test_a_paired_difference_is_tighter_than_two_intervals() -> None:
    common = RNG.normal(size=500)
    first, second = common + 0.1, common
    assert bootstrap(first - second).low > 0
    assert bootstrap(first).low < bootstrap(second).high


def test_a_constant_has_no_width() -> None:
    found = bootstrap(np.full(7, 0.25))
    assert (found.value, found.low, found.high) == (0.25, 0.25, 0.25)


def literal_calibration(margins: np.ndarray, num_bins: int) -> tuple[dict[int, list], float]:
    """The definition: a pair at a time, bins as lists."""
    bins: dict[int, list] = {}
    for margin in margins:
        confidence = 1 / (1 + math.exp(-abs(margin)))
        right = 1.0 if margin > 0 else 0.5 if margin == 0 else 0.0
        number = min(int((confidence - 0.5) / 0.5 * num_bins), num_bins - 1)
        bins.setdefault(number, []).append((confidence, right))
    error = 0.0
    for pairs in bins.values():
        confidence = sum(c for c, _ in pairs) / len(pairs)
        accuracy = sum(r for _, r in pairs) / len(pairs)
        error += len(pairs) / len(margins) * abs(accuracy - confidence)
    return bins, error


@pytest.mark.parametrize("num_bins", [1, 4, 10])
def test_calibration_is_the_definition_s(num_bins: int) -> None:
    margins = np.append(RNG.normal(0.4, 1.5, 400), [0.0, 30.0, -800.0])
    bins, error = literal_calibration(margins[:-1], num_bins)
    found = calibration(margins[:-1], num_bins)
    assert [each.count for each in found] == [len(bins[n]) for n in sorted(bins)]
    for each, number in zip(found, sorted(bins), strict=True):
        assert each.accuracy == pytest.approx(np.mean([right for _, right in bins[number]]))
        assert each.low <= each.confidence <= each.high
    assert calibration_error(found) == pytest.approx(error)
    assert math.isfinite(calibration_error(calibration(margins, num_bins)))


def test_a_true_model_is_calibrated_and_a_bold_one_is_not() -> None:
    """Choices that are right as often as the margin says."""
    margins = RNG.normal(0, 2, 40_000)
    right = RNG.random(len(margins)) < 1 / (1 + np.exp(-np.abs(margins)))
    signed = np.where(right, np.abs(margins), -np.abs(margins))
    assert calibration_error(calibration(signed, 10)) < 0.01
    assert calibration_error(calibration(5 * signed, 10)) > 0.1


def test_correlations_are_numpy_s_and_known_ones() -> None:
    x = RNG.normal(size=50)
    y = x + RNG.normal(size=50)
    assert pearson(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert spearman(x, np.exp(x)) == pytest.approx(1)
    assert spearman(x, -(x**3)) == pytest.approx(-1)
    assert pearson(x, np.ones(50)) is None
    assert ranks(np.array([5, 1, 5, 3])).tolist() == [2.5, 0, 2.5, 1]


def test_ties_are_half_won() -> None:
    assert wins(np.array([2.0, 0.0, -1e-9])).tolist() == [1, 0.5, 0]
