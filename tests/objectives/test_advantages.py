from functools import partial

import jax
import numpy as np
import pytest

from rlhf_jax.objectives.advantages import gae
from tests.reference.advantages import lambda_advantages

LENGTHS = np.array([6, 4, 1, 0])
R = 6
MASK = np.arange(R)[None, :] < LENGTHS[:, None]

compute_gae = jax.jit(gae)


def random_rewards_and_values() -> tuple[np.ndarray, np.ndarray]:
    """The same in every test, with NaN outside the mask, which must never be read."""
    rewards, values = np.random.default_rng(0).normal(size=(2, len(LENGTHS), R)).astype(np.float32)
    return np.where(MASK, rewards, np.nan), np.where(MASK, values, np.nan)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (1.0, 0.0), (0.9, 1.0)])
def test_advantages_mix_the_n_step_estimates(gamma, lam, tolerance):
    rewards, values = random_rewards_and_values()
    advantages, returns = compute_gae(rewards, values, MASK, gamma=gamma, lam=lam)
    expected = np.zeros_like(rewards)
    for row, n in enumerate(LENGTHS):
        expected[row, :n] = lambda_advantages(rewards[row, :n], values[row, :n], gamma, lam)
    np.testing.assert_allclose(advantages, expected, **tolerance(np.float32))
    expected_returns = expected + np.where(MASK, values, 0)
    np.testing.assert_allclose(returns, expected_returns, **tolerance(np.float32))


def test_gamma_and_lambda_1_give_reward_to_go_minus_value(tolerance):
    rewards, values = random_rewards_and_values()
    advantages, returns = compute_gae(rewards, values, MASK, gamma=1.0, lam=1.0)
    to_go = np.cumsum(np.where(MASK, rewards, 0)[:, ::-1], axis=1)[:, ::-1]
    np.testing.assert_allclose(returns, to_go, **tolerance(np.float32))
    expected = np.where(MASK, to_go - values, 0)
    np.testing.assert_allclose(advantages, expected, **tolerance(np.float32))


def test_padding_changes_nothing():
    rewards, values = random_rewards_and_values()
    wide = [np.pad(x, ((0, 0), (0, 3))) for x in (rewards, values, MASK)]
    narrow_result = compute_gae(rewards, values, MASK, gamma=0.9, lam=0.7)
    wide_result = jax.jit(partial(gae, gamma=0.9, lam=0.7))(*wide)
    for narrow, padded in zip(narrow_result, wide_result, strict=True):
        np.testing.assert_array_equal(narrow, np.asarray(padded)[:, :R])
        assert not np.asarray(padded)[:, R:].any()
