"""A prompt fed in pieces leaves what whole rows leave: the hidden states of every position."""

from functools import partial

import jax
import numpy as np
import pytest

from meshes.layout import make_mesh, parse_mesh
from rlhf_jax.models.chunk import feed
from rlhf_jax.models.decoder import decode_step, prefill
from rlhf_jax.models.params import generate_layout, param_specs
from tests.models.cases import MODELS, put_params, random_values

B, P, S, T = 2, 12, 20, 5
TOKENS = np.random.default_rng(0).integers(3, 99, (B, P)).astype(np.int32)


@pytest.mark.parametrize("name", MODELS)
def test_pieces_at_an_offset_equal_the_prefill_and_decode_goes_on_behind_them(name, tolerance):
    """Rows start at places of their own; the padding of a piece changes nothing later."""
    cfg = MODELS[name]
    layout = generate_layout(cfg, make_mesh(parse_mesh("1x1"), 1))
    params = put_params(random_values(param_specs(cfg), seed=2), param_specs(cfg), layout)
    whole = jax.jit(partial(prefill, cache_length=S, cfg=cfg, layout=layout))
    piece = jax.jit(partial(feed, cfg=cfg, layout=layout))
    one = jax.jit(partial(decode_step, cfg=cfg, layout=layout))
    with jax.set_mesh(layout.mesh):
        want, full = whole(params, TOKENS)
        cache = jax.tree.map(np.zeros_like, full)
        start_B = np.zeros(B, np.int32)
        got = np.zeros(want.shape, np.float32)
        for step_B in ([3, 5], [5, 2], [2, 4]):
            tokens = np.full((B, T), 7, np.int32)
            for b, (at, count) in enumerate(zip(start_B, step_B, strict=True)):
                tokens[b, :count] = TOKENS[b, at : at + count]
            hidden, cache = piece(params, tokens, start_B, cache)
            for b, (at, count) in enumerate(zip(start_B, step_B, strict=True)):
                got[b, at : at + count] = hidden[b, :count]
            start_B = start_B + np.array(step_B, np.int32)
        fed = np.arange(P) < start_B[:, None]
        assert fed.sum() == 21
        np.testing.assert_allclose(got[fed], np.asarray(want)[fed], **tolerance(np.float32))
        # Position 10 of row 0, 11 of row 1: the last padding stood there, and beyond.
        token_B = TOKENS[np.arange(B), start_B]
        behind, _ = one(params, token_B, start_B, cache)
        expected = np.asarray(want)[np.arange(B), start_B]
        np.testing.assert_allclose(behind, expected, **tolerance(np.float32))
