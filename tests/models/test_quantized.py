"""Frozen matrices in int8: how far off they are, and that models compute with exactly them."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.layout import make_mesh, parse_mesh
from meshes.reshard import put_batch
from rlhf_jax.models.adapted import is_adapted, merge, without_adapters
from rlhf_jax.models.decoder import forward
from rlhf_jax.models.lora import LoRAConfig, adapted_specs, combine, int8_paths, split, trains
from rlhf_jax.models.narrow import narrow_weights
from rlhf_jax.models.params import (
    compute_layout,
    init_params,
    param_specs,
    scalar_specs,
    store_layout,
)
from rlhf_jax.models.quantized import (
    Quantized,
    Transposed,
    declare_int8,
    is_quantized,
    multiply_down,
    multiply_up,
    quantize,
    transposed,
    widened,
)
from tests.models.cases import LLAMA, OPT, random_values

LORA = LoRAConfig(dim=4, alpha=6.0, load_in_8bit=True)
SOME_LLAMA = replace(LORA, modules=("q_proj", "down_proj"))
SOME = replace(LORA, modules=("q_proj", "fc2"))
TOKENS = np.random.default_rng(5).integers(3, 99, (8, 7)).astype(np.int32)


def by_hand(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales, row by row in float64."""
    values, scales = np.zeros(weight.shape), np.ones(len(weight))
    for number, row in enumerate(weight.astype(np.float64)):
        if row.any():
            scales[number] = np.abs(row).max() / 127
            values[number] = np.rint(row / scales[number])
    return values, scales


def test_entries_are_off_by_at_most_half_a_scale_and_zeros_stay():
    rng = np.random.default_rng(0)
    weight = (rng.normal(size=(9, 40)) * np.logspace(-6, 3, 9)[:, None]).astype(np.float32)
    weight[4] = 0
    for dtype in (jnp.int8, jnp.float8_e4m3fn):
        assert not np.asarray(widened(quantize(jnp.full((1, 4), 2e-38), dtype))).any()
    found = quantize(jnp.asarray(weight))
    values, scales = by_hand(weight)
    assert found.values_FD.dtype == jnp.int8
    assert np.abs(np.asarray(found.values_FD, np.int32) - values).max() <= 1  # ties in float32
    np.testing.assert_allclose(found.scale_F, scales, rtol=1e-6)
    error = np.abs(np.asarray(widened(found)) - weight)
    assert (error <= 0.5001 * scales[:, None]).all()
    assert error.max(axis=1)[[0, 8]].min() > 0
    assert not np.asarray(found.values_FD)[4].any()


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_row_that_is_not_finite_shows_in_products_and_no_other_is_changed(number, dtype):
    weight = jnp.ones((3, 4)).at[1, 2].set(number)
    found = multiply_up(jnp.ones((1, 4)), quantize(weight, dtype))
    np.testing.assert_array_equal(np.isfinite(found), [[True, False, True]])


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_products_are_those_with_the_numbers_that_int8_stands_for(dtype, tolerance):
    """In bfloat16 too: the weights themselves are not rounded once more."""
    rng = np.random.default_rng(1)
    weight = quantize(jnp.asarray(rng.normal(size=(12, 20)), jnp.float32))
    exact = (
        np.asarray(weight.values_FD, np.float64) * np.asarray(weight.scale_F, np.float64)[:, None]
    )
    up, down = (jnp.asarray(rng.normal(size=(5, n)), dtype) for n in (20, 12))
    found = (
        multiply_up(up, weight),
        multiply_down(down, weight, None),
        multiply_down(down, transposed(weight), None),
    )
    below = np.asarray(down, np.float64) @ exact
    expected = np.asarray(up, np.float64) @ exact.T, below, below
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(np.asarray(one, np.float64), other, **tolerance(dtype))


def model(cfg: Any, mesh_name: str, lora: LoRAConfig) -> tuple[Any, Any, Any]:
    """Declarations, parameters in STORE with adapters that change something, and the mesh."""
    mesh = make_mesh(parse_mesh(mesh_name), parse_mesh(mesh_name).tensor)
    specs, store = adapted_specs(param_specs(cfg), cfg, lora), store_layout(cfg, mesh)
    drawn = init_params(specs, store, jnp.dtype(np.float32), key=jax.random.key(3))
    values = random_values(specs, seed=1)

    def one(leaf: Any, value: Any) -> Any:
        if not is_adapted(leaf):
            return leaf
        place = jax.device_put
        return leaf.replace(
            side_FA=place(value.side_FA, leaf.side_FA.sharding),
            core_AD=place(value.core_AD, leaf.core_AD.sharding),
        )

    params = jax.tree.map(
        one, drawn, values, is_leaf=lambda node: is_adapted(node) or is_quantized(node)
    )
    return specs, params, mesh


def dequantized(params: Any) -> Any:
    """The model with float32 matrices in place of int8."""
    whole = jax.tree.map(
        lambda leaf: leaf.replace(base_FD=widened(leaf.base_FD)) if is_adapted(leaf) else leaf,
        params,
        is_leaf=is_adapted,
    )
    return jax.tree.map(
        lambda leaf: widened(leaf) if is_quantized(leaf) else leaf, whole, is_leaf=is_quantized
    )


