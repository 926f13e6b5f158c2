"""Which tokens may be drawn, one row and one token at a time in float64.

Written from the documentation of Hugging Face's `RepetitionPenaltyLogitsProcessor`,
`TopKLogitsWarper`, `TopPLogitsWarper` and `MinPLogitsWarper`, in the order in which `generate`
applies them: penalty, temperature, top-k, top-p, min-p.
"""

import math

import numpy as np


def penalised(logits: np.ndarray, seen: list[int], penalty: float) -> np.ndarray:
    """Each token that was there before: positive logits divided, negative ones multiplied."""
    out = logits.astype(np.float64)
    for token in set(seen):
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    return out


def probabilities(
    logits: np.ndarray, *, temperature: float, top_k: int = 0, top_p: float = 1, min_p: float = 0
) -> np.ndarray:
    """What is drawn from: 0 for what is left out."""
    weights = [math.exp(z / temperature - max(logits) / temperature) for z in logits]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = order[:top_k] if top_k else order
    total, mass, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if mass / total < top_p:
            nucleus.append(i)
        mass += weights[i]
    likeliest = max(weights[i] for i in nucleus)
    nucleus = [i for i in nucleus if weights[i] >= min_p * likeliest]
    total = sum(weights[i] for i in nucleus)
    return np.array([weights[i] / total if i in nucleus else 0.0 for i in range(len(weights))])


def kept(logits: np.ndarray, *, top_k: int = 0, top_p: float = 1, min_p: float = 0) -> np.ndarray:
    """Which tokens of a row may be drawn, by sorting it: equal logits stay or go together."""
    weights = np.exp(logits.astype(np.float64) - np.max(logits))
    values, group = np.unique(logits, return_inverse=True)
    sizes = np.bincount(group)[::-1]
    masses = np.bincount(group, weights)[::-1]  # of each value, the largest first
    allowed = np.ones(len(values), bool)
    if top_k:
        allowed &= np.cumsum(sizes) - sizes < top_k
    if top_p < 1:
        allowed &= np.cumsum(masses) - masses < top_p * masses[allowed].sum()
    if min_p > 0:
        allowed &= masses / sizes >= min_p
    return allowed[::-1][group]
