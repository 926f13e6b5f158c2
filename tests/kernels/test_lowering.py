"""The compiled kernel lowers for an H200 on a machine without a GPU.

Lowering finds what the interpreter lets through: sizes that are no powers of two and operations
that the backend lacks. Warnings are errors in the tests, so this also holds that it gives none.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import dispatch
from kernels_pallas.decode_attention import pallas
from kernels_pallas.decode_attention.api import decode_attention
from kernels_pallas.decode_attention.tiling import Tiling

H200 = jax.sharding.AbstractMesh(
    (1,),
    ("x",),
    abstract_device=jax.sharding.AbstractDevice(
        device_kind="NVIDIA H200", num_cores=132, platform="gpu"
    ),
)
HEADS = [(4, 4), (8, 4), (8, 2), (8, 1), (6, 2)]


def lower(function, batch: int, H: int, G: int, S: int, K: int, dtype) -> str:
    token, cache = (batch, G, K), (batch, G, S, K)
    shapes = [(batch, H, K), token, token, (batch,), cache, cache]
    dtypes = [dtype, dtype, dtype, jnp.int32, dtype, dtype]
    arrays = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    with jax.sharding.use_abstract_mesh(H200):
        lowered = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("K", [8, 64, 80, 128])
@pytest.mark.parametrize(("H", "G"), HEADS)
def test_decode_attention_lowers_by_default(H: int, G: int, K: int, dtype) -> None:
    text = lower(decode_attention, 2, H, G, 200, K, dtype)
    assert text.count("__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize("use_dot", [False, True])
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("window", [None, 70])
def test_every_form_of_the_kernel_lowers(window, num_splits: int, use_dot: bool) -> None:
    function = functools.partial(
        pallas.decode_attention, window=window, tiling=Tiling(32, 2, num_splits, use_dot)
    )
    assert "__gpu$xla.gpu.triton" in lower(function, 2, 8, 2, 256, 80, jnp.bfloat16)


def test_the_mesh_in_context_decides_the_platform() -> None:
    with jax.sharding.use_abstract_mesh(H200):
        assert dispatch.target_platform() == "gpu"
    assert dispatch.target_platform() == jax.default_backend()
