"""Loaded checkpoints compute what transformers computes (numbers by scripts/make_goldens.py)."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.layout import Layout
from meshes.reshard import put_batch
from rlhf_jax.hf.config_io import load_config
from rlhf_jax.models.decoder import forward
from rlhf_jax.models.layers import logits_from_hidden
from rlhf_jax.models.params import compute_layout
from rlhf_jax.models.scoring import scalar_scores

MODELS = ["opt", "opt_post_norm", "llama", "llama3_rope", "mistral", "qwen2"]
SCORERS = ["opt_scorer", "opt_post_norm_scorer", "llama_scorer"]


def compute(params, cfg, tokens, *, mesh, logits=True):
    """Hidden states and logits of the production path, one row a device row, as NumPy arrays."""
    layout = compute_layout(cfg, mesh)
    rows = -(-len(tokens) // layout.batch_size_divisor) * layout.batch_size_divisor
    padded = np.zeros((rows, tokens.shape[1]), np.int32)
    padded[: len(tokens)] = tokens

    def run(params, tokens):
        hidden = forward(params, tokens, cfg, layout)
        return hidden, logits_from_hidden(gathered(params, layout), hidden, cfg)

    with jax.set_mesh(mesh):
        hidden, logits = jax.jit(run)(params, put_batch(padded, layout))
    return np.asarray(hidden)[: len(tokens)], np.asarray(logits)[: len(tokens)]


def gathered(params, layout: Layout):
    """The two matrices that logits need, whole on every device."""
    return jax.tree.map(
        lambda x: jax.sharding.reshard(x, layout.sharding(*[None] * x.ndim)),
        params.replace(layers=[]),
    )


def mesh_of(params):
    return jax.tree.leaves(params)[0].sharding.mesh


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_and_logits_equal_those_of_transformers(name, golden, load, tolerance):
    params, cfg, _ = load(golden(name))
    numbers = np.load(golden(name) / "golden.npz")
    hidden, logits = compute(params, cfg, numbers["right_tokens"], mesh=mesh_of(params))
    for row, length in enumerate(numbers["lengths"]):
        for side, real in (("right", slice(length)), ("left", slice(-length, None))):
            want = numbers[f"{side}_hidden"][row, real]
            np.testing.assert_allclose(hidden[row, :length], want, **tolerance(jnp.float32))
            want = numbers[f"{side}_logits"][row, real]
            got = logits[row, :length, : cfg.vocab_size]
            np.testing.assert_allclose(got, want, **tolerance(jnp.float32))
    assert np.all(logits[..., cfg.vocab_size :] == -np.inf)


@pytest.mark.parametrize("name", SCORERS)
def test_scores_at_the_last_token_equal_those_of_sequence_classifiers(
    name, golden, load, tolerance
):
    model, cfg, _ = load(golden(name), scalar=True)
    numbers = np.load(golden(name) / "golden.npz")
    layout = compute_layout(cfg, mesh_of(model))
    with jax.set_mesh(layout.mesh):
        scores = jax.jit(
            lambda model, tokens: scalar_scores(model, forward(model.body, tokens, cfg, layout))
        )(model, put_batch(numbers["right_tokens"].astype(np.int32), layout))
    last = np.asarray(scores)[np.arange(3), numbers["lengths"] - 1]
    np.testing.assert_allclose(last, numbers["scores"], **tolerance(jnp.float32))


@pytest.mark.parametrize("mesh", ["1x1", "8x1", "4x2", "1x8"])
def test_a_real_model_gives_its_published_numbers_on_every_mesh(mesh, shared_data, load):
    directory = shared_data("stories260K-hf")
    params, cfg, _ = load(directory, mesh)
    want = json.loads((directory / "golden.json").read_text())
    tokens = np.array([want["prompt_ids"]], np.int32)
    _, logits = compute(params, cfg, tokens, mesh=mesh_of(params))
    # The file keeps five decimals.
    np.testing.assert_allclose(logits[0, -1], want["logits_last_pos_all512"], atol=5e-5)
    np.testing.assert_allclose(logits[0, 0, :8], want["logits_pos0_first8"], atol=5e-5)
    assert load_config(directory).stop_ids == (2,)
