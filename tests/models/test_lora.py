"""Adapters beside the weights: against weights merged in NumPy, on several meshes."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.layout import make_mesh, parse_mesh
from meshes.reshard import put_batch
from meshes.spec import ParamSpec
from rlhf_jax.models.adapted import (
    Adapted,
    drop,
    is_adapted,
    merge,
    settled,
    with_dropout,
    without_adapters,
)
from rlhf_jax.models.decoder import Remat, forward
from rlhf_jax.models.lora import (
    LoRAConfig,
    adapted_specs,
    adapters_in,
    attach,
    combine,
    linear_modules,
    new_adapters,
    select_modules,
    split,
    trains,
)
from rlhf_jax.models.params import compute_layout, is_spec, param_specs, scalar_specs, store_layout
from tests.models.cases import LLAMA, MODELS, OPT, put_params, random_values
from tests.reference import lora as truth

EVERYWHERE = LoRAConfig(dim=4, alpha=6.0)
QUERY_AND_VALUE = LoRAConfig(dim=3, alpha=6.0, modules=("q_proj", "v_proj"))
KEYS_UP_DOWN = LoRAConfig(dim=2, alpha=6.0, modules=("k_proj", "fc1", "fc2", "gate_proj"))
TOKENS = np.random.default_rng(5).integers(3, 99, (8, 7)).astype(np.int32)


def specs_of(cfg, lora):
    return adapted_specs(param_specs(cfg), cfg, lora)


def hidden_states(
    cfg, values, specs, mesh_name, *, remat: Remat = "none", wrap=lambda params: params
):
    mesh = make_mesh(parse_mesh(mesh_name), parse_mesh(mesh_name).tensor)
    layout = compute_layout(cfg, mesh)
    params = put_params(values, specs, store_layout(cfg, mesh))
    run = jax.jit(lambda p, t: forward(wrap(p), t, cfg, layout, remat=remat))
    with jax.set_mesh(mesh):
        return np.asarray(run(params, put_batch(TOKENS, layout)))


CASES = [
    ("opt", OPT, EVERYWHERE, ("1x1", "4x2", "1x8")),
    ("opt_keys", OPT, replace(KEYS_UP_DOWN, modules=("k_proj", "fc2")), ("4x2",)),
    ("grouped", LLAMA, EVERYWHERE, ("1x1", "4x2", "1x8")),
    ("grouped_q_v", LLAMA, QUERY_AND_VALUE, ("4x2",)),
    ("post_norm", MODELS["opt_post_norm"], EVERYWHERE, ("1x1",)),
]


@pytest.mark.parametrize(("name", "cfg", "lora", "meshes"), CASES, ids=[case[0] for case in CASES])
def test_adapters_beside_weights_equal_merged_weights(name, cfg, lora, meshes):
    """Also where `side` has values that belong to no part: they are not read."""
    del name
    specs = specs_of(cfg, lora)
    values = random_values(specs, seed=1)
    whole = truth.merge(values)
    expected = hidden_states(cfg, whole, param_specs(cfg), "1x1")
    bare = hidden_states(cfg, without_adapters(values), param_specs(cfg), "1x1")
    assert np.abs(expected - bare).max() > 0.1
    for mesh in meshes:
        found = hidden_states(cfg, values, specs, mesh)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cfg", [OPT, LLAMA], ids=["opt", "grouped"])
def test_merging_in_the_program_gives_the_merged_weights(cfg, tolerance):
    specs = specs_of(cfg, QUERY_AND_VALUE)
    values = random_values(specs, seed=1)
    for tree in (merge(values), merge(settled(jax.tree.map(jnp.asarray, values)))):
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, **tolerance(np.float32)),
            tree,
            truth.merge(values),
        )


def test_gradients_of_adapters_are_those_of_the_merged_weights_by_the_chain_rule():
    """With W = base + s·side·core: d side = s·dW·coreᵀ where a row has the column, d core =
    s·sideᵀ·dW. The loss is recomputed in the backward pass, on a mesh.
    """
    cfg, lora = LLAMA, replace(EVERYWHERE, modules=("q_proj", "v_proj", "o_proj", "up_proj"))
    specs = specs_of(cfg, lora)
    values = random_values(specs, seed=1)
    direction = np.random.default_rng(2).normal(size=(8, 7, cfg.width)).astype(np.float32)

    def gradient(values: Any, specs: Any, mesh_name: str) -> Any:
        mesh = make_mesh(parse_mesh(mesh_name), parse_mesh(mesh_name).tensor)
        layout = compute_layout(cfg, mesh)
        params = put_params(values, specs, store_layout(cfg, mesh))

        def loss(params: Any, tokens: Any, direction: Any) -> jax.Array:
            return (forward(params, tokens, cfg, layout, remat="full") * direction).sum()

        with jax.set_mesh(mesh):
            batch = put_batch((TOKENS, direction), layout)
            return jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(params, *batch))

    whole = gradient(truth.merge(values), param_specs(cfg), "1x1")
    found = dict(adapters_in(gradient(values, specs, "4x2")))
    assert len(found) == 3 * cfg.num_layers
    for path, weight in adapters_in(values):
        name, number = path.split(".")[2], int(path.split(".")[1])
        change = getattr(whole.layers[number], name)
        owned = np.ones_like(weight.side_FA)
        if weight.rows:
            owned = owner_by_hand(weight)
            assert 0 < owned.mean() < 1
        side = weight.scale * owned * (change @ weight.core_AD.T)
        core = weight.scale * (owned * weight.side_FA).T @ change
        np.testing.assert_allclose(found[path].side_FA, side, rtol=1e-3, atol=2e-3)
        np.testing.assert_allclose(found[path].core_AD, core, rtol=1e-3, atol=2e-3)


def owner_by_hand(weight: Adapted[np.ndarray]) -> np.ndarray:
    """1 where a row of the fused projection and a column of `side` are of the same part."""
    rows = np.repeat([0, 1, 2], weight.rows)
    rows = np.tile(rows, len(weight.side_FA) // len(rows))
    return (rows[:, None] == np.repeat([0, 1, 2], weight.ranks)[None]).astype(np.float32)


def fresh(cfg: Any, specs: Any, *, seed: int = 0) -> Any:
    mesh = make_mesh(parse_mesh("4x2"), 2)
    store = store_layout(cfg, mesh)
    base = put_params(random_values(param_specs(cfg), seed=1), param_specs(cfg), store)
    with jax.set_mesh(mesh):
        made = new_adapters(base, specs, store, jnp.dtype(np.float32), key=jax.random.key(seed))
        return base, made, jax.jit(merge)(made)


@pytest.mark.parametrize("cfg", [OPT, LLAMA], ids=["opt", "grouped"])
def test_fresh_adapters_change_nothing_and_read_their_input_uniformly(cfg):
    """PEFT's start: the factor on the input in ±1/sqrt(its width), the other one 0."""
    base, made, whole = fresh(cfg, specs_of(cfg, EVERYWHERE))
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, without_adapters(made), base))
    jax.tree.map(np.testing.assert_array_equal, whole, base)
    for path, weight in adapters_in(made):
        reads_rows = path.endswith(("out_ED", "down_FD"))
        used, other = (
            (weight.side_FA, weight.core_AD) if reads_rows else (weight.core_AD, weight.side_FA)
        )
        assert isinstance(weight.base_FD, jax.Array)
        width = weight.base_FD.shape[0 if reads_rows else 1]
        real = cfg.mlp_width if path.endswith("down_FD") else width
        assert not np.asarray(other).any()
        largest = np.abs(used).max()
        assert 0.9 * real**-0.5 < largest <= real**-0.5
        if path.endswith("down_FD"):
            assert not np.asarray(used)[real:].any()


