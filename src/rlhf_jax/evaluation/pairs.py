"""How well a reward model tells answers apart, how sure it may be, and what it goes by."""

from dataclasses import asdict
from typing import Any

import numpy as np

from rlhf_jax.data.tokenize import PairRow, tokenize_pairs
from rlhf_jax.evaluation.config import Reward
from rlhf_jax.evaluation.reading import check_any, read_rows
from rlhf_jax.evaluation.statistics import (
    bootstrap,
    calibration,
    calibration_error,
    pearson,
    spearman,
    wins,
)
from rlhf_jax.inference.places import find_reward
from rlhf_jax.inference.rows import window_of
from rlhf_jax.inference.session import Model, load

GROUPS = 5
"""Groups of equal size by length difference."""


def evaluate_reward(cfg: Reward) -> dict[str, Any]:
    """The report of a reward model on preference pairs.

    Raises:
        ValueError: a language model, more tokens than it has positions, or no pair is left.
        FileNotFoundError: no such model or data.
    """
    examples, read = read_rows(cfg.data, "reward", cfg.max_rows)
    judge = load_judge(cfg.model, cfg)
    positions = judge.config.max_positions
    rows, report = tokenize_pairs(
        examples,
        judge.tokenizer,
        max_length=window_of("--max-length", cfg.max_length, positions, positions),
        overlong=cfg.overlong,
        chat_format="template" if judge.tokenizer.chat_template else "human_assistant",
        stop_ids=judge.stop_ids,
    )
    check_any(rows, "pair", f"{read}; {report}")
    both = [row.chosen for row in rows] + [row.rejected for row in rows]
    scores = np.array(judge.score(both, batch_size=cfg.batch_size))
    return {
        "command": "reward",
        "model": judge.name,
        "data": read,
        "rows": str(report),
        "dtype": cfg.dtype,
        **figures(rows, scores[: len(rows)], scores[len(rows) :], cfg.bins, cfg.seed),
    }


def load_judge(name: str, cfg: Any) -> Model:
    """A reward model; ValueError where it is a language model."""
    judge = load(find_reward(name), mesh=cfg.mesh, dtype=cfg.dtype)
    if not judge.is_reward_model:
        raise ValueError(
            f"{judge.name} is a language model, it gives no scores: name a reward model, such as "
            "the reward/ of a run"
        )
    return judge


def figures(
    rows: list[PairRow], chosen_N: np.ndarray, rejected_N: np.ndarray, num_bins: int, seed: int
) -> dict[str, Any]:
    """Everything that scores and lengths of pairs say; lengths are tokens of the answers, with
    their end.
    """
    lengths_N, other_lengths_N = (
        np.array([len(tokens) - row.prompt_length for row, tokens in zip(rows, side, strict=True)])
        for side in ([row.chosen for row in rows], [row.rejected for row in rows])
    )
    margins_N, longer_N = chosen_N - rejected_N, lengths_N - other_lengths_N
    right_N, longer_right_N = wins(margins_N), wins(longer_N)
    bins = calibration(margins_N, num_bins)
    scores, lengths = np.append(chosen_N, rejected_N), np.append(lengths_N, other_lengths_N)
    return {
        "pairs": len(rows),
        "equal_scores": int((margins_N == 0).sum()),
        "accuracy": asdict(bootstrap(right_N, seed=seed)),
        "longer_wins_accuracy": asdict(bootstrap(longer_right_N, seed=seed)),
        "accuracy_over_longer_wins": asdict(bootstrap(right_N - longer_right_N, seed=seed)),
        "loss": float(np.logaddexp(0, -margins_N).mean()),
        "margin": {"mean": float(margins_N.mean()), "std": float(margins_N.std())},
        "score": {
            "chosen_mean": float(chosen_N.mean()),
            "rejected_mean": float(rejected_N.mean()),
            "std": float(scores.std()),
        },
        "calibration": {
            "error": calibration_error(bins),
            "bins": [asdict(each) for each in bins],
        },
        "length": {
            "score_pearson": pearson(scores, lengths),
            "score_spearman": spearman(scores, lengths),
            "margin_difference_pearson": pearson(margins_N, longer_N),
            "prefers_longer": prefers_longer(margins_N, longer_N),
            "by_difference": by_difference(right_N, longer_N),
        },
    }


def prefers_longer(margins_N: np.ndarray, longer_N: np.ndarray) -> float | None:
    """How often the longer of two answers of different length gets the higher score."""
    differ = longer_N != 0
    return float(wins(margins_N * np.sign(longer_N))[differ].mean()) if differ.any() else None


def by_difference(right_N: np.ndarray, longer_N: np.ndarray) -> list[dict[str, Any]]:
    """Accuracy in groups of about equal size, by how much longer the better answer is. Equal
    differences stay together.
    """
    shares = np.arange(1, GROUPS + 1) / GROUPS
    ends = np.unique(np.quantile(longer_N, shares, method="inverted_cdf"))
    place = np.searchsorted(ends, longer_N)
    groups = []
    for n in range(len(ends)):
        longer = longer_N[place == n]
        groups.append(
            {
                "from": int(longer.min()),
                "to": int(longer.max()),
                "count": len(longer),
                "accuracy": float(right_N[place == n].mean()),
                "longer_wins_accuracy": float(wins(longer).mean()),
            }
        )
    return groups
