"""Products of int8 digits are exact but for the last digit of a row, in NumPy float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import dispatch
from kernels_pallas.row_digits import program_rows
from kernels_pallas.skinny_product import digits, digits_tiling
from kernels_pallas.skinny_product.api import product_down_transposed, product_up
from kernels_pallas.skinny_product.tiling import Tiling
from tests.kernels import truth

ON_GPU = jax.default_backend() == "gpu"
KERNEL = "pallas" if ON_GPU else "interpret"
ROWS = [1, 3, 8, 64, 256]
F, D = 48, 512


def matrix(seed: int, shape: tuple[int, int], scales: int) -> tuple[jax.Array, jax.Array]:
    """Numbers in int8, the largest among them, and scales near 1 / 500."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-127, 128, shape)
    values[0] = 127
    return jnp.asarray(values, jnp.int8), jnp.asarray((0.5 + rng.random(scales)) / 500, jnp.float32)


def rows_of(M: int, width: int, dtype: str = "bfloat16") -> jax.Array:
    """Normal numbers; the second row is zeros and the third has one that is huge."""
    x = np.array(truth.normal(M, (M, width), "float32"))
    x[1:2] = 0
    x[2:3, 5] = 1e6
    return jnp.asarray(x, jnp.dtype(dtype))


def wide(array: jax.Array) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def assert_off_by_the_last_digit(got: jax.Array, x: np.ndarray, w: np.ndarray) -> None:
    """Each number of a row x is off by at most half of 1 / 16256 of the row's largest."""
    digit = np.abs(x).max(1, keepdims=True) / 16256
    sums = np.abs(x) @ np.abs(w).T
    error = np.abs(wide(got) - x @ w.T)
    assert (error <= 0.501 * digit * np.abs(w).sum(1) + 2e-6 * sums).all()
    assert not error[np.abs(x).max(1) == 0].any()


@pytest.mark.parametrize("M", ROWS)
def test_parts_of_down_are_off_by_the_last_digit(M: int) -> None:
    y, (w, scale) = rows_of(M, D), matrix(1, (F, D), D)
    parts = jax.jit(functools.partial(product_down_transposed, implementation=KERNEL))(y, w, scale)
    assert (parts.dtype, parts.shape[1:]) == ("float32", (M, F))
    assert_off_by_the_last_digit(parts.sum(0), wide(y) * wide(scale), wide(w))


@pytest.mark.skipif(ON_GPU, reason="the compiled kernel returns two bytes a number")
@pytest.mark.parametrize("M", ROWS)
def test_up_is_off_by_the_last_digit(M: int) -> None:
    x, (w, scale) = rows_of(M, D, "float32"), matrix(1, (F, D), F)
    got = product_up(x, w, None, None, scale, implementation=KERNEL)
    assert_off_by_the_last_digit(got, wide(x), wide(w) * wide(scale)[:, None])


def test_the_error_is_far_below_what_bfloat16_keeps() -> None:
    """Of normal numbers: 2^-9 at most, and about a third of that in the mean."""
    y, (w, scale) = truth.normal(0, (64, D), "bfloat16"), matrix(1, (F, D), D)
    want = (wide(y) * wide(scale)) @ wide(w).T
    error = wide(product_down_transposed(y, w, scale, implementation=KERNEL).sum(0)) - want
    assert np.sqrt((error**2).mean()) < 2**-13 * np.sqrt((want**2).mean())


@pytest.mark.parametrize("implementation", ["reference", KERNEL])
@pytest.mark.parametrize("end", ["relu", "gate", "none"])
@pytest.mark.parametrize("M", ROWS)
def test_up_with_bias_and_what_follows(M: int, end: str, implementation: str) -> None:
    x, bias = truth.normal(M, (M, 64), "bfloat16"), truth.normal(3, (F,), "bfloat16")
    (w, scale), (gate, gate_scale) = matrix(1, (F, 64), F), matrix(2, (F, 64), F)
    more: Any = (gate, scale, gate_scale) if end == "gate" else (None, scale, None)
    activation = "relu" if end == "relu" else None
    got = product_up(x, w, bias, *more, activation=activation, implementation=implementation)
    gates = wide(gate) * wide(gate_scale)[:, None] if end == "gate" else None
    want = truth.product_up(x, wide(w) * wide(scale)[:, None], bias, gates, activation)
    assert (got.dtype, got.shape) == ("bfloat16", (M, F))
    truth.assert_close(got, want, "bfloat16")


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_down_in_plain_jax(implementation: str) -> None:
    y, (w, scale) = truth.normal(0, (5, D), "float32"), matrix(1, (F, D), D)
    parts = product_down_transposed(y, w, scale, implementation=implementation)
    truth.assert_close(parts.sum(0), (wide(y) * wide(scale)) @ wide(w).T, "float32")


