"""Properties of whole-row passes that hold for every model: causal, windowed, position-aware."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.layout import Layout, make_mesh, parse_mesh
from rlhf_jax.models.cache import extend
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.decoder import forward, prefill
from rlhf_jax.models.layers import normalize
from rlhf_jax.models.params import Norm, compute_layout, generate_layout, param_specs
from tests.models.cases import LLAMA, MODELS, OPT, put_params, random_values

B, T = 2, 8
TOKENS = np.random.default_rng(0).integers(3, 99, (B, T)).astype(np.int32)


def one_device(cfg: ModelConfig) -> Layout:
    return compute_layout(cfg, make_mesh(parse_mesh("1x1"), 1))


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """`(cfg, run)`: the model's config and its hidden states as a function of tokens."""
    cfg = MODELS[request.param]
    layout = one_device(cfg)
    params = put_params(random_values(param_specs(cfg), seed=2), param_specs(cfg), layout)
    program = jax.jit(partial(forward, cfg=cfg, layout=layout))
    with jax.set_mesh(layout.mesh):
        yield cfg, lambda tokens: np.asarray(program(params, tokens))


def changed_at(position: int) -> np.ndarray:
    tokens = TOKENS.copy()
    tokens[:, position] = 99 - tokens[:, position] % 90
    assert (tokens[:, position] != TOKENS[:, position]).all()
    return tokens


def test_what_stands_behind_a_position_changes_nothing_before_it(model):
    """So right padding needs no mask."""
    _, run = model
    before, after = run(TOKENS), run(changed_at(5))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (np.abs(before - after)[:, 5:].max(-1) > 1e-3).all()


def test_each_layer_sees_one_window_further_back(model):
    """A change at 0 reaches position t through N layers only where t <= N * (window - 1)."""
    cfg, run = model
    moved = np.abs(run(TOKENS) - run(changed_at(0))).max((0, 2)) > 0
    window = cfg.sliding_window or T
    assert moved.tolist() == [t <= cfg.num_layers * (window - 1) for t in range(T)]


def test_equal_tokens_at_two_positions_differ(model):
    _, run = model
    hidden = run(np.tile([7, 8], (B, T // 2)).astype(np.int32))
    assert np.abs(hidden[:, 1] - hidden[:, 5]).max() > 1e-3


def test_hidden_states_have_the_width_that_the_unembedding_reads(model):
    cfg, run = model
    assert run(TOKENS).shape == (B, T, cfg.embed_width)


def test_rows_longer_than_the_position_table_are_refused():
    layout = one_device(OPT)
    params = put_params(random_values(param_specs(OPT), seed=0), param_specs(OPT), layout)
    with jax.set_mesh(layout.mesh):
        with pytest.raises(ValueError, match=r"rows of 33 tokens do not fit this model's 32"):
            forward(params, jnp.zeros((1, 33), jnp.int32), OPT, layout)
        with pytest.raises(ValueError, match=r"rows of 40 tokens"):
            prefill(params, jnp.zeros((1, 8), jnp.int32), 40, OPT, layout)


def test_learned_positions_start_behind_the_two_unused_rows():
    """Position t reads row t + 2: the first two rows change nothing, row 2 changes all."""
    cfg = replace(OPT, num_layers=1)
    layout, specs = one_device(cfg), param_specs(cfg)
    values = random_values(specs, seed=0)
    run = jax.jit(partial(forward, cfg=cfg, layout=layout))
    with jax.set_mesh(layout.mesh):
        before = run(put_params(values, specs, layout), TOKENS)
        values.positions_PD[:2] += 1
        np.testing.assert_array_equal(run(put_params(values, specs, layout), TOKENS), before)
        values.positions_PD[2] += np.linspace(0, 1, cfg.width)
        assert np.abs(run(put_params(values, specs, layout), TOKENS) - before)[:, 0].max() > 1e-3


def test_norms_are_float32_inside(tolerance):
    x = np.random.default_rng(1).normal(3.0, 2.0, (2, 5, 48))
    scale, bias = np.random.default_rng(2).normal(size=(2, 48))
    layer = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    rms = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5)
    for cfg, norm, expected in (
        (OPT, Norm(jnp.float32(scale), jnp.float32(bias)), layer * scale + bias),
        (LLAMA, Norm(jnp.float32(scale), None), rms * scale),
    ):
        got = normalize(jnp.float32(x), norm, cfg)
        np.testing.assert_allclose(got, expected, **tolerance(np.float32))
        narrow = normalize(jnp.bfloat16(x), norm, cfg)
        assert narrow.dtype == jnp.bfloat16
        np.testing.assert_allclose(narrow.astype(jnp.float32), expected, **tolerance(jnp.bfloat16))


def test_a_cache_is_zero_behind_the_prompt():
    layout = generate_layout(LLAMA, make_mesh(parse_mesh("1x1"), 1))
    keys = jnp.ones((2, LLAMA.num_kv_heads, 3, LLAMA.head_size), jnp.bfloat16)
    with jax.set_mesh(layout.mesh):
        longer = jax.jit(partial(extend, length=7, layout=layout))(keys)
    assert longer.shape == (2, 3, 7, 8)
    assert (longer[:, :, :3] == 1).all()
    assert (longer[:, :, 3:] == 0).all()
