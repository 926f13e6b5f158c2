"""Decoding one token equals the pass over whole rows, for every model, mesh and form."""

from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.skinny_product import digits
from meshes.layout import make_mesh, parse_mesh
from meshes.reshard import put_batch, put_rows
from rlhf_jax.models import decode_layers as module
from rlhf_jax.models import decoder
from rlhf_jax.models.cache import CACHE_AXES, KVCache
from rlhf_jax.models.decode_layers import decode_layers, fits
from rlhf_jax.models.decoder import decode_step, forward, prefill, project_out, start_token
from rlhf_jax.models.lora import LoRAConfig, adapted_specs
from rlhf_jax.models.narrow import Narrow, narrow_weights
from rlhf_jax.models.params import abstract_params, compute_layout, generate_layout, param_specs
from tests.models.cases import LLAMA, MODELS, OPT, put_params, random_values

B, T = 4, 8
POSITIONS = np.array([5, 3, 7, 6], np.int32)
TOKENS = np.random.default_rng(0).integers(3, 99, (B, T)).astype(np.int32)
CASES = {
    **{name: replace(cfg, num_layers=1) for name, cfg in MODELS.items()},
    "opt": MODELS["opt"],
    "qwen2": replace(LLAMA, num_layers=1, attention_bias=True),
    "opt_one_layer": OPT,
    "opt_gelu": replace(OPT, activation="gelu", embed_width=32),
    "opt_no_final_norm": replace(OPT, final_norm=False),
}


def with_kernels(params, tokens_B, positions_B, kv_cache, cfg, layout):
    """`decode_step` with every kernel interpreted."""
    x = start_token(params, tokens_B, positions_B, cfg, layout)
    x, kv_cache = decode_layers(
        params, x, positions_B, kv_cache, cfg, layout, implementation="interpret"
    )
    return project_out(params, x), kv_cache


def decoded(
    cfg,
    mesh_name: str,
    inference_tp: int,
    *steps,
    lora: LoRAConfig | None = None,
    weights: Narrow = "same",
    kv: Narrow = "same",
):
    """Rows cut at their positions are read by prefill; then each of `steps` decodes one token."""
    mesh = make_mesh(parse_mesh(mesh_name), inference_tp)
    layout = generate_layout(cfg, mesh)
    specs = param_specs(cfg) if lora is None else adapted_specs(param_specs(cfg), cfg, lora)
    params = put_params(random_values(specs, seed=2), specs, layout)

    def run(params, read_BT, tokens_B, positions_B):
        params = narrow_weights(params, weights)
        _, kv_cache = prefill(params, read_BT, T, cfg, layout, kv)
        return [step(params, tokens_B, positions_B, kv_cache, cfg, layout)[0] for step in steps]

    read = np.where(np.arange(T) < POSITIONS[:, None], TOKENS, 0)
    last = TOKENS[np.arange(B), POSITIONS]
    with jax.set_mesh(mesh):
        return jax.jit(run)(params, *put_batch((read, last, POSITIONS), layout))


@cache
def in_one_pass(name: str, lora: LoRAConfig | None = None) -> np.ndarray:
    """The same tokens' hidden states by the pass over whole rows."""
    cfg = CASES[name]
    mesh = make_mesh(parse_mesh("1x1"), 1)
    layout = compute_layout(cfg, mesh)
    specs = param_specs(cfg) if lora is None else adapted_specs(param_specs(cfg), cfg, lora)
    params = put_params(random_values(specs, seed=2), specs, layout)
    with jax.set_mesh(mesh):
        hidden = jax.jit(partial(forward, cfg=cfg, layout=layout))(params, TOKENS)
    return np.asarray(hidden)[np.arange(B), POSITIONS]


