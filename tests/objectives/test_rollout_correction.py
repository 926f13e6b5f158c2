"""Truncated importance weights against NumPy, and what they do to the policy loss."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.objectives.losses import policy_loss
from rlhf_jax.objectives.masked import length_mask
from rlhf_jax.objectives.rollout_correction import importance_weights

B, R = 4, 5
MASK = length_mask(jnp.asarray([5, 3, 1, 0]), R)


def normal(seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=(B, R)).astype(np.float32)


@pytest.mark.parametrize("threshold", [2.0, 1.0, 50.0])
def test_weights_are_cut_ratios_and_metrics_their_means(threshold, tolerance):
    """Token by token; what the mask leaves out may be anything."""
    train, rollout = normal(0), normal(1)
    dirty = np.where(MASK, rollout, np.nan)
    weights, metrics = jax.jit(partial(importance_weights, threshold=threshold))(train, dirty, MASK)
    expected, cut = np.ones((B, R)), []
    for b, r in zip(*np.nonzero(np.asarray(MASK)), strict=True):
        ratio = np.exp(np.float64(train[b, r]) - rollout[b, r])
        expected[b, r] = min(ratio, threshold)
        cut.append(ratio > threshold)
    np.testing.assert_allclose(weights, expected, **tolerance(np.float32))
    mean = expected[np.asarray(MASK)].mean()
    np.testing.assert_allclose(metrics["rollout/is_weight_mean"], mean, **tolerance(np.float32))
    np.testing.assert_allclose(metrics["rollout/is_truncated"], np.mean(cut))
    assert 0 < sum(cut) < len(cut) or threshold == 50


def test_an_unlikely_answer_does_not_overflow():
    weights, _ = importance_weights(
        jnp.zeros((1, 1)), jnp.full((1, 1), -1e4), jnp.ones((1, 1)), threshold=2.0
    )
    np.testing.assert_allclose(weights, 2.0, rtol=1e-6)


def test_each_tokens_loss_is_weighted_behind_the_clipping(tolerance):
    """`mean(w · max(-A·ratio, -A·clip(ratio)))` by hand; the other metrics stay as they are."""
    new, old, advantages = normal(0), normal(1), normal(2)
    weights: Any = np.exp(normal(3))
    loss, metrics = policy_loss(new, old, advantages, MASK, weights, clip=0.2)
    ratio = np.exp(np.float64(new) - old)
    each = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 0.8, 1.2))
    expected = (weights * each)[np.asarray(MASK)].mean()
    np.testing.assert_allclose(loss, expected, **tolerance(np.float32))
    plain_loss, plain = policy_loss(new, old, advantages, MASK, clip=0.2)
    assert abs(plain_loss - loss) > 0.1
    for name in plain.keys() - {"loss/policy_avg"}:
        np.testing.assert_array_equal(metrics[name], plain[name])


def test_the_corrected_gradient_is_that_of_the_true_policy(tolerance):
    """Of a softmax over a few actions: the expectation, over what another policy samples, of the
    weighted gradient is the policy gradient; without weights it is not.
    """
    logits, other = normal(4)[0], normal(5)[0]
    advantages = normal(6)[0]
    p, q = (jnp.exp(x) / jnp.exp(x).sum() for x in (logits, other))

    def surrogate(logits, weights):
        """Action a stands in row a, and its loss counts as often as the other policy draws it."""
        logp = jax.nn.log_softmax(logits)[:, None]
        ones = jnp.ones((R, 1), bool)
        chosen = (advantages * q * R)[:, None]
        return policy_loss(logp, jnp.log(p)[:, None], chosen, ones, weights, clip=0.2)[0]

    weights, _ = importance_weights(
        jnp.log(p)[:, None], jnp.log(q)[:, None], jnp.ones((R, 1)), threshold=1e3
    )
    true = jax.grad(lambda z: -(jax.nn.softmax(z) * advantages).sum())(jnp.asarray(logits))
    corrected = jax.grad(surrogate)(jnp.asarray(logits), weights)
    plain = jax.grad(surrogate)(jnp.asarray(logits), None)
    np.testing.assert_allclose(corrected, true, **tolerance(np.float32))
    assert np.abs(np.asarray(plain) - true).max() > 0.05
