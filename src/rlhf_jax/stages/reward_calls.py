"""Calling reward functions: what they are given, and what they may return."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_jax.stages.reward_functions import RewardFunction, described

LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Answered:
    """What the functions judge: rows of equal number; `columns` of the data set by name."""

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]


def call(reward: RewardFunction, answered: Answered) -> np.ndarray:
    """float32 scores, NaN where the function does not judge a row.

    Raises:
        ValueError: the function raised, or did not return one finite number or None a row.
    """
    rows = len(answered.completions)
    try:
        returned = reward.function(
            prompts=list(answered.prompts),
            completions=list(answered.completions),
            completion_ids=[list(ids) for ids in answered.completion_ids],
            **{name: list(values) for name, values in answered.columns.items()},
        )
    except Exception as error:  # the function is the user's: anything can go wrong in it
        raise ValueError(
            f"reward function {reward.source} failed on {rows} answers with {described(error)}"
        ) from error
    expected = f"expected a list of {rows} numbers, one for each answer (None: not judged)"
    if isinstance(returned, np.ndarray) and returned.ndim == 1:
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        raise ValueError(f"reward function {reward.source} returned {shown(returned)}, {expected}")
    if len(returned) != rows:
        raise ValueError(
            f"reward function {reward.source} returned {len(returned)} scores, {expected}"
        )
    return np.array(
        [checked(reward, n, value, answered) for n, value in enumerate(returned)], np.float32
    )


def checked(reward: RewardFunction, row: int, value: object, answered: Answered) -> float:
    """One score as a float, None as NaN."""
    if value is None:
        return math.nan
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, int | float) and abs(number) <= LARGEST:
        return float(number)
    raise ValueError(
        f"reward function {reward.source} returned {shown(value)} for answer {row} "
        f"({str(answered.completions[row])[:60]!r}), expected a finite number, or None where it "
        "does not judge the answer"
    )


def shown(value: object) -> str:
    """A value in a message: itself, and its type where the value does not tell."""
    text = " ".join(repr(value).split())
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if isinstance(value, float) else f"{text} ({type(value).__name__})"


def weighted_sum(functions: Sequence[RewardFunction], scores_NB: np.ndarray) -> np.ndarray:
    """`sum_n weight_n · score_n`, float32 [B]; a function that does not judge a row adds 0."""
    weights = np.array([reward.weight for reward in functions], np.float32)
    judged = ~np.isnan(scores_NB)
    return (weights[:, None] * np.where(judged, scores_NB, 0)).sum(0, dtype=np.float32)