@pytest.mark.parametrize(
    ("cfg", "lora", "meshes"),
    [(OPT, LORA, ("1x1", "4x2")), (replace(LLAMA, num_layers=1), SOME_LLAMA, ("4x2",))],
    ids=["opt", "grouped_some"],
)
def test_training_gradients_are_those_on_the_dequantized_base(cfg, lora, meshes):
    """Hidden states and the gradients of all that trains, recomputed in the backward pass; and the
    mesh changes nothing about the base: each device rounds rows of its own.
    """
    first: list[np.ndarray] | None = None
    direction = np.random.default_rng(2).normal(size=(8, 7, cfg.width)).astype(np.float32)
    for mesh_name in meshes:
        specs, params, mesh = model(cfg, mesh_name, lora)
        layout = compute_layout(cfg, mesh)
        pick = trains(specs, lora)

        def loss(trained: Any, frozen: Any, tokens: Any, layout: Any = layout) -> Any:
            hidden = forward(combine(trained, frozen), tokens, cfg, layout, remat="full")
            return (hidden * direction).sum(), hidden

        with jax.set_mesh(mesh):
            rows = put_batch(TOKENS, layout)
            run = jax.jit(jax.grad(loss, has_aux=True))
            trained, frozen = split(params, pick)
            assert np.dtype("int8") in {leaf.dtype for leaf in jax.tree.leaves(frozen)}
            found = run(trained, frozen, rows)
            whole = jax.jit(dequantized)(frozen)
            flat = jax.tree.map(
                lambda leaf: leaf.replace(base_FD=None) if is_adapted(leaf) else leaf,
                trained, is_leaf=is_adapted,
            )  # fmt: skip
            expected = run(flat, whole, rows)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        for one, other in pairs:
            scale = np.abs(other).max()
            np.testing.assert_allclose(one / scale, other / scale, atol=2e-5)
        base = [np.asarray(leaf) for leaf in jax.tree.leaves(frozen)]
        first = first or base
        for one, other in zip(base, first, strict=True):
            np.testing.assert_array_equal(one, other)


def test_only_frozen_matrices_of_layers_are_in_int8():
    """Without adapter too where nothing but adapters trains; never what trains."""
    every = {f"layers.0.{name}" for name in ("qkv_ED", "out_ED", "up_FD", "down_FD")}
    some = {"layers.0.qkv_ED", "layers.0.down_FD"}
    for lora, expected in (
        (LORA, every), (SOME, some), (replace(SOME, only=True), every),
        (replace(SOME, load_in_8bit=False), set()),
    ):  # fmt: skip
        for plain in (param_specs(OPT), scalar_specs(OPT)):
            specs = adapted_specs(plain, OPT, lora)
            assert int8_paths(specs) == expected
            trained, _ = split(specs, trains(specs, lora))
            assert {spec.dtype for spec in leaves(trained)} == {None}


def test_of_what_becomes_int8_rows_that_are_contracted_lie_last():
    """Not what is int8 already, nor below an adapter, nor in fp8: all else reads `[F, D]`."""
    for kind, lora, names in (
        ("int8", LoRAConfig(), {"out_ED", "down_FD"}),
        ("fp8", LoRAConfig(), set()),
        ("int8", LORA, set()),
        ("int8", replace(SOME, load_in_8bit=False), {"out_ED"}),
        ("int8", replace(SOME, only=True), set()),
    ):
        _, params, mesh = model(OPT, "1x1", lora)
        with jax.set_mesh(mesh):
            narrow = jax.jit(narrow_weights, static_argnums=1)(params, kind).layers[0]
        found = {name for name, leaf in vars(narrow).items() if isinstance(leaf, Transposed)}
        assert found == names
        for name in names:
            whole = quantize(getattr(params.layers[0], name))
            np.testing.assert_array_equal(getattr(narrow, name).values_DF, whole.values_FD.T)
            np.testing.assert_array_equal(getattr(narrow, name).scale_F, whole.scale_F)


def leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda node: hasattr(node, "axes"))


def test_merging_adds_adapters_to_the_dequantized_base_and_leaves_no_int8(tolerance):
    _, params, mesh = model(OPT, "1x1", LORA)
    with jax.set_mesh(mesh):
        found = jax.jit(merge)(params)
        expected = jax.jit(lambda p: merge(dequantized(p)))(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(np.float32)}
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, **tolerance(np.float32)),
        found,
        expected,
    )
    bare = without_adapters(params).layers[0].up_FD
    assert isinstance(bare, Quantized)
    assert bare is params.layers[0].up_FD.base_FD


def test_the_base_is_the_model_without_int8_to_within_rounding():
    """The same initial values: quantizing draws no numbers of its own."""
    mesh = make_mesh(parse_mesh("4x2"), 2)
    store, paths = store_layout(OPT, mesh), {"layers.0.up_FD", "layers.0.down_FD"}
    plain = param_specs(OPT)
    found, whole = (
        init_params(specs, store, jnp.dtype(np.float32), key=jax.random.key(3)).layers[0]
        for specs in (declare_int8(plain, paths), plain)
    )
    np.testing.assert_array_equal(found.qkv_ED, whole.qkv_ED)
    for one, other in ((found.up_FD, whole.up_FD), (found.down_FD, whole.down_FD)):
        values, scales = by_hand(np.asarray(other))
        np.testing.assert_allclose(one.scale_F, scales, rtol=1e-6)
        assert np.abs(np.asarray(one.values_FD, np.int32) - values).max() <= 1
        assert one.values_FD.sharding.spec == other.sharding.spec


def test_int8_without_adapters_is_refused():
    with pytest.raises(ValueError, match="load_in_8bit: what trains cannot be in int8"):
        LoRAConfig(load_in_8bit=True)
