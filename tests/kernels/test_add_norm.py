"""Every implementation of residual sum and norm equals the NumPy truth."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import cases, dispatch
from kernels_pallas.add_norm.api import add_norm
from tests.kernels import truth

KERNEL = "pallas" if jax.default_backend() == "gpu" else "interpret"
EPS = 1e-5


def arrays(case: cases.DownCase, dtype: str, num_parts: int) -> tuple[Any, Any, Any, Any, Any]:
    """x, parts, bias, scale, shift; the mean of x is far from 0."""
    M, D = case.rows, case.width
    bias, scale, shift = (truth.normal(i, (D,), dtype) for i in (2, 3, 4))
    x, parts = truth.normal(0, (M, D), dtype) + 3, truth.normal(1, (num_parts, M, D), "float32")
    return x, parts, bias if case.bias else None, scale, shift if case.layer_norm else None


@pytest.mark.parametrize(("num_parts", "parts_dtype"), [(1, None), (4, "float32")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["reference", KERNEL])
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases.DOWN_TESTS])
def test_equals_truth(
    case: cases.DownCase, implementation: str, dtype: str, num_parts: int, parts_dtype: str | None
) -> None:
    """Of parts in float32 and in the rows' dtype."""
    x, parts, bias, scale, shift = arrays(case, dtype, num_parts)
    inputs = x, parts.astype(parts_dtype or dtype), bias, scale, shift
    total, norm = jax.jit(functools.partial(add_norm, eps=EPS, implementation=implementation))(
        *inputs
    )
    assert (total.dtype, norm.dtype) == (dtype, dtype)
    want_total, want_norm = truth.add_norm(*inputs, EPS)
    truth.assert_close(total, want_total, dtype)
    truth.assert_close(norm, want_norm, dtype)


def test_wrong_arguments_are_named() -> None:
    x, parts, vector = jnp.ones((2, 32)), jnp.ones((1, 2, 32)), jnp.ones(32)
    with pytest.raises(ValueError, match=r"expected \[M,D\]"):
        add_norm(x, parts, vector, jnp.ones(31), None, eps=EPS)
    with pytest.raises(ValueError, match="use float32 or the rows'"):
        add_norm(x, parts.astype(jnp.bfloat16), vector, vector, None, eps=EPS)
    if jax.default_backend() != "gpu":
        with pytest.raises(dispatch.Unsupported, match="needs an NVIDIA GPU"):
            add_norm(x, parts, None, vector, None, eps=EPS, implementation="pallas")
