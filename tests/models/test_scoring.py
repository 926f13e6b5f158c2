"""Windows, log-probabilities and scores against NumPy."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.layout import make_mesh, parse_mesh
from meshes.reshard import put_batch
from rlhf_jax.models.layers import logits_from_hidden
from rlhf_jax.models.params import ScalarModel, compute_layout, param_specs
from rlhf_jax.models.scoring import scalar_scores, score_tokens, take_window
from tests.models.cases import LLAMA, OPT, put_params, random_values

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("mesh", ["1x1", "4x2"])
def test_a_window_starts_where_its_row_says_and_repeats_the_last_position(mesh):
    layout = compute_layout(OPT, make_mesh(parse_mesh(mesh), 2 if mesh == "4x2" else 1))
    flat, deep = RNG.integers(0, 99, (8, 6)), RNG.normal(size=(8, 6, 3)).astype(np.float32)
    start = np.array([0, 1, 2, 3, 4, 5, 3, 0], np.int32)
    index = np.minimum(start[:, None] + np.arange(4), 5)
    take = jax.jit(partial(take_window, length=4, layout=layout))
    with jax.set_mesh(layout.mesh):
        for array in (flat, deep):
            got = take(*put_batch((array, start), layout))
            np.testing.assert_array_equal(got, array[np.arange(8)[:, None], index])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("cfg", [OPT, LLAMA], ids=["tied", "untied"])
def test_log_probabilities_and_entropies_are_those_of_the_real_vocabulary(
    cfg, temperature, tolerance
):
    """Padded columns have probability 0 even where their rows of the table are not zero."""
    cfg = replace(cfg, num_layers=0)
    layout = compute_layout(cfg, make_mesh(parse_mesh("4x2"), 2))
    values = random_values(param_specs(cfg), seed=1)
    table = values.embed_VW if values.unembed_VW is None else values.unembed_VW
    table[cfg.vocab_size :] = 1.0
    hidden = RNG.normal(size=(4, 3, cfg.width)).astype(np.float32)
    targets = RNG.integers(0, cfg.vocab_size, (4, 3)).astype(np.int32)
    with jax.set_mesh(layout.mesh):
        params = put_params(values, param_specs(cfg), layout)
        score = jax.jit(partial(score_tokens, cfg=cfg, layout=layout, temperature=temperature))
        rows = put_batch((hidden, targets), layout)
        logprobs, entropies = score(params, *rows)
        logits = jax.jit(partial(logits_from_hidden, cfg=cfg))(params, rows[0])
    real = hidden.astype(np.float64) @ table[: cfg.vocab_size].T.astype(np.float64)
    expected = log_softmax(real / temperature)
    chosen = np.take_along_axis(expected, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(logprobs, chosen, **tolerance(np.float32))
    np.testing.assert_allclose(
        entropies, -(np.exp(expected) * expected).sum(-1), **tolerance(np.float32)
    )
    logits = np.asarray(logits)
    np.testing.assert_allclose(logits[..., : cfg.vocab_size], real, **tolerance(np.float32))
    assert (logits[..., cfg.vocab_size :] == -np.inf).all()


def test_scalar_scores_are_float32_products_with_the_head(tolerance):
    hidden, head = RNG.normal(size=(2, 3, 8)), RNG.normal(size=8)
    wide = scalar_scores(ScalarModel(None, jnp.float32(head)), jnp.float32(hidden))  # pyright: ignore
    np.testing.assert_allclose(wide, hidden @ head, **tolerance(np.float32))
    narrow = scalar_scores(ScalarModel(None, jnp.bfloat16(head)), jnp.bfloat16(hidden))  # pyright: ignore
    assert narrow.dtype == jnp.float32
