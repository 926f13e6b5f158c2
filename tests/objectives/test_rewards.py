import jax.numpy as jnp
import numpy as np

from rlhf_jax.objectives.masked import length_mask
from rlhf_jax.objectives.rewards import shape_scores, standardize_scores, token_rewards

LENGTHS = np.array([1, 3, 4, 0], np.int32)
SCORES = np.array([9.0, -9.0, 0.5, 7.0], np.float32)
ENDED = np.array([True, False, False, True])
R = 4


def test_each_token_pays_its_kl_and_the_last_one_earns_the_score(tolerance):
    logprobs, ref_logprobs = np.random.default_rng(0).normal(size=(2, 4, R)).astype(np.float32)
    mask_BR = length_mask(jnp.asarray(LENGTHS), R)
    rewards_BR = np.asarray(
        token_rewards(
            jnp.asarray(SCORES),
            jnp.asarray(logprobs),
            jnp.asarray(ref_logprobs),
            mask_BR,
            jnp.asarray(LENGTHS),
            jnp.asarray(ENDED),
            kl_coef=0.3,
            score_clip=5.0,
            missing_eos_penalty=2.0,
        )
    )
    expected = np.zeros((4, R))
    for row, score in zip(range(3), (5.0, -7.0, -1.5), strict=True):
        for slot in range(LENGTHS[row]):
            expected[row, slot] = -0.3 * (logprobs[row, slot] - ref_logprobs[row, slot])
        expected[row, LENGTHS[row] - 1] += score
    np.testing.assert_allclose(rewards_BR, expected, **tolerance(np.float32))


def test_clip_and_penalty_are_off_with_none():
    shaped = shape_scores(
        jnp.asarray(SCORES), jnp.asarray(ENDED), clip=None, missing_eos_penalty=None
    )
    np.testing.assert_array_equal(shaped, SCORES)


def test_standardised_scores_have_mean_0_and_std_1(tolerance):
    mean, std = float(SCORES.mean()), float(SCORES.std())
    standard = np.asarray(standardize_scores(jnp.asarray(SCORES), mean=mean, std=std))
    np.testing.assert_allclose([standard.mean(), standard.std()], [0, 1], **tolerance(np.float32))
