"""Rematerialisation: what the backward pass computes anew, and that gradients stay."""

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from meshes.layout import abstract_mesh, make_mesh, parse_mesh
from meshes.reshard import put_batch
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.decoder import forward
from rlhf_jax.models.params import abstract_params, compute_layout, param_specs, store_layout
from rlhf_jax.models.remat import Remat
from tests.models.cases import MODELS, put_params, random_values

H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


def operations(jaxpr: Any) -> Counter[str]:
    """How often each primitive stands in a program, whatever calls it stands in.

    Not counted is what nothing reads: JAX leaves Pallas kernels there, and XLA removes them.
    """
    read = {id(var) for equation in jaxpr.eqns for var in equation.invars}
    read |= {id(var) for var in jaxpr.outvars}
    found = Counter(
        equation.primitive.name
        for equation in jaxpr.eqns
        if any(id(var) in read for var in equation.outvars)
    )
    for inner in subprograms(jaxpr):
        found += operations(inner)
    return found


def subprograms(jaxpr: Any) -> list[Any]:
    leaves = jax.tree.leaves(
        [equation.params for equation in jaxpr.eqns], is_leaf=lambda x: hasattr(x, "eqns")
    )
    return [getattr(leaf, "jaxpr", leaf) for leaf in leaves if hasattr(leaf, "eqns")]


def gradient_on_gpu(cfg: ModelConfig, remat: Remat, dtype: str = "bfloat16") -> Counter[str]:
    """The operations of a layer's part of the gradient of the hidden states' sum."""

    def of_layers(num_layers: int) -> Counter[str]:
        model = replace(cfg, num_layers=num_layers)
        mesh: Any = abstract_mesh(parse_mesh("1x1"), 1).update(abstract_device=H200)
        layout = compute_layout(model, mesh)
        params = abstract_params(param_specs(model), store_layout(model, mesh), jnp.dtype(dtype))
        tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32, sharding=layout.sharding("batch", None))

        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            return jnp.square(forward(params, tokens, model, layout, remat=remat)).sum()

        with jax.sharding.use_abstract_mesh(mesh):
            return operations(jax.jit(jax.grad(loss)).trace(params, tokens).jaxpr.jaxpr)

    return of_layers(2) - of_layers(1)


@pytest.mark.parametrize(
    ("remat", "products", "attention"),
    [("none", 0, 0), ("dots", 0, 0), ("mlp", 1, 0), ("matrices", 3, 0), ("full", 3, 1)],
)
@pytest.mark.parametrize("model", ["opt", "llama"])
def test_a_layers_backward_pass_computes_anew_what_its_policy_says(
    model: str, remat: Remat, products: int, attention: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice as many products as the forward pass, and those that it was not given. A gated layer
    has one more; the last one of a layer is never needed.
    """
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    found = gradient_on_gpu(MODELS[model], remat)
    gated = MODELS[model].activation == "silu_gated"
    forward_products = 4 + gated
    anew = products + (gated and products > 0)
    assert found["dot_general"] == 3 * forward_products + anew
    assert found["dot_product_attention_fwd_wrapper"] == 1 + attention
    assert found["dot_product_attention_bwd_wrapper"] == 1


@pytest.mark.parametrize(("remat", "kernels"), [("none", 3), ("matrices", 3), ("full", 4)])
def test_the_attention_kernel_runs_once_more_only_where_everything_does(
    remat: Remat, kernels: int
) -> None:
    """In float32, which cuDNN does not take: a forward kernel, and two backward."""
    assert gradient_on_gpu(MODELS["opt"], remat, "float32")["pallas_call"] == kernels


@pytest.mark.parametrize(
    ("name", "policies"), [("opt_post_norm", ("mlp", "dots")), ("llama3", ("matrices",))]
)
def test_policies_change_no_gradient(
    name: str, policies: tuple[Remat, ...], tolerance: Any
) -> None:
    """On 4x2, where what is kept is sharded."""
    cfg = replace(MODELS[name], num_layers=1)
    mesh = make_mesh(parse_mesh("4x2"), 2)
    layout = compute_layout(cfg, mesh)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (8, 6)).astype(np.int32)

    def loss(params: Any, tokens: jax.Array, remat: Remat) -> jax.Array:
        return jnp.square(forward(params, tokens, cfg, layout, remat=remat)).mean()

    with jax.set_mesh(mesh):
        values = random_values(param_specs(cfg), seed=3)
        params = put_params(values, param_specs(cfg), store_layout(cfg, mesh))
        gradient = jax.jit(jax.grad(loss), static_argnums=2)
        rows = put_batch(tokens, layout)
        plain, *others = (gradient(params, rows, remat) for remat in ("none", *policies))
    for other in others:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, **tolerance(np.float32)), other, plain
        )
