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
