"""Rotary position embedding in Hugging Face's convention (halves of a head are rotated)."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.models.config import ModelConfig, RopeScaling


def rotate(x: jax.Array, positions: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Heads `[..., heads, K]` rotated by their positions `[...]` (broadcast), in float32."""
    angle = positions[..., None, None] * jnp.asarray(inverse_frequencies(cfg), jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def turns(positions_B: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cosine and signed sine of each lane, `[B, K]`, at one position a row: lane i of a rotated
    head is `x[i] cos[i] + x[(i + K/2) mod K] sin[i]`.
    """
    angle = positions_B[:, None] * jnp.asarray(inverse_frequencies(cfg), jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1)


def inverse_frequencies(cfg: ModelConfig) -> np.ndarray:
    """One frequency for each pair of a head, `[K / 2]`."""
    frequency = cfg.rope_theta ** (-np.arange(0, cfg.head_size, 2) / cfg.head_size)
    return frequency if cfg.rope_scaling is None else scale_llama3(frequency, cfg.rope_scaling)


def scale_llama3(frequency: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / frequency
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (scaling.original_max_positions / wavelength - low) / (high - low)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * frequency / scaling.factor + blend * frequency
