"""A linear model for tests of the train step: a matrix that decays, a bias that does not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshes.spec import Normal, ParamSpec
from rlhf_jax.engine.step import Metrics

SPECS = {
    "weight": ParamSpec((4, 3), ("mlp", None), Normal(1.0)),
    "bias": ParamSpec((3,), (None,), Normal(1.0), decay=False),
}


def parameters(dtype: Any = jnp.float32, seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=s.shape), dtype) for name, s in SPECS.items()}


def rows(num: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs and targets, and how many tokens each row counts: from none to three."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(num, 4)).astype(np.float32),
        "y": rng.normal(size=(num, 3)).astype(np.float32),
        "count": (np.arange(num) % 4).astype(np.float32),
    }


def num_tokens(batch: Any) -> jax.Array:
    return batch["count"].sum()


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, Metrics]:
    """The mean squared error over tokens."""
    weight, bias = (params[name].astype(jnp.float32) for name in ("weight", "bias"))
    error = batch["x"] @ weight + bias[None] - batch["y"]
    loss = (batch["count"] * jnp.square(error).sum(-1)).sum() / jnp.maximum(num_tokens(batch), 1)
    return loss, {"error": loss * 2}
