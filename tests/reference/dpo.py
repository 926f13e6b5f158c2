"""The DPO loss in float64 NumPy loops: the definition, and DeepSpeed-Chat's rule."""

import math

import numpy as np


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def pair_loss(margin: float, label_smoothing: float) -> float:
    """Cross-entropy of a label that is right with probability 1 - label_smoothing."""
    right = (1 - label_smoothing) * log_sigmoid(margin)
    return -right - label_smoothing * log_sigmoid(-margin)


def answer_logprob(logprobs: np.ndarray, prompt_length: int, length: int) -> float:
    """`logprobs[t]` is that of token t + 1; the answer is tokens prompt_length to length - 1."""
    return sum(float(logprobs[t - 1]) for t in range(max(prompt_length, 1), length))


def deepspeed_chat(
    chosen: np.ndarray,
    rejected: np.ndarray,
    logprobs: tuple[np.ndarray, np.ndarray],
    ref_logprobs: tuple[np.ndarray, np.ndarray],
    pad: int,
    beta: float,
    label_smoothing: float,
) -> float:
    """The mean loss of pairs, as `training/step2_dpo_finetuning/main.py` computes it.

    Log-probabilities `[B, T-1]`, of chosen and of rejected rows `[B, T]`. Everything counts whose
    token is not the pad id and stands where the two rows have parted, or later.
    """
    losses = []
    for row in range(len(chosen)):
        parted = [t for t in range(len(chosen[row])) if chosen[row][t] != rejected[row][t]]
        start = parted[0] if parted else 0
        sums = []
        for logps in (logprobs, ref_logprobs):
            for ids, values in zip((chosen[row], rejected[row]), logps, strict=True):
                kept = [t for t in range(max(start, 1), len(ids)) if ids[t] != pad]
                sums.append(sum(float(values[row][t - 1]) for t in kept))
        margin = beta * ((sums[0] - sums[2]) - (sums[1] - sums[3]))
        losses.append(pair_loss(margin, label_smoothing))
    return sum(losses) / len(losses)
