"""The compiled kernel lowers for an H200 on a machine without a GPU.

Lowering finds what the interpreter lets through: sizes that are no powers of two and operations
that the backend lacks. Warnings are errors in the tests, so this also holds that it gives none.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import dispatch
from kernels_pallas.add_norm.api import add_norm
from kernels_pallas.attention import cudnn
from kernels_pallas.attention.api import attention
from kernels_pallas.decode_attention import pallas
from kernels_pallas.decode_attention.api import decode_attention
from kernels_pallas.decode_attention.tiling import Tiling
from kernels_pallas.skinny_product.api import product_down, product_down_transposed, product_up
from kernels_pallas.truncated_sampling.api import truncated_sampling
from rlhf_jax.runtime.compilation import DETERMINISTIC

H200 = jax.sharding.AbstractMesh(
    (1,),
    ("x",),
    abstract_device=jax.sharding.AbstractDevice(
        device_kind="NVIDIA H200", num_cores=132, platform="gpu"
    ),
)


def lower_decode(function, G: int, M: int, K: int, dtype=jnp.bfloat16, form=None, turn=True) -> str:
    """A step of two rows of G groups with M query heads, on caches of 200 positions."""
    array = jax.ShapeDtypeStruct
    caches = [array((2, G, 200, K), form or dtype)] * 2
    scales = [array((2, G, 200), jnp.float32) if form else None] * 2
    turns = [array((2, K), jnp.float32) if turn else None] * 2
    qkv, positions = array((2, G, M + 2, K), dtype), array((2,), jnp.int32)
    return lower_for_h200(function, qkv, positions, *caches, *scales, *turns)


@pytest.mark.parametrize("turn", [False, True], ids=["", "rope"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("K", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("M", [1, 2, 3, 4, 8])
def test_decode_attention_lowers_by_default(M: int, K: int, dtype, turn: bool) -> None:
    text = lower_decode(decode_attention, 2, M, K, dtype, turn=turn)
    assert text.count("__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize("form", [None, jnp.int8, jnp.float8_e4m3fn], ids=["bf16", "int8", "fp8"])
@pytest.mark.parametrize("use_dot", [False, True])
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("window", [None, 70])
def test_every_form_of_the_kernel_lowers(window, num_splits: int, use_dot: bool, form) -> None:
    tiling = Tiling(32, 2, num_splits, use_dot)
    function = functools.partial(pallas.decode_attention, window=window, tiling=tiling)
    assert lower_decode(function, 2, 4, 80, form=form).count("__gpu$xla.gpu.triton") == 1


def lower_for_h200(function, *arrays: jax.ShapeDtypeStruct | None) -> str:
    with jax.sharding.use_abstract_mesh(H200):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(("F", "D"), [(6144, 2048), (2304, 768), (960, 576)])
@pytest.mark.parametrize("activation", [None, "relu", "gated"])
def test_skinny_products_lower(activation: str | None, F: int, D: int, rows: int) -> None:
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    gate = array((F, D)) if activation == "gated" else None
    kind = None if activation == "gated" else activation
    up = functools.partial(product_up, activation=kind)
    text = lower_for_h200(up, array((rows, D)), array((F, D)), array((F,)), gate)
    assert text.count("__gpu$xla.gpu.triton") == 1
    text = lower_for_h200(product_down, array((rows, F)), array((F, D)))
    assert text.count("__gpu$xla.gpu.triton") == 1


def test_products_of_many_rows_are_left_to_xla() -> None:
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    for rows, kernels in ((64, 1), (65, 0)):
        up = lower_for_h200(product_up, array((rows, 2048)), array((6144, 2048)))
        down = lower_for_h200(product_down, array((rows, 6144)), array((6144, 2048)))
        assert [text.count("__gpu$xla.gpu.triton") for text in (up, down)] == [kernels] * 2


@pytest.mark.parametrize("form", [jnp.int8, jnp.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("rows", [1, 64, 130])
@pytest.mark.parametrize("gated", [False, True])
def test_skinny_products_of_one_byte_lower(gated: bool, rows: int, form) -> None:
    array, F, D = jax.ShapeDtypeStruct, 2304, 768
    x, w, scale = array((rows, D), jnp.bfloat16), array((F, D), form), array((F,), jnp.float32)
    more = (None, w, scale, scale) if gated else (None, None, scale)
    text = lower_for_h200(product_up, x, w, *more)
    is_int8 = form == jnp.int8  # digits of the rows are a kernel of their own
    assert text.count("__gpu$xla.gpu.triton") == 1 + is_int8
    y = array((rows, F), jnp.bfloat16)
    assert lower_for_h200(product_down, y, w, scale).count("__gpu$xla.gpu.triton") == 1
    if is_int8:
        text = lower_for_h200(product_down_transposed, y, array((D, F), form), scale)
        assert text.count("__gpu$xla.gpu.triton") == 2


@pytest.mark.parametrize("D", [576, 2048])
def test_add_norm_lowers(D: int) -> None:
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    parts = jax.ShapeDtypeStruct((4, 8, D), jnp.float32)
    for shift in (None, array((D,))):
        text = lower_for_h200(
            functools.partial(add_norm, eps=1e-5),
            array((8, D)), parts, shift, array((D,)), shift,
        )  # fmt: skip
        assert text.count("__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize(
    ("rule", "kernels"),
    [
        ({"top_k": 50}, 4),  # survey, cut, list, choose
        ({"top_k": 2048, "top_p": 0.9, "min_p": 0.1}, 4),
        ({"top_p": 0.9, "min_p": 0.1}, 2),  # draw, search
        ({"top_k": 5000, "top_p": 0.9}, 3),  # draw, survey, search
        ({"min_p": 0.1}, 0),
    ],
    ids=str,
)
def test_truncated_sampling_lowers(rule: dict[str, float], kernels: int) -> None:
    rows = jax.ShapeDtypeStruct((8, 50272), jnp.float32)
    keys = jax.ShapeDtypeStruct((8, 2), jnp.uint32)
    text = lower_for_h200(functools.partial(truncated_sampling, **rule), rows, keys)
    assert text.count("__gpu$xla.gpu.triton") == kernels


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("K", [64, 80, 96, 128, 256])
def test_attention_and_its_gradients_lower(K: int, dtype, packed: bool) -> None:
    """One kernel forward and two backward, for an odd length and grouped heads."""

    def loss(q, k, v, starts):
        return attention(q, k, v, starts, implementation="pallas").astype(jnp.float32).sum()

    array = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    starts = jax.ShapeDtypeStruct((2, 301), jnp.int32) if packed else None
    keys = array((2, 301, 2, K))
    text = lower_for_h200(
        jax.grad(loss, argnums=(0, 1, 2)), array((2, 301, 8, K)), keys, keys, starts
    )
    assert text.count("__gpu$xla.gpu.triton") == 3


def test_what_cudnn_does_not_take_runs_in_the_kernel() -> None:
    for dtype, packed in ((jnp.float32, False), (jnp.bfloat16, True)):
        array = jax.ShapeDtypeStruct((2, 64, 4, 64), dtype)
        starts = jax.ShapeDtypeStruct((2, 64), jnp.int32) if packed else None
        text = lower_for_h200(attention, array, array, array, starts)
        assert text.count("__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize(
    ("flags", "takes"),
    [
        ("--xla_gpu_enable_triton_gemm=false", True),
        ("--xla_gpu_deterministic_ops=false", True),
        (f"--xla_gpu_foo=1 {DETERMINISTIC}", False),
        ("--xla_gpu_deterministic_ops", False),
        ("--xla_gpu_exclude_nondeterministic_ops=1 --xla_gpu_foo", False),
    ],
)
def test_cudnn_is_left_out_where_order_is_fixed(
    flags: str, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    array: Any = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(H200):
        reason = cudnn.why_not(array, array, array, None, window=None)
    assert (reason is None) == takes, reason


def test_the_mesh_in_context_decides_the_platform() -> None:
    with jax.sharding.use_abstract_mesh(H200):
        assert dispatch.target_platform() == "gpu"
    assert dispatch.target_platform() == jax.default_backend()
