"""What stands alone of a layer."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.layout import make_mesh, parse_mesh
from meshes.reshard import put_rows
from rlhf_jax.models.layers import MOST_COLUMNS, look_up
from rlhf_jax.models.params import compute_layout
from tests.models.cases import OPT

B, T = 16, 512


@pytest.mark.parametrize("width", [96, MOST_COLUMNS + 64])
@pytest.mark.parametrize(
    ("mesh_name", "inference_tp"), [("1x1", 1), ("8x1", 8), ("4x2", 2), ("4x2", 4), ("2x2x2", 2)]
)
def test_the_gradient_of_a_frequent_token_is_whole(
    mesh_name: str, inference_tp: int, width: int
) -> None:
    """Thousands of ones are as many in bfloat16, which would stop at 256; and the rest is the sum
    in NumPy, rounded once on each of two to eight devices.
    """
    cfg = replace(OPT, width=width, embed_width=width)
    layout = compute_layout(cfg, make_mesh(parse_mesh(mesh_name), inference_tp))
    rng = np.random.default_rng(0)
    tokens = rng.choice(cfg.vocab_size, (B, T), p=zipf(cfg.vocab_size)).astype(np.int32)
    weight = rng.uniform(0.5, 1.5, (B, T, width))
    weight[..., 0] = 1
    table = jnp.zeros((cfg.padded_vocab, width), jnp.bfloat16)

    def loss(table, tokens, weight):
        rows = jax.checkpoint(lambda table: look_up(table, tokens, layout))(table)
        return (rows * weight).astype(jnp.float32).sum()

    with jax.set_mesh(layout.mesh):
        table = jax.device_put(table, layout.sharding("vocab", None))
        rounded = jnp.asarray(weight, jnp.bfloat16)
        rows = [put_rows(np.asarray(array), layout, "batch") for array in (tokens, rounded)]
        grad = jax.jit(jax.grad(loss))(table, *rows)
    assert grad.dtype == jnp.bfloat16
    want = np.zeros(table.shape)
    np.add.at(want, tokens.reshape(-1), np.asarray(rounded, np.float64).reshape(-1, width))
    assert want[:, 0].max() > 1000
    np.testing.assert_allclose(np.asarray(grad, np.float64), want, rtol=2 * 2**-8)


def zipf(size: int) -> np.ndarray:
    """Probabilities of tokens as they are in text."""
    share = 1 / np.arange(1, size + 1)
    return share / share.sum()
