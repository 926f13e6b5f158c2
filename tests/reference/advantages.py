"""The n-step definition of generalised advantages, in float64 NumPy loops, for one row."""

import numpy as np


def n_step_advantage(
    rewards: np.ndarray, values: np.ndarray, start: int, n: int, gamma: float
) -> float:
    """`Σ_{k<n} γᵏ r + γⁿ V - V(start)`: n rewards, then the value; rows end in a value of 0."""
    stop = min(start + n, len(rewards))
    total = sum(gamma ** (t - start) * rewards[t] for t in range(start, stop))
    bootstrap = gamma ** (stop - start) * values[stop] if stop < len(rewards) else 0.0
    return total + bootstrap - values[start]


def lambda_advantages(
    rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """`(1 - λ) Σ_n λⁿ⁻¹ A⁽ⁿ⁾`, where the last n, which sees the end, has all the weight left."""
    advantages = []
    for start in range(len(rewards)):
        last = len(rewards) - start
        weights = [(1 - lam) * lam ** (n - 1) for n in range(1, last)] + [lam ** (last - 1)]
        estimates = [n_step_advantage(rewards, values, start, n, gamma) for n in range(1, last + 1)]
        advantages.append(sum(w * a for w, a in zip(weights, estimates, strict=True)))
    return np.array(advantages)