def test_modules_are_chosen_by_parts_of_their_hugging_face_names():
    assert len(select_modules(LLAMA, ())) == 7 * LLAMA.num_layers
    assert select_modules(LLAMA, ("layers.1.self_attn.q",)) == {"model.layers.1.self_attn.q_proj"}
    assert select_modules(OPT, ("decoder.layers.",)) == select_modules(OPT, ())
    specs = specs_of(LLAMA, replace(QUERY_AND_VALUE, modules=("layers.1.self_attn.v_proj",)))
    assert not any(is_adapted(leaf) for leaf in leaves(specs.layers[0]))
    (weight,) = (leaf for leaf in leaves(specs.layers[1]) if is_adapted(leaf))
    assert weight.ranks == (0, 0, 3)


def leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda node: is_spec(node) or is_adapted(node))


def test_a_pattern_that_fits_nothing_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match=r"'query' is part of no .* model\.layers\.\*\.self_attn"):
        specs_of(LLAMA, LoRAConfig(dim=2, modules=("q_proj", "query")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": -1}, "dim must be 0 .* got -1"),
        ({"alpha": 0.0}, "alpha must be positive, got 0.0"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
        ({"learning_rate": -1.0}, "learning_rate must not be negative"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LoRAConfig(**settings)


def moving(cfg: Any, lora: LoRAConfig) -> set[str]:
    """Paths of what trains in a reward model."""
    specs = adapted_specs(scalar_specs(cfg), cfg, lora)
    pick, rest = split(specs, trains(specs, lora))
    found, still = (
        {
            jax.tree_util.keystr(path, simple=True, separator=".")
            for path, _ in jax.tree.leaves_with_path(tree, is_leaf=is_spec)
        }
        for tree in (pick, rest)
    )
    assert not found & still
    return found


def test_only_lora_trains_adapters_and_the_head_mixed_all_but_adapted_matrices():
    lora = LoRAConfig(dim=2, modules=("fc1", "q_proj"))
    factors = {
        f"body.layers.0.{name}.{factor}"
        for name in ("qkv_ED", "up_FD")
        for factor in ("side_FA", "core_AD")
    }
    assert moving(OPT, replace(lora, only=True)) == factors | {"head_W"}
    mixed = moving(OPT, lora)
    assert factors | {"head_W", "body.embed_VW", "body.layers.0.out_ED"} <= mixed
    assert "body.layers.0.qkv_bias_E" in mixed
    assert not {"body.layers.0.qkv_ED.base_FD", "body.layers.0.up_FD.base_FD"} & mixed


def test_a_model_is_split_and_put_together_again():
    lora = replace(QUERY_AND_VALUE, only=True)
    specs = specs_of(LLAMA, lora)
    values = random_values(specs, seed=1)
    pick, rest = split(values, trains(specs, lora))
    whole = combine(pick, rest)
    assert jax.tree.structure(whole) == jax.tree.structure(values)
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, whole, values))
    assert jax.tree.leaves(pick)
    assert combine(values, None) is values
    again = attach(without_adapters(values), specs, pick)
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, again, values))


