"""The adaptive KL coefficient and the running moments of scores, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.objectives.adaptive import (
    AdaptiveKL,
    Control,
    Moments,
    adapt_kl_coef,
    add_to_moments,
    scale_scores,
)

SETTINGS = AdaptiveKL(target=6.0, horizon=1000)
BATCHES = [
    np.random.default_rng(n).normal(50 * n, 1 + n, size).astype(np.float32)
    for n, size in enumerate((1, 7, 4, 64))
]


def adapted(coef: float, kl: float, answers: float, settings: AdaptiveKL = SETTINGS) -> float:
    return float(adapt_kl_coef(jnp.float32(coef), jnp.float32(kl), jnp.float32(answers), settings))


@pytest.mark.parametrize(
    ("kl", "error"),
    [(6.0, 0.0), (6.6, 0.1), (5.4, -0.1), (60.0, 0.2), (0.0, -0.2), (-3.0, -0.2)],
)
def test_the_coefficient_follows_the_clipped_error(kl, error):
    """Ziegler et al.: β · (1 + clip(KL/target - 1, ±0.2) · n/horizon)."""
    assert adapted(0.2, kl, 64) == pytest.approx(0.2 * (1 + error * 64 / 1000), rel=1e-6)


def test_a_policy_whose_kl_falls_with_the_coefficient_is_steered_to_the_target():
    coef = 5.0
    for _ in range(400):
        coef = adapted(coef, 1.5 / coef, 64)
    assert 1.5 / coef == pytest.approx(SETTINGS.target, rel=1e-3)


@pytest.mark.parametrize("kl", [np.nan, np.inf])
def test_a_kl_that_is_not_finite_changes_nothing(kl):
    assert adapted(0.2, kl, 64) == np.float32(0.2)


def test_the_coefficient_never_turns_negative():
    assert adapted(0.2, 0.0, 1e6) == 0


@pytest.mark.parametrize("kwargs", [{"target": 0.0, "horizon": 5}, {"target": 1.0, "horizon": 0}])
def test_targets_that_cannot_be_steered_to_are_refused(kwargs):
    with pytest.raises(ValueError, match="cannot be steered to"):
        AdaptiveKL(**kwargs)


def empty() -> Moments:
    return Moments(jnp.float32(0), jnp.float32(0), jnp.float32(0))


def test_moments_of_batches_are_those_of_all_values():
    moments, seen = empty(), []
    for batch in BATCHES:
        moments = jax.jit(add_to_moments)(moments, batch, np.ones(len(batch)))
        seen += list(batch.astype(np.float64))
        assert moments.count == len(seen)
        np.testing.assert_allclose(moments.mean, np.mean(seen), rtol=1e-5, atol=1e-6)
        if len(seen) > 1:
            np.testing.assert_allclose(moments.std, np.std(seen), rtol=1e-4)


def test_the_deviation_is_1_until_values_differ():
    assert empty().std == 1
    moments = add_to_moments(empty(), jnp.full(5, 3.0), jnp.ones(5))
    assert (moments.mean, moments.std) == (3, 1)


def test_filler_rows_and_values_that_are_not_finite_are_left_out():
    x = np.array([1.0, np.nan, 3.0, np.inf, 100.0], np.float32)
    moments = add_to_moments(empty(), jnp.asarray(x), jnp.asarray([1.0, 1, 1, 1, 0]))
    assert (moments.count, moments.mean, moments.std) == (2, 2, 1)


@pytest.mark.parametrize("center", [True, False])
def test_scores_are_scaled_by_all_scores_so_far(center):
    """These among them; a reward function that pays 4 times as much earns the same."""
    control = Control(moments=empty())
    louder = Control(moments=empty())
    seen: list[float] = []
    for batch in BATCHES:
        valid = jnp.ones(len(batch))
        control, scaled = scale_scores(control, jnp.asarray(batch), valid, center=center)
        louder, same = scale_scores(louder, 4 * jnp.asarray(batch), valid, center=center)
        seen += list(batch.astype(np.float64))
        if len(seen) == 1:
            continue
        expected = (batch - (np.mean(seen) if center else 0)) / np.std(seen)
        np.testing.assert_allclose(scaled, expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(same, scaled, rtol=1e-4, atol=1e-5)


def test_without_moments_scores_stay_as_they_are():
    control, scores = scale_scores(Control(), jnp.asarray(BATCHES[1]), jnp.ones(7), center=True)
    np.testing.assert_array_equal(scores, BATCHES[1])
    assert control == Control()
