"""Figures about numbers: intervals, calibration, correlation. NumPy alone."""

from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95
BLOCK_SIZE = 2**22
"""Numbers drawn at once while resampling."""


@dataclass(frozen=True)
class Interval:
    """A mean with the ends of its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Bin:
    """Pairs whose confidence, the model's probability for its choice, lies in [low, high).

    Attributes:
        confidence: its mean.
        margin: mean distance of the two scores.
        accuracy: share of right choices.
    """

    low: float
    high: float
    count: int
    confidence: float
    margin: float
    accuracy: float


def bootstrap(values_N: np.ndarray, *, seed: int = 0) -> Interval:
    """The mean and its percentile interval over resampled rows.

    Of paired differences it is the interval of the difference (Efron & Tibshirani 1993, 13.3).
    """
    rng, count = np.random.default_rng(seed), len(values_N)
    block = max(BLOCK_SIZE // count, 1)
    means = [
        values_N[rng.integers(0, count, (min(block, RESAMPLES - start), count))].mean(1)
        for start in range(0, RESAMPLES, block)
    ]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return Interval(float(values_N.mean()), float(low), float(high))


def wins(differences_N: np.ndarray) -> np.ndarray:
    """1 where a difference is positive, 0 where negative, 1/2 where there is none."""
    return (np.sign(differences_N) + 1) / 2


def sigmoid(values: np.ndarray) -> np.ndarray:
    """`1 / (1 + exp(-x))`, without overflow."""
    return np.exp(-np.logaddexp(0, -values))


def calibration(margins_N: np.ndarray, num_bins: int) -> list[Bin]:
    """Bins of equal width over the confidence `sigmoid(|margin|)`, from 1/2 to 1; none is empty.

    `margins_N` are scores of the better answer minus those of the other one: Bradley and Terry's
    probability of a choice is the sigmoid of the margin.
    """
    confidence, right = sigmoid(np.abs(margins_N)), wins(margins_N)
    edges = np.linspace(0.5, 1, num_bins + 1)
    place = np.clip(np.digitize(confidence, edges) - 1, 0, num_bins - 1)
    bins = []
    for n in range(num_bins):
        here = place == n
        if here.any():
            bins.append(
                Bin(
                    low=float(edges[n]),
                    high=float(edges[n + 1]),
                    count=int(here.sum()),
                    confidence=float(confidence[here].mean()),
                    margin=float(np.abs(margins_N[here]).mean()),
                    accuracy=float(right[here].mean()),
                )
            )
    return bins


def calibration_error(bins: list[Bin]) -> float:
    """Expected calibration error: `Σ count · |accuracy - confidence| / Σ count`.

    Naeini et al. 2015; Guo et al. 2017 (https://arxiv.org/abs/1706.04599).
    """
    total = sum(each.count for each in bins)
    return sum(each.count * abs(each.accuracy - each.confidence) for each in bins) / total


def pearson(first_N: np.ndarray, second_N: np.ndarray) -> float | None:
    """The linear correlation; None where one of them does not vary."""
    if np.ptp(first_N) == 0 or np.ptp(second_N) == 0:
        return None
    return float(np.corrcoef(first_N, second_N)[0, 1])


def spearman(first_N: np.ndarray, second_N: np.ndarray) -> float | None:
    """The correlation of ranks; None where one of them does not vary."""
    return pearson(ranks(first_N), ranks(second_N))


def ranks(values_N: np.ndarray) -> np.ndarray:
    """Ranks from 0 on; equal values share their mean rank."""
    _, place, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    last = np.cumsum(counts) - 1
    return (last - (counts - 1) / 2)[place]