DROPPED = replace(EVERYWHERE, dropout=0.5)


def test_dropout_scales_what_it_keeps():
    weight = next(leaf for _, leaf in adapters_in(random_values(specs_of(OPT, DROPPED), seed=1)))
    x = jnp.asarray(np.random.default_rng(3).normal(size=(64, 50)), jnp.float32)
    (keyed,) = with_dropout([replace(weight, rate=0.25)], key=jax.random.key(1))
    dropped = np.asarray(drop(x, keyed))
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], np.asarray(x)[kept] / 0.75, rtol=1e-6)
    assert abs(kept.mean() - 0.75) < 0.03
    assert drop(x, weight) is x


def test_dropout_does_not_depend_on_the_mesh_and_differs_by_key_and_layer():
    cfg = replace(OPT, num_layers=2)
    specs = specs_of(cfg, DROPPED)
    values = random_values(specs, seed=1)

    def run(seed: int, mesh: str) -> np.ndarray:
        def wrap(params: Any) -> Any:
            return with_dropout(params, key=jax.random.key(seed))

        return hidden_states(cfg, values, specs, mesh, remat="full", wrap=wrap)

    one, other = run(1, "1x1"), run(1, "4x2")
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    assert np.abs(run(2, "1x1") - one).max() > 0.1
    keyed = [leaf for _, leaf in adapters_in(with_dropout(values, key=jax.random.key(1)))]
    keys = {tuple(np.asarray(leaf.dropout).tolist()) for leaf in keyed}
    assert len(keys) == len(keyed) == 4 * cfg.num_layers


def test_names_of_linear_modules_are_those_of_the_family():
    names = linear_modules(OPT)
    assert names["layers.0.down_FD"] == ("model.decoder.layers.0.fc2",)
    assert all(isinstance(spec, ParamSpec) for spec in leaves(param_specs(OPT)))
