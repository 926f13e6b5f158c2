import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.objectives.kl import KLKind, approx_kl, kl_estimate


def test_k1_is_the_difference_and_k3_is_never_negative(tolerance):
    logprobs, ref_logprobs = -5 * jax.random.uniform(jax.random.key(0), (2, 1000))
    k1 = kl_estimate(logprobs, ref_logprobs, "k1")
    k3 = kl_estimate(logprobs, ref_logprobs, "k3")
    np.testing.assert_array_equal(k1, logprobs - ref_logprobs)
    assert (np.asarray(k3) >= 0).all()
    difference = np.asarray(logprobs, np.float64) - np.asarray(ref_logprobs, np.float64)
    expected = np.exp(-difference) - 1 + difference
    np.testing.assert_allclose(k3, expected, **tolerance(np.float32))


def test_k3_of_a_small_difference_keeps_its_digits():
    """`eˣ - 1` written plainly has none left in float32."""
    small = jnp.float32(1e-4)
    np.testing.assert_allclose(kl_estimate(small, jnp.float32(0), "k3"), 5e-9, rtol=2e-2)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_both_are_unbiased(kind: KLKind, tolerance):
    """Their expectation under the policy is the KL of the two categorical distributions."""
    rng = np.random.default_rng(0)
    policy, reference = rng.dirichlet(np.ones(6), 2)
    expected = np.sum(policy * np.log(policy / reference))
    log_policy, log_reference = (jnp.log(jnp.asarray(p, jnp.float32)) for p in (policy, reference))
    estimate = kl_estimate(log_policy, log_reference, kind)
    np.testing.assert_allclose(np.sum(policy * estimate), expected, **tolerance(np.float32))


def test_an_unknown_estimator_is_named():
    with pytest.raises(ValueError, match='"k1" or "k3"'):
        kl_estimate(jnp.zeros(1), jnp.zeros(1), "k2")  # pyright: ignore[reportArgumentType]


def test_approx_kl_is_half_the_mean_square_and_0_without_an_update():
    logprobs, mask = jnp.asarray([1.0, 3.0, 9.0]), jnp.asarray([True, True, False])
    np.testing.assert_allclose(approx_kl(logprobs, jnp.zeros(3), mask), 2.5)
    assert approx_kl(logprobs, logprobs, mask) == 0
