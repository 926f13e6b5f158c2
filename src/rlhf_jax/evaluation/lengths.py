"""How much of a gain is length: two policies' answers to the same prompts at matched length.

Reward models like long answers, and a policy that learns to write more gains without saying
anything better. Three estimates, none of which assumes what the others do; intervals resample
prompts (percentile bootstrap). NumPy alone.
"""

from dataclasses import dataclass

import numpy as np

from rlhf_jax.evaluation.statistics import CONFIDENCE, Interval, bootstrap

RESAMPLES = 2000
NUM_BINS, MIN_ANSWERS = 10, 10
NEAR = 0.1
"""Answers whose lengths differ by at most this share of the longer one count as equally long."""


@dataclass(frozen=True)
class Answers:
    """Scores and lengths in tokens of one policy's answers, prompt by prompt."""

    scores_N: np.ndarray
    lengths_N: np.ndarray


@dataclass(frozen=True)
class LengthBin:
    """Answers of `low` to `high` tokens; a share is of a policy's answers, a score their mean."""

    low: int
    high: int
    share_before: float
    share_after: float
    score_before: float
    score_after: float


@dataclass(frozen=True)
class Decomposition:
    """A gain cut in two: `gain = at_equal_length + from_length`, exactly.

    `length_share` is `from_length / gain`.
    """

    gain: Interval
    at_equal_length: Interval
    from_length: Interval
    length_share: float | None
    bins: list[LengthBin]


@dataclass(frozen=True)
class NearPairs:
    """The mean gain of the prompts whose two answers are equally long."""

    count: int
    gain: Interval


def decompose(before: Answers, after: Answers, *, seed: int = 0) -> Decomposition | None:
    """Kitagawa's decomposition over bins of length.

    With p the share of a policy's answers in a bin and m their mean score,

        gain = Σ (p_before + p_after) / 2 · (m_after - m_before)      at equal length
             + Σ (m_before + m_after) / 2 · (p_after - p_before)      from length

    Bins have about equal numbers of both policies' answers; neighbours are merged until each has
    `MIN_ANSWERS` of either. None where one bin is left: the lengths do not overlap.

    Kitagawa 1955, Components of a difference between two rates.
    """
    edges = merged_edges(before.lengths_N, after.lengths_N)
    if len(edges) < 2:
        return None
    weights = resamples(len(before.scores_N), seed)
    sides = [sums(answers, edges, weights) for answers in (before, after)]
    (count_0, total_0), (count_1, total_1) = sides
    with np.errstate(invalid="ignore"):  # a resample may leave a bin empty: it is left out below
        mean_0, mean_1 = total_0 / count_0, total_1 / count_1
    share_0, share_1 = (count / count.sum(1, keepdims=True) for count in (count_0, count_1))
    equal = ((share_0 + share_1) / 2 * (mean_1 - mean_0)).sum(1)
    length = ((mean_0 + mean_1) / 2 * (share_1 - share_0)).sum(1)
    gain = (equal + length)[0]
    starts = [int(min(before.lengths_N.min(), after.lengths_N.min())), *(edges[:-1] + 1)]
    return Decomposition(
        gain=interval(equal + length),
        at_equal_length=interval(equal),
        from_length=interval(length),
        length_share=float(length[0] / gain) if gain else None,
        bins=[
            LengthBin(int(low), int(high), *map(float, values))
            for low, high, *values in zip(
                starts, edges, share_0[0], share_1[0], mean_0[0], mean_1[0], strict=True
            )
        ],
    )


def merged_edges(before_N: np.ndarray, after_N: np.ndarray) -> np.ndarray:
    """The largest length of each bin, rising."""
    lengths = np.concatenate([before_N, after_N])
    shares = np.arange(1, NUM_BINS + 1) / NUM_BINS
    edges: list[int] = []
    start = -1
    for edge in np.unique(np.quantile(lengths, shares, method="inverted_cdf")).astype(int):
        here = [((side > start) & (side <= edge)).sum() for side in (before_N, after_N)]
        if min(here) >= MIN_ANSWERS:
            edges.append(int(edge))
            start = edge
    if edges:  # what is left behind the last one has too few answers: it joins that one
        edges[-1] = int(lengths.max())
    return np.array(edges)


def sums(
    answers: Answers, edges: np.ndarray, weights_RN: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of answers and sums of scores, [resamples, bins]."""
    place = np.searchsorted(edges, answers.lengths_N)
    inside = (place[:, None] == np.arange(len(edges))).astype(float)
    return weights_RN @ inside, weights_RN @ (inside * answers.scores_N[:, None])


def at_equal_length(before: Answers, after: Answers, *, seed: int = 0) -> Interval | None:
    """The gain that a score linear in length leaves: `b` of the least squares fit

        score_after - score_before = b + c · (length_after - length_before)

    Differences within a prompt take out what the prompt adds to both; it is the fit of all scores
    with a constant for every prompt. None where all lengths change alike.
    """
    score_N = after.scores_N - before.scores_N
    length_N = (after.lengths_N - before.lengths_N).astype(float)
    if np.ptp(length_N) == 0:
        return None
    weights_RN = resamples(len(score_N), seed) / len(score_N)
    mean_length, mean_score = weights_RN @ length_N, weights_RN @ score_N
    variance = weights_RN @ length_N**2 - mean_length**2
    covariance = weights_RN @ (length_N * score_N) - mean_length * mean_score
    with np.errstate(invalid="ignore", divide="ignore"):  # a resample may hold one length alone
        slope = covariance / variance
    return interval(mean_score - slope * mean_length)


def near_pairs(before: Answers, after: Answers, *, seed: int = 0) -> NearPairs | None:
    """Only the prompts whose two answers are about equally long; None with fewer than
    `MIN_ANSWERS` of them.
    """
    longer_N = np.maximum(before.lengths_N, after.lengths_N)
    near_N = np.abs(after.lengths_N - before.lengths_N) <= NEAR * longer_N
    if near_N.sum() < MIN_ANSWERS:
        return None
    gains = (after.scores_N - before.scores_N)[near_N]
    return NearPairs(int(near_N.sum()), bootstrap(gains, seed=seed))


def resamples(count: int, seed: int) -> np.ndarray:
    """How often each prompt is drawn, [1 + RESAMPLES, count]; the first row has each once."""
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    return np.concatenate([np.ones((1, count)), drawn])


def interval(values_R: np.ndarray) -> Interval:
    """Of an estimate, in front, and its resamples; those that are not finite are left out."""
    drawn = values_R[1:]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn[np.isfinite(drawn)], [tail, 1 - tail])
    return Interval(float(values_R[0]), float(low), float(high))
