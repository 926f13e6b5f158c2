"""Generalised advantage estimation (Schulman et al. 2015, https://arxiv.org/abs/1506.02438)."""

import jax
import jax.numpy as jnp


def gae(
    rewards_BR: jax.Array,
    values_BR: jax.Array,
    mask_BR: jax.Array,
    *,
    gamma: float,
    lam: float,
) -> tuple[jax.Array, jax.Array]:
    """Advantages and returns, each [B, R] and 0 outside the mask.

        δ_t = r_t + γ V_{t+1} - V_t        A_t = δ_t + γλ A_{t+1}        G_t = A_t + V_t

    The value after the last token is 0. The mask of a row is a contiguous prefix.
    """
    mask_BR = mask_BR.astype(bool)
    rewards_BR = jnp.where(mask_BR, rewards_BR, 0.0)
    values_BR = jnp.where(mask_BR, values_BR, 0.0)
    after_last_B1 = jnp.zeros_like(values_BR[:, :1])
    next_values_BR = jnp.concatenate([values_BR[:, 1:], after_last_B1], axis=1)
    deltas_BR = rewards_BR + gamma * next_values_BR - values_BR

    def step(next_advantage_B: jax.Array, delta_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        advantage_B = delta_B + gamma * lam * next_advantage_B
        return advantage_B, advantage_B

    deltas_RB = deltas_BR.T
    _, advantages_RB = jax.lax.scan(step, jnp.zeros_like(deltas_RB[0]), deltas_RB, reverse=True)
    advantages_BR = advantages_RB.T
    return advantages_BR, advantages_BR + values_BR
