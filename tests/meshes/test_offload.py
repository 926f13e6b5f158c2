"""Parameters in host memory: placed there, moved inside programs, and no number changes."""

from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from meshes import offload
from meshes.layout import Layout, make_mesh, parse_mesh
from meshes.offload import is_on_host, on_host, to_device
from meshes.reshard import put_batch
from rlhf_jax.models.decoder import forward
from rlhf_jax.models.params import (
    ScalarModel,
    compute_layout,
    init_params,
    scalar_specs,
    store_layout,
)
from rlhf_jax.models.scoring import scalar_scores, score_tokens
from tests.models.cases import MODELS, put_params, random_values

TOKENS = np.random.default_rng(0).integers(3, 99, (8, 12)).astype(np.int32)


def layouts(name: str, mesh: str) -> tuple[Layout, Layout]:
    """STORE and COMPUTE of a model."""
    shape = parse_mesh(mesh)
    made = make_mesh(shape, shape.tensor)
    return store_layout(MODELS[name], made), compute_layout(MODELS[name], made)


def test_on_host_says_so_in_every_parameter():
    store, _ = layouts("llama", "4x2")
    specs = scalar_specs(MODELS["llama"])
    host = on_host(store)
    for values in (
        put_params(random_values(specs, seed=0), specs, host),
        init_params(specs, host, np.dtype(np.float32), key=jax.random.key(0)),
    ):
        for leaf in jax.tree.leaves(values):
            assert is_on_host(leaf)
            assert leaf.sharding.memory_kind == "pinned_host"
    assert not is_on_host(put_params(random_values(specs, seed=0), specs, store).head_W)


@pytest.mark.parametrize(
    ("name", "mesh"), [("llama", "4x2"), ("opt_post_norm", "8x1"), ("opt", "1x1")]
)
def test_offloading_changes_no_number(name, mesh):
    """Hidden states, log-probabilities and scores are equal to the last bit."""
    cfg, (store, compute) = MODELS[name], layouts(name, mesh)
    specs = scalar_specs(cfg)
    values = random_values(specs, seed=1)

    @jax.jit
    def score(model: ScalarModel[jax.Array], tokens: jax.Array):
        hidden = forward(model.body, tokens, cfg, compute)
        logprobs, _ = score_tokens(model.body, hidden[:, :-1], tokens[:, 1:], cfg, compute)
        return hidden, logprobs, scalar_scores(model, hidden)

    with jax.set_mesh(store.mesh):
        rows = put_batch(TOKENS, compute)
        here, there = (
            score(put_params(values, specs, layout), rows) for layout in (store, on_host(store))
        )
    for one, other in zip(here, there, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)
        assert not is_on_host(other)


def test_a_layer_leaves_the_host_after_the_one_before_has_run():
    """Its copy reads what the barrier gives, so a scheduler cannot fetch all layers at first."""
    cfg, (store, compute) = MODELS["opt"], layouts("opt", "1x1")
    specs = scalar_specs(cfg).body
    with jax.set_mesh(store.mesh):
        params = put_params(random_values(specs, seed=0), specs, on_host(store))
        run = partial(forward, cfg=cfg, layout=compute)
        equations = jax.make_jaxpr(run)(params, put_batch(TOKENS, compute)).eqns
    kinds = [equation.primitive.name for equation in equations]
    barriers = [n for n, kind in enumerate(kinds) if kind == "optimization_barrier"]
    assert len(barriers) == cfg.num_layers
    for number in barriers:
        fetched = set(equations[number].outvars)
        moved = [
            equation for equation in equations[number:]
            if equation.primitive.name == "device_put" and fetched & set(equation.invars)
        ]  # fmt: skip
        assert len(moved) == len(jax.tree.leaves(params.layers[0]))


def test_what_lies_on_the_devices_stays_as_it_is():
    x = jax.numpy.ones(3)
    assert to_device(x) is x
    jaxpr = jax.make_jaxpr(to_device)({"a": x, "b": None})
    assert not jaxpr.eqns


def test_devices_without_host_memory_are_an_error_that_says_so(monkeypatch):
    store, _ = layouts("opt", "1x1")
    devices = np.array([
        SimpleNamespace(
            addressable_memories=lambda: [SimpleNamespace(kind="device")],
            device_kind="Abacus",
            platform="wood",
        )
    ])  # fmt: skip
    bare = SimpleNamespace(mesh=SimpleNamespace(devices=devices))
    with pytest.raises(
        ValueError, match=r"needs pinned_host memory, Abacus \(wood\) offers device: leave"
    ):
        on_host(bare)  # pyright: ignore[reportArgumentType]
    assert offload.on_host(store).memory == "pinned_host"