def check(results, want: np.ndarray) -> None:
    assert len(results) > 0
    for got in results:
        np.testing.assert_allclose(np.asarray(got), want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_decoding_equals_one_pass(name):
    """By what runs here, and by the kernels interpreted."""
    check(decoded(CASES[name], "1x1", 1, decode_step, with_kernels), in_one_pass(name))


@pytest.mark.parametrize(
    ("name", "mesh_name", "inference_tp", "step"),
    [
        ("opt_one_layer", "4x2", 4, with_kernels),
        ("opt_post_norm", "2x1", 2, decode_step),
        ("qwen2", "3x1", 3, decode_step),
        ("llama", "2x1", 2, decode_step),
    ],
)
def test_sharded_decoding_equals_one_pass(name, mesh_name: str, inference_tp: int, step):
    """Rows over devices, heads and mlp tensor parallel; Llama's 3 groups stay whole on 2."""
    check(decoded(CASES[name], mesh_name, inference_tp, step), in_one_pass(name))


def layer_by_layer(params, tokens_B, positions_B, kv_cache, cfg, layout):
    """`decode_step` as it is where `fits` says no."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "fits", lambda *args: False)
        return decode_step(params, tokens_B, positions_B, kv_cache, cfg, layout)


@pytest.mark.parametrize(
    ("name", "mesh_name", "inference_tp", "kind"),
    [
        ("opt_one_layer", "4x2", 4, "int8"),
        ("qwen2", "1x1", 1, "int8"),
        ("opt_gelu", "1x1", 1, "fp8"),
    ],
)
def test_one_byte_a_number_is_the_same_in_every_form(name, mesh_name, inference_tp, kind):
    """By what runs here, by the kernels interpreted and layer by layer; and near what it rounds.
    The kernels give rows 15 bits where matrices are int8.
    """
    steps = (layer_by_layer, decode_step, with_kernels)
    first, *others = decoded(CASES[name], mesh_name, inference_tp, *steps, weights=kind, kv=kind)
    check(others[:1] if kind == "int8" else others, np.asarray(first))
    np.testing.assert_allclose(np.asarray(others[1]), first, atol=2e-3)
    error = np.abs(np.asarray(first) - in_one_pass(name)).mean()
    assert 1e-3 < error < (0.05 if kind == "int8" else 0.3)


def splitting_every_row(*args):
    """`with_kernels` where no norm is written in digits."""
    with mock.patch.object(module, "takes_digits", return_value=False):
        return with_kernels(*args)


@pytest.mark.parametrize(
    ("cfg", "mesh_name", "inference_tp", "num_splits"),
    [
        pytest.param(MODELS["opt"], "1x1", 1, 5, id="opt"),
        pytest.param(OPT, "4x2", 4, 3, id="opt tensor parallel"),
        pytest.param(LLAMA, "1x1", 1, 5, id="llama"),
        pytest.param(LLAMA, "3x1", 3, 5, id="llama tensor parallel"),
        pytest.param(CASES["opt_no_final_norm"], "1x1", 1, 3, id="opt without a final norm"),
        pytest.param(MODELS["opt_post_norm"], "1x1", 1, 8, id="opt post-norm"),
    ],
)
def test_norms_write_the_digits_that_int8_products_read(cfg, mesh_name, inference_tp, num_splits):
    """Those of the norm that a kernel would split: what is left of four a layer is the first norm,
    attention's output and what is between the mlp's matrices. Post-norm residuals stay rows.
    """
    results = []
    for step, expected in ((with_kernels, num_splits), (splitting_every_row, 4 * cfg.num_layers)):
        with mock.patch.object(digits, "split_rows", wraps=digits.split_rows) as split_rows:
            results += decoded(cfg, mesh_name, inference_tp, step, weights="int8")
        assert split_rows.call_count == expected
    check(results[:1], np.asarray(results[1]))


def test_adapters_go_layer_by_layer():
    lora = LoRAConfig(dim=2)
    check(decoded(OPT, "1x1", 1, decode_step, lora=lora), in_one_pass("opt_one_layer", lora))


def test_two_all_reduces_a_layer():
    """And no others, where heads and mlp are tensor parallel."""
    cfg = CASES["opt"]
    mesh = make_mesh(parse_mesh("2x1"), 2)
    layout = generate_layout(cfg, mesh)
    params = put_params(random_values(param_specs(cfg), seed=2), param_specs(cfg), layout)
    shape = (B, cfg.num_kv_heads, T, cfg.head_size)
    kv_cache = put_rows(np.zeros(shape, np.float32), layout, "batch")
    kv_cache = jax.device_put(kv_cache, layout.sharding(*CACHE_AXES))
    caches = KVCache([kv_cache] * cfg.num_layers, [kv_cache] * cfg.num_layers)
    with jax.set_mesh(mesh):
        x, positions = put_batch((np.zeros((B, cfg.width), np.float32), POSITIONS), layout)
        run = partial(decode_layers, cfg=cfg, layout=layout)
        jaxpr = str(jax.make_jaxpr(run)(params, x, positions, caches))
    assert jaxpr.count("psum") == 2 * cfg.num_layers
    assert "all_gather" not in jaxpr


def test_all_but_adapters_take_the_fewest_kernels():
    """In whatever form the matrices are."""
    params = abstract(OPT)
    assert fits(params)
    assert fits(jax.eval_shape(lambda p: narrow_weights(p, "int8"), params))
    assert not fits(abstract(OPT, LoRAConfig(dim=2)))


def abstract(cfg, lora: LoRAConfig | None = None):
    """Shapes of the parameters on one device, with adapters or without."""
    specs = param_specs(cfg) if lora is None else adapted_specs(param_specs(cfg), cfg, lora)
    layout = generate_layout(cfg, make_mesh(parse_mesh("1x1"), 1))
    params: Any = abstract_params(specs, layout, jnp.float32)
    return params
