"""Rotary positions against complex numbers, and Llama 3's scaling against its limits."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.models.config import RopeScaling
from rlhf_jax.models.rope import inverse_frequencies, rotate, turns
from tests.models.cases import LLAMA

K = 8


def test_pairs_turn_by_position_times_frequency(tolerance):
    """Entry i and entry i + K/2 are one complex number, turned by e^(i·position·frequency)."""
    x = np.random.default_rng(0).normal(size=(2, 5, 3, K)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [7, 8, 9, 30, 31]])
    frequency = 10000.0 ** (-np.arange(0, K, 2) / K)
    turned = (x[..., : K // 2] + 1j * x[..., K // 2 :]) * np.exp(
        1j * positions[..., None, None] * frequency
    )
    expected = np.concatenate([turned.real, turned.imag], -1)
    got = rotate(jnp.asarray(x), jnp.asarray(positions), LLAMA)
    np.testing.assert_allclose(got, expected, **tolerance(np.float32))


def test_scores_depend_on_the_distance_alone(tolerance):
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, K))

    def score(query: int, key: int):
        return jnp.sum(rotate(q, jnp.array([query]), LLAMA) * rotate(k, jnp.array([key]), LLAMA))

    np.testing.assert_allclose(score(3, 1), score(23, 21), **tolerance(np.float32))


def test_bfloat16_heads_are_turned_in_float32():
    x = jax.random.normal(jax.random.key(0), (1, 1, K)).astype(jnp.bfloat16)
    got = rotate(x, jnp.array([1000]), LLAMA)
    wide = rotate(x.astype(jnp.float32), jnp.array([1000]), LLAMA)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))


def test_turns_of_a_row_rotate_its_heads(tolerance):
    """Each lane with the lane half a head away, by cosines and signed sines; scaled ones, too."""
    x = jax.random.normal(jax.random.key(0), (3, 4, K))
    positions = jnp.array([0, 5, 31], jnp.int32)
    for cfg in (LLAMA, replace(LLAMA, rope_scaling=RopeScaling(4.0, 1.0, 4.0, 16))):
        cos, sin = (t[:, None] for t in turns(positions, cfg))
        got = x * cos + jnp.roll(x, K // 2, axis=-1) * sin
        np.testing.assert_allclose(got, rotate(x, positions, cfg), **tolerance(np.float32))


def test_llama3_scaling_slows_long_waves_keeps_short_ones_and_blends_between():
    """Llama 3.2 1B's numbers; wavelengths above 8192/1 and below 8192/4 are the limits."""
    scaling = RopeScaling(32.0, 1.0, 4.0, 8192)
    plain_cfg = replace(LLAMA, head_size=64, rope_theta=500000.0)
    plain = inverse_frequencies(plain_cfg)
    scaled = inverse_frequencies(replace(plain_cfg, rope_scaling=scaling))
    wavelength = 2 * np.pi / plain
    long, short = wavelength > 8192, wavelength < 8192 / 4
    np.testing.assert_allclose(scaled[long], plain[long] / 32)
    np.testing.assert_allclose(scaled[short], plain[short])
    between = ~long & ~short
    assert between.sum() >= 2
    for wave, old, new in zip(wavelength[between], plain[between], scaled[between], strict=True):
        smooth = (8192 / wave - 1) / (4 - 1)
        assert new == pytest.approx((1 - smooth) * old / 32 + smooth * old)