def test_two_digits_hold_a_number_to_half_of_the_last() -> None:
    """Rows of each group of 8: high digits, then low ones."""
    x = rows_of(11, 40)
    found = digits.split_rows(x, None, 32, interpret=not ON_GPU)
    shapes = found.digits.shape, found.digits.dtype, found.scale.shape
    assert shapes == ((2, 2, 8, 40), "int8", (16,))
    largest = np.abs(wide(x)).max(1, keepdims=True)
    assert (np.abs(truth.numbers(found) - wide(x)) <= 0.501 * largest / 16256).all()
    assert np.abs(wide(found.digits)[:, 0].reshape(16, 40)[:11]).max() == 127


def test_a_row_that_is_not_a_number_shows() -> None:
    y, (w, scale) = truth.normal(0, (4, D), "bfloat16"), matrix(1, (F, D), D)
    broken = y.at[1, 3].set(jnp.nan).at[2, 7].set(jnp.inf)
    run = functools.partial(product_down_transposed, implementation=KERNEL)
    got, want = run(broken, w, scale).sum(0), run(y, w, scale).sum(0)
    assert not np.isfinite(got[1:3]).any()
    np.testing.assert_array_equal(got[::3], want[::3])


@pytest.mark.parametrize(
    "plan",
    [
        Tiling(16, 32, 1, 4, 2, 16),
        Tiling(32, 64, 1, 2, 3, 32),
        Tiling(64, 128, 1, 4, 4, 64),
        Tiling(32, 32, 4, 4, 3, 128),
    ],
    ids=str,
)
def test_tiling_changes_nothing(plan: Tiling) -> None:
    """Sums are whole numbers: without parts not a bit. Of rows that no program has in whole."""
    y, (w, scale) = truth.normal(0, (21, 128), "bfloat16"), matrix(1, (64, 128), 128)
    got = digits.product_down(y, w, scale, tiling=plan, interpret=not ON_GPU)
    want = product_down_transposed(y, w, scale, implementation=KERNEL)
    assert (len(got), len(want)) == (plan.num_splits, 1)
    if plan.num_splits == 1:
        np.testing.assert_array_equal(got, want)
    truth.assert_close(got.sum(0), wide(want)[0], "float32")


@pytest.mark.parametrize("M", [1, 8, 13, 16, 32, 64, 100, 256])
@pytest.mark.parametrize(
    "shape", [(12288, 4096), (16384, 4096), (4096, 16384), (4096, 4096), (1536, 576), (5120, 20480)]
)
def test_chosen_tiles_divide_real_models_and_fit_shared_memory(
    M: int, shape: tuple[int, int]
) -> None:
    R, C = shape
    for num_matrices, in_parts in ((1, False), (2, False), (1, True)):
        plan = digits_tiling.choose(M, shape, num_matrices, in_parts=in_parts)
        assert plan.rows is not None
        assert (R % plan.tile, C % (plan.block * plan.num_splits)) == (0, 0)
        assert plan.rows % 16 == 0
        assert program_rows(M) % plan.rows == 0
        assert plan.num_splits == 1 or in_parts
        size = plan.num_stages * plan.block * (plan.rows + num_matrices * plan.tile)
        assert plan.num_stages > 1
        assert size < 200_000


def test_what_the_kernels_do_not_take_is_named() -> None:
    x, int8, scale = jnp.ones((2, 24)), jnp.ones((16, 24), jnp.int8), jnp.ones(16)
    with pytest.raises(dispatch.Unsupported, match="no tile divides"):
        product_up(x, int8, None, None, scale, implementation="interpret")
    long: Any = jax.ShapeDtypeStruct((16, 65552), jnp.int8)
    assert "takes up to 65536" in str(digits.why_not_interpret(long, long))
    assert "no multiple of 32" in str(digits.why_not(x, int8))
    with pytest.raises(dispatch.Unsupported, match="int8 and its gate float32"):
        product_up(x, int8, None, jnp.ones((16, 24)), scale, implementation="interpret")
    for w, scale in ((int8, jnp.ones(16)), (int8.T, jnp.ones(24)), (x, jnp.ones(24))):
        with pytest.raises(ValueError, match=r"expected \[M,F\], int8\[D,F\], float32\[F\]"):
            product_down_transposed(x, w, scale)
