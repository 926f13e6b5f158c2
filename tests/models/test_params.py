"""What a model declares: sizes, logical axes, decay, and where each parameter lives."""

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshes.layout import make_mesh, parse_mesh
from meshes.spec import ParamSpec
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import SIZES
from rlhf_jax.models.params import (
    abstract_params,
    compute_layout,
    generate_layout,
    init_params,
    is_spec,
    param_specs,
    scalar_specs,
    shardings,
    store_layout,
)
from tests.models.cases import LLAMA, MODELS, OPT


def leaves(specs) -> list[ParamSpec]:
    return jax.tree.leaves(specs, is_leaf=is_spec)


@pytest.mark.parametrize("name", MODELS)
def test_num_params_counts_the_real_rows_of_every_parameter(name):
    cfg = MODELS[name]
    total = sum(
        np.prod((spec.rows or spec.shape[0], *spec.shape[1:])) for spec in leaves(param_specs(cfg))
    )
    assert cfg.num_params() == total


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("facebook/opt-125m", 125_239_296),
        ("facebook/opt-350m", 331_196_416),
        ("facebook/opt-1.3b", 1_315_758_080),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("HuggingFaceTB/SmolLM2-135M", 134_515_008),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
    ],
)
def test_published_models_have_their_published_sizes(name, expected):
    """Counts of `transformers`' own modules."""
    assert SIZES[name].num_params() == expected


def test_vocabulary_and_mlp_are_padded_to_128_whatever_the_mesh():
    assert (OPT.padded_vocab, OPT.padded_mlp) == (128, 128)
    assert (LLAMA.padded_vocab, LLAMA.padded_mlp) == (128, 256)
    up = param_specs(LLAMA).layers[0].up_FD
    assert isinstance(up, ParamSpec)
    assert (up.shape, up.rows) == ((256, 48), 172)


def test_matrices_decay_and_biases_and_norms_do_not():
    for cfg in MODELS.values():
        specs = scalar_specs(cfg)
        for spec in leaves(specs.body):
            assert spec.decay == (len(spec.shape) > 1)
        assert specs.head_W.decay  # a [1, W] matrix


@pytest.mark.parametrize("name", MODELS)
def test_the_sharded_dimension_comes_first_in_every_parameter(name):
    for spec in leaves(param_specs(MODELS[name])):
        assert all(axis is None for axis in spec.axes[1:])


def test_a_position_table_of_odd_length_is_replicated():
    """2050 rows divide over nothing: norms, positions and output biases are small."""
    cfg = replace(OPT, max_positions=2048)
    specs = param_specs(cfg)
    mesh = make_mesh(parse_mesh("4x2"), 4)
    for make in (store_layout, compute_layout, generate_layout):
        layout = make(cfg, mesh)
        assert specs.positions_PD is not None
        assert specs.positions_PD.shape == (2050, 64)
        assert layout.param_sharding(specs.positions_PD).is_fully_replicated


def test_heads_that_do_not_divide_are_replicated_and_logged(caplog):
    """SmolLM2's 9 query and 3 KV heads: cut in STORE, where any row may end a shard, and nowhere
    else; its feed-forward stays tensor parallel.
    """
    cfg = replace(LLAMA, num_heads=9, num_kv_heads=3, head_size=16, width=144)
    mesh = make_mesh(parse_mesh("4x2"), 2)
    with caplog.at_level(logging.INFO, logger="meshes.layout"):
        store, compute = store_layout(cfg, mesh), compute_layout(cfg, mesh)
    layer = param_specs(cfg).layers[0]
    qkv, out, up = leaves((layer.qkv_ED, layer.out_ED, layer.up_FD))
    assert store.param_sharding(qkv).spec == P(("tp", "data"), None)
    assert compute.param_sharding(qkv).spec == P(None, None)
    assert compute.param_sharding(out).spec == P(None, None)
    assert compute.param_sharding(up).spec == P("tp", None)
    assert caplog.messages == [
        "compute: heads has 3 pieces, not a multiple of 2 devices: replicated",
        "compute: qkv has 3 pieces, not a multiple of 2 devices: replicated",
    ]


def test_kv_heads_are_never_cut():
    """4 KV heads on 8-way decoding: the projection is replicated, though its rows would divide."""
    cfg = replace(LLAMA, num_heads=8, num_kv_heads=4)
    layout = generate_layout(cfg, make_mesh(parse_mesh("8x1"), 8))
    assert layout.spec("qkv", None) == P(None, None)
    assert layout.spec("mlp", None) == P("gen", None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 8, "num_kv_heads": 3}, "8 query heads do not divide over 3 KV heads"),
        ({"positions": "rope", "head_size": 9}, "rotary positions need an even head size, got 9"),
    ],
)
def test_impossible_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(OPT, **changes)


def test_initial_values_do_not_depend_on_the_mesh():
    """Born in STORE, padded rows zero, norms at 1, output projections scaled down by depth."""
    cfg: ModelConfig = replace(OPT, vocab_size=100, mlp_width=120, width=128, embed_width=128)
    trees = []
    for mesh, inference_tp in (("1x1", 1), ("4x2", 4)):
        layout = store_layout(cfg, make_mesh(parse_mesh(mesh), inference_tp))
        specs = param_specs(cfg)
        params = init_params(specs, layout, jnp.dtype("float32"), key=jax.random.key(3))
        assert jax.tree.map(lambda x: x.sharding, params) == shardings(specs, layout)
        abstract = abstract_params(specs, layout, jnp.dtype("float32"))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(
            lambda x: (x.shape, x.dtype), params
        )
        trees.append(jax.tree.map(np.asarray, params))
    jax.tree.map(np.testing.assert_array_equal, *trees)
    one, layer = trees[0], trees[0].layers[0]
    assert (one.embed_VW[100:] == 0).all()
    assert (layer.up_FD[120:] == 0).all()
    assert (layer.mlp_norm.scale_D == 1).all()
    assert one.embed_VW[:100].std() == pytest.approx(0.02, rel=0.05)
    assert layer.out_ED.std() == pytest.approx(0.02 / 2**0.5, rel=0.05)
