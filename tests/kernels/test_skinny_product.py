"""Every implementation of the products of a decode step equals the NumPy truth."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import cases, dispatch
from kernels_pallas.skinny_product import pallas, tiling
from kernels_pallas.skinny_product.api import product_down, product_up
from kernels_pallas.skinny_product.tiling import Tiling
from tests.kernels import truth

ON_GPU = jax.default_backend() == "gpu"
KERNEL = "pallas" if ON_GPU else "interpret"
IMPLEMENTATIONS = ["reference", KERNEL]
DTYPES = ["bfloat16"] if ON_GPU else ["float32", "bfloat16"]
UP = [pytest.param(case, id=case.name) for case in cases.UP_TESTS]
DOWN = [pytest.param(case, id=case.name) for case in cases.DOWN_TESTS]


def up_arrays(case: cases.UpCase, dtype: str) -> tuple[Any, Any, Any, Any]:
    """x, matrix, bias and gate; outputs are near 1."""
    M, F, D = case.rows, case.outputs, case.width
    w, gate = (truth.normal(i, (F, D), dtype) * D**-0.5 for i in (1, 2))
    bias = truth.normal(3, (F,), dtype) if case.bias else None
    return truth.normal(0, (M, D), dtype), w, bias, gate if case.gated else None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", UP)
def test_up_equals_truth(case: cases.UpCase, implementation: str, dtype: str) -> None:
    arrays = up_arrays(case, dtype)
    run = functools.partial(product_up, activation=case.activation, implementation=implementation)
    got = jax.jit(run)(*arrays)
    assert (got.dtype, got.shape) == (dtype, (case.rows, case.outputs))
    truth.assert_close(got, truth.product_up(*arrays, case.activation), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "xla"])
@pytest.mark.parametrize("case", DOWN)
def test_parts_of_down_add_up_to_the_product(
    case: cases.DownCase, implementation: str, dtype: str
) -> None:
    y = truth.normal(0, (case.rows, case.inputs), dtype)
    w = truth.normal(1, (case.inputs, case.width), dtype) * case.inputs**-0.5
    parts = product_down(y, w, implementation=implementation)
    assert (parts.dtype, parts.shape[1:]) == ("float32", (case.rows, case.width))
    want = np.asarray(y, np.float64) @ np.asarray(w, np.float64)
    truth.assert_close(parts.sum(0), want, "float32")


def narrow(seed: int, shape: tuple[int, int], dtype: str) -> tuple[jax.Array, jax.Array]:
    """A matrix of one byte a number, and scales that make it near 1 / root of its width."""
    largest = 127.0 if dtype == "int8" else 448.0
    values = jnp.clip(truth.normal(seed, shape, "float32") * largest / 4, -largest, largest)
    scale = jnp.exp2(truth.normal(seed + 1, shape[:1], "float32")) * 4 / largest
    return values.astype(dtype), scale * shape[1] ** -0.5


def widened(values: jax.Array, scale: jax.Array) -> np.ndarray:
    return np.asarray(values).astype(np.float64) * np.asarray(scale, np.float64)[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [c for c in UP if c.id in ("padded_rows", "gated_bias")])
def test_up_of_one_byte_equals_the_scaled_matrix(
    case: cases.UpCase, implementation: str, form: str, dtype: str
) -> None:
    """With more rows than one program has, too."""
    for rows in (case.rows, 70):
        x, _, bias, gate = up_arrays(dataclasses.replace(case, rows=rows), dtype)
        w, scale = narrow(1, (case.outputs, case.width), form)
        scales: Any = [scale, None]
        wide = [widened(w, scale), None]
        if case.gated:
            gate, scales[1] = narrow(5, (case.outputs, case.width), form)
            wide[1] = widened(gate, scales[1])
        run = functools.partial(
            product_up, activation=case.activation, implementation=implementation
        )
        got = jax.jit(run)(x, w, bias, gate, *scales)
        assert (got.dtype, got.shape) == (dtype, (rows, case.outputs))
        kept = "float16" if (form, implementation) == ("int8", KERNEL) else "float32"
        least = dtype if dtype == "bfloat16" else kept
        want = truth.product_up(x, wide[0], bias, wide[1], case.activation)
        truth.assert_close(got, want, least)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "xla"])
@pytest.mark.parametrize("rows", [5, 130])
def test_down_of_one_byte_equals_the_scaled_matrix(
    rows: int, implementation: str, form: str, dtype: str
) -> None:
    y, (w, scale) = truth.normal(0, (rows, 512), dtype), narrow(1, (512, 32), form)
    scale = scale * 512**-0.5 * 32**0.5
    parts = product_down(y, w, scale, implementation=implementation)
    scaled = np.asarray((y.astype("float32") * scale[None]).astype(dtype), np.float64)
    truth.assert_close(parts.sum(0), scaled @ np.asarray(w, np.float64), "float32")


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
@pytest.mark.parametrize(("F", "D"), [(12288, 4096), (16384, 4096), (2304, 768), (960, 576)])
def test_tiles_of_one_byte_divide_real_models_and_fit_shared_memory(
    rows: int, F: int, D: int
) -> None:
    up, down = tiling.choose_up(rows, F, D, 1), tiling.choose_down(rows, F, D, 1)
    assert up is not None
    assert down is not None
    assert (F % up.tile, D % up.block) == (0, 0)
    assert (D % down.tile, F % (down.block * down.num_splits)) == (0, 0)
    own = tiling.padded_rows(rows)
    gated = up.num_stages * up.block * (2 * own + 2 * up.tile) + 4 * up.block * up.tile
    assert gated < 200_000


@pytest.mark.parametrize(
    "plan",
    [
        Tiling(16, 16, 1, 4, 2),
        Tiling(32, 32, 2, 2, 3),
        Tiling(64, 16, 8, 4, 4),
        Tiling(32, 32, 2, 4, 3, rows=16),
    ],
    ids=str,
)
def test_tiling_changes_nothing(plan: Tiling) -> None:
    """For rows that no program has in whole."""
    dtype = DTYPES[0]
    y, w = truth.normal(0, (21, 128), dtype), truth.normal(1, (128, 64), dtype) * 0.1
    run = functools.partial(pallas.product_down, tiling=plan, interpret=not ON_GPU)
    want = np.asarray(y, np.float64) @ np.asarray(w, np.float64)
    assert run(y, w).shape[0] == plan.num_splits
    truth.assert_close(run(y, w).sum(0), want, "float32")
    up = functools.partial(pallas.product_up, activation=None, interpret=not ON_GPU)
    for one in (plan, dataclasses.replace(plan, matrix_first=True)):
        truth.assert_close(up(y, w.T, None, None, tiling=one), want, dtype)


@pytest.mark.parametrize("rows", [65, 128, 256, 1000])
@pytest.mark.parametrize(
    ("F", "D"), [(8192, 2048), (2048, 2048), (20480, 5120), (1536, 576), (576, 576), (100, 64)]
)
def test_parts_of_many_rows_fill_the_card_at_most_once(rows: int, F: int, D: int) -> None:
    parts = tiling.num_parts(rows, F, D)
    assert F % parts == 0
    assert parts == 1 or parts * -(-rows // 128) * -(-D // 128) <= 132
    assert tiling.num_parts(256, 8192, 2048) == 4


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(
    ("F", "D"), [(6144, 2048), (8192, 2048), (2048, 2048), (2304, 768), (960, 576), (14336, 4096)]
)
def test_chosen_tiles_divide_real_models(rows: int, F: int, D: int) -> None:
    up, down = tiling.choose_up(rows, F, D), tiling.choose_down(rows, F, D)
    assert up is not None
    assert down is not None
    assert (F % up.tile, D % up.block) == (0, 0)
    assert (D % down.tile, F % (down.block * down.num_splits)) == (0, 0)
    gated = up.num_stages * up.block * 2 * (tiling.padded_rows(rows) + 2 * up.tile)
    assert gated < 200_000
    assert up.tile == 64 or not up.matrix_first


def test_sizes_without_a_tile_take_the_reference_or_say_why() -> None:
    x, w = truth.normal(0, (2, 24), "float32"), truth.normal(1, (40, 24), "float32")
    with jax.default_matmul_precision("highest"):  # a GPU's own choice for float32 is TF32
        got = product_up(x, w)
    truth.assert_close(got, truth.product_up(x, w, None, None, None), "float32")
    with pytest.raises(dispatch.Unsupported, match="no tile divides"):
        product_up(x, w, implementation="interpret")
    with pytest.raises(dispatch.Unsupported, match="no tile divides"):
        product_down(x, w.T, implementation="interpret")


@pytest.mark.skipif(ON_GPU, reason="the kernel runs here")
def test_kernel_without_gpu_says_why() -> None:
    x = jnp.ones((2, 32))
    with pytest.raises(dispatch.Unsupported, match="needs an NVIDIA GPU"):
        product_up(x, x, implementation="pallas")


def test_wrong_arguments_are_named() -> None:
    x = jnp.ones((2, 32))
    with pytest.raises(ValueError, match=r"expected \[M,D\]"):
        product_up(x, jnp.ones((16, 31)))
    with pytest.raises(ValueError, match=r"expected \[M,D\]"):
        product_up(x, jnp.ones((16, 32)), jnp.ones(15))
    with pytest.raises(ValueError, match="with a gate"):
        product_up(x, jnp.ones((16, 32)), None, jnp.ones((16, 32)), activation="relu")
    with pytest.raises(ValueError, match="tanh"):
        product_up(x, jnp.ones((16, 32)), activation="tanh")
    with pytest.raises(ValueError, match=r"expected \[M,F\]"):
        product_down(x, jnp.ones((31, 32)))
    with pytest.raises(ValueError, match="int8 without a scale"):
        product_up(x, jnp.ones((16, 32), jnp.int8))
    with pytest.raises(ValueError, match="float32 with a scale"):
        product_down(x, jnp.ones((32, 16)), jnp.ones(32))
    with pytest.raises(ValueError, match=r"expected float32 \[32\]"):
        product_down(x, jnp.ones((32, 16), jnp.int8), jnp.ones(16))
