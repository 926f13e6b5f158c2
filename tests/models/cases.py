"""Tiny models, one for each switch of the decoder, and random parameters for them."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from meshes.layout import Layout
from meshes.spec import ParamSpec
from rlhf_jax.models.config import ModelConfig, RopeScaling
from rlhf_jax.models.params import is_spec

OPT = ModelConfig(
    family="opt",
    vocab_size=120,
    width=64,
    num_layers=1,
    num_heads=8,
    num_kv_heads=8,
    head_size=8,
    mlp_width=100,
    max_positions=32,
    positions="learned",
    norm="layer_norm",
    activation="relu",
    embed_width=64,
    position_offset=2,
    eos_token_id=2,
)
"""Eight heads, so that every tensor-parallel size up to 8 fits; padded vocabulary and mlp."""

LLAMA = ModelConfig(
    family="llama",
    vocab_size=100,
    width=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_size=8,
    mlp_width=172,
    max_positions=32,
    positions="rope",
    norm="rms_norm",
    activation="silu_gated",
    embed_width=48,
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    tie_embeddings=False,
    eos_token_id=2,
)

MODELS = {
    "opt": replace(OPT, num_layers=2),
    "opt_post_norm": replace(OPT, num_layers=2, pre_norm=False, final_norm=False, embed_width=32),
    "llama": LLAMA,
    "llama3": replace(LLAMA, rope_theta=100.0, rope_scaling=RopeScaling(4.0, 1.0, 4.0, 16)),
    "mistral": replace(LLAMA, family="mistral", sliding_window=3),
}


def random_values(specs: Any, *, seed: int) -> Any:
    """NumPy float32 values for every parameter, biases and norms included; padding is zero.

    Matrices have a deviation of one over the root of their width, so that every part of a layer
    moves the result.
    """
    rng = np.random.default_rng(seed)

    def draw(spec: ParamSpec) -> np.ndarray:
        noise = rng.normal(size=spec.shape).astype(np.float32)
        value = noise / np.sqrt(spec.shape[-1]) if len(spec.shape) > 1 else 0.3 * noise
        if not spec.decay and is_scale(spec):
            value = 1 + value
        if spec.rows is not None:
            value[spec.rows :] = 0
        return value.astype(np.float32)

    return jax.tree.map(draw, specs, is_leaf=is_spec)


def is_scale(spec: ParamSpec) -> bool:
    """Whether a vector is a norm's scale: its initial value is 1."""
    return bool(spec.init(jax.random.key(0), (1,), np.dtype(np.float32))[0] == 1)


def put_params(values: Any, specs: Any, layout: Layout, dtype: DTypeLike = np.float32) -> Any:
    """Host values as parameters in `layout`; nothing is compiled."""

    def put(spec: ParamSpec, value: np.ndarray) -> jax.Array:
        value = value.astype(dtype)
        return jax.make_array_from_callback(
            value.shape, layout.param_sharding(spec), lambda index: value[index]
        )

    return jax.tree.map(put, specs, values, is_leaf=is_spec)
