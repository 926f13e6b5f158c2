import jax.numpy as jnp
import numpy as np

from rlhf_jax.objectives.masked import (
    last_mask,
    length_mask,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    take_last,
)

LENGTHS = np.array([0, 1, 4], np.int32)


def test_length_masks():
    np.testing.assert_array_equal(
        length_mask(jnp.asarray(LENGTHS), 4), [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    )
    np.testing.assert_array_equal(
        last_mask(jnp.asarray(LENGTHS), 4), [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]]
    )


def test_take_last_reads_the_last_real_entry():
    x_BT = jnp.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    np.testing.assert_array_equal(take_last(x_BT, jnp.asarray([2, 1, 0])), [2.0, 3.0, 0.0])


def random_array_and_mask() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(2.0, 3.0, (5, 7)).astype(np.float32), rng.random((5, 7)) < 0.6


def test_statistics_are_numpys_over_the_kept_entries_and_never_read_the_others(tolerance):
    x, mask = random_array_and_mask()
    x[~mask] = np.nan
    kept = x[mask].astype(np.float64)
    tol = tolerance(np.float32)
    for form in (jnp.asarray(mask), jnp.asarray(mask, jnp.float32)):
        np.testing.assert_allclose(masked_sum(jnp.asarray(x), form), kept.sum(), **tol)
        np.testing.assert_allclose(masked_mean(jnp.asarray(x), form), kept.mean(), **tol)
        np.testing.assert_allclose(masked_var(jnp.asarray(x), form), kept.var(), **tol)


def test_whiten_gives_mean_0_and_std_1(tolerance):
    x, mask = random_array_and_mask()
    whitened = np.asarray(masked_whiten(jnp.asarray(x), jnp.asarray(mask)))
    tol = tolerance(np.float32)
    np.testing.assert_allclose(whitened[mask].mean(), 0.0, **tol)
    np.testing.assert_allclose(whitened[mask].std(), 1.0, **tol)
    assert not whitened[~mask].any()


def test_an_empty_mask_gives_zeros():
    x, mask = jnp.full((2, 3), jnp.nan), jnp.zeros((2, 3), bool)
    for result in (masked_mean(x, mask), masked_var(x, mask), masked_whiten(x, mask)):
        assert not np.asarray(result).any()
