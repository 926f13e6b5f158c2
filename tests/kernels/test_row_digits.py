"""The norm in int8 digits, and the product that reads them in place of rows."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import cases
from kernels_pallas.add_norm.api import add_norm
from kernels_pallas.row_digits import program_rows
from kernels_pallas.skinny_product.api import product_up, takes_digits
from kernels_pallas.skinny_product.digits_tiling import SMALLEST_BLOCK
from tests.kernels import truth
from tests.kernels.test_add_norm import EPS, KERNEL, arrays
from tests.kernels.test_int8_digits import ON_GPU, matrix, wide
from tests.kernels.test_lowering import H200, lower_for_h200

DTYPES = ["bfloat16"] if ON_GPU else ["float32", "bfloat16"]
ROWS = [1, 5, 8, 13, 64, 100]
CASES = [pytest.param(case, id=case.name) for case in cases.DOWN_TESTS]
F = 48


def normed(inputs: tuple[Any, ...], implementation: str, *, digits: bool) -> tuple[Any, Any]:
    """`add_norm` in a program."""
    run = functools.partial(add_norm, eps=EPS, digits=digits, implementation=implementation)
    return jax.jit(run)(*inputs)


@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["reference", KERNEL])
@pytest.mark.parametrize("case", CASES)
def test_digits_hold_the_norm_in_float32(
    case: cases.DownCase, implementation: str, dtype: str, M: int
) -> None:
    """To half of the last digit, whatever the rows' dtype: bfloat16 would keep 8 bits of 15."""
    inputs = arrays(dataclasses.replace(case, rows=M), dtype, num_parts=2)
    total, got = normed(inputs, implementation, digits=True)
    want_total, want = truth.add_norm(*inputs, EPS)
    truth.assert_close(total, want_total, dtype)
    assert (got.rows.shape, got.rows.dtype) == (want.shape, dtype)
    assert (got.digits.dtype, got.scale.dtype) == ("int8", "float32")
    assert 2 * got.scale.size % program_rows(M) == 0
    assert got.digits.shape == (got.scale.size // 8, 2, 8, case.width)
    largest = np.abs(want).max(1, keepdims=True)
    error = np.abs(truth.numbers(got) - want)
    assert (error <= 0.501 * largest / 16256 + 2e-6 * (1 + largest)).all()


@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("end", ["relu", "gate"])
@pytest.mark.parametrize("case", [case for case in CASES if case.id != "several_parts"])
def test_product_of_the_norm_equals_that_of_the_reference(
    case: cases.DownCase, end: str, dtype: str, M: int
) -> None:
    """Of the same numbers in float32, where the reference does not round the norm."""
    if ON_GPU and case.width % SMALLEST_BLOCK:
        case = dataclasses.replace(case, width=-(-case.width // SMALLEST_BLOCK) * SMALLEST_BLOCK)
    inputs = arrays(dataclasses.replace(case, rows=M), dtype, num_parts=2)
    (w, scale), (gate, gate_scale) = (matrix(seed, (F, case.width), F) for seed in (1, 2))
    weights: Any = (w, None, gate, scale, gate_scale) if end == "gate" else (w, None, None, scale)
    activation = "relu" if end == "relu" else None
    up = functools.partial(product_up, activation=activation)
    _, got = normed(inputs, KERNEL, digits=True)
    plain = [None if array is None else array.astype("float32") for array in inputs]
    _, rows = normed(tuple(plain), "reference", digits=False)
    got = jax.jit(functools.partial(up, implementation=KERNEL))(got, *weights)
    assert (got.dtype, got.shape) == (dtype, (M, F))
    want = up(rows, *weights, implementation="reference")
    truth.assert_close(got, wide(want), "float16" if dtype == "float32" else dtype)


@pytest.mark.parametrize("layer_norm", [True, False])
def test_a_row_that_is_not_a_number_shows(layer_norm: bool) -> None:
    """In its scale and its products, and in no other row."""
    case = cases.DownCase("odd", 13, 64, 96, layer_norm)
    x, *rest = arrays(case, "bfloat16", num_parts=2)
    (w, scale), (_, norm) = matrix(1, (F, 96), F), normed((x, *rest), KERNEL, digits=True)
    broken = x.at[4, 3].set(jnp.nan).at[9, 95].set(jnp.inf)
    _, shown = normed((broken, *rest), KERNEL, digits=True)
    bad = np.isin(np.arange(13), (4, 9))
    np.testing.assert_array_equal(np.isnan(shown.scale)[:13], bad)
    got, want = (
        wide(product_up(rows, w, None, None, scale, implementation=KERNEL))
        for rows in (shown, norm)
    )
    assert np.isnan(got[bad]).all()
    np.testing.assert_array_equal(got[~bad], want[~bad])


def test_only_the_kernel_for_int8_takes_digits() -> None:
    array: Any = jax.ShapeDtypeStruct
    x, w = array((8, 64), jnp.bfloat16), array((F, 64), jnp.int8)
    fp8 = array((F, 64), jnp.float8_e4m3fn)
    for named in (None, "interpret"):
        with jax.sharding.use_abstract_mesh(H200):
            takes = functools.partial(takes_digits, implementation=named)
            assert takes(x, w)
            assert takes(x, w, w)
            assert not takes(x, fp8)
            assert not takes(x, w, fp8)
            assert not takes(array((8, 24), x.dtype), array((F, 24), jnp.int8))
    with jax.sharding.use_abstract_mesh(H200):
        assert takes_digits(array((256, 64), x.dtype), w)
        assert not takes_digits(array((257, 64), x.dtype), w)
        assert not takes_digits(array((8, 64), jnp.float32), w)
        assert not takes_digits(x, w, implementation="reference")
    assert takes_digits(x, w) == ON_GPU


def test_digits_that_no_kernel_would_read_are_an_error() -> None:
    inputs = arrays(cases.DOWN_TESTS[1], "bfloat16", num_parts=1)
    (w, scale), (_, norm) = matrix(1, (F, 32), F), normed(inputs, "reference", digits=True)
    with pytest.raises(ValueError, match="only the kernel for int8 reads digits"):
        product_up(norm, w, None, None, scale, implementation="reference")
    with pytest.raises(ValueError, match="only the kernel for int8 reads digits"):
        product_up(norm, jnp.ones((F, 32), jnp.bfloat16), implementation=KERNEL)
    with pytest.raises(ValueError, match=r"expected \[M,D\]"):
        product_up(norm, *matrix(1, (F, 64), F), implementation=KERNEL)


@pytest.mark.parametrize("M", [1, 8, 64, 130])
@pytest.mark.parametrize("D", [576, 4096])
def test_norm_and_product_lower_as_two_kernels(D: int, M: int) -> None:
    def half(x, parts, shift, w, scale):
        _, h = add_norm(x, parts, shift, shift, shift, eps=EPS, digits=takes_digits(x, w))
        return product_up(h, w, None, None, scale)

    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    w, scale = array((2304, D), dtype=jnp.int8), array((2304,), dtype=jnp.float32)
    text = lower_for_h200(half, array((M, D)), array((2, M, D)), array((D,)), w, scale)
    assert text.count("__gpu$xla.gpu.triton") == 2
    assert "int8_digits" not in text
