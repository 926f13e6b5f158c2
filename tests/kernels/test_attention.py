"""Every implementation of attention equals the NumPy truth; so do its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import cases, dispatch
from kernels_pallas.attention import reference
from kernels_pallas.attention.api import attention
from tests.kernels import truth

IMPLEMENTATIONS = ["reference"] + (["cudnn"] if jax.default_backend() == "gpu" else [])
CASES = [pytest.param(case, id=case.name) for case in cases.ATTENTION_TESTS]


def arrays(case: cases.AttentionCase, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    q_shape = (case.batch, case.length, case.query_heads, case.head_size)
    kv_shape = (case.batch, case.length, case.kv_heads, case.head_size)
    q, k, v = (truth.normal(i, s, dtype) for i, s in enumerate((q_shape, kv_shape, kv_shape)))
    return q, k, v


def dtypes_of(implementation: str) -> list[str]:
    return ["bfloat16"] if implementation == "cudnn" else ["float32", "bfloat16"]


RUNS = [(i, dtype) for i in IMPLEMENTATIONS for dtype in dtypes_of(i)]


@pytest.mark.parametrize(("implementation", "dtype"), RUNS)
@pytest.mark.parametrize("case", CASES)
def test_equals_truth(case: cases.AttentionCase, implementation: str, dtype: str) -> None:
    q, k, v = arrays(case, dtype)
    out = attention(q, k, v, window=case.window, implementation=implementation)
    assert (out.dtype, out.shape) == (q.dtype, q.shape)
    truth.assert_close(out, truth.attention(q, k, v, case.window), dtype)


@pytest.mark.parametrize(("implementation", "dtype"), RUNS)
@pytest.mark.parametrize("case", [c for c in CASES if c.id in ("gqa2_k64", "window5_k8")])
def test_gradient_equals_difference_of_truth(
    case: cases.AttentionCase, implementation: str, dtype: str
) -> None:
    q, k, v = arrays(case, dtype)
    weight = truth.normal(9, q.shape, dtype)

    def loss(q, k, v):
        out = attention(q, k, v, window=case.window, implementation=implementation)
        return jnp.sum(out.astype(jnp.float32) * weight.astype(jnp.float32))

    grads = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
    inputs = [np.asarray(x, np.float64) for x in (q, k, v)]
    weight64 = np.asarray(weight, np.float64)
    for i, grad in enumerate(grads):
        direction = np.random.default_rng(i).standard_normal(inputs[i].shape)
        direction /= np.linalg.norm(direction)

        def at(x: np.ndarray, i: int = i) -> float:
            q, k, v = (x if j == i else y for j, y in enumerate(inputs))
            return float(np.sum(truth.attention(q, k, v, case.window) * weight64))

        want = truth.central_difference(at, inputs[i], direction)
        got = np.sum(np.asarray(grad, np.float64) * direction)
        np.testing.assert_allclose(got, want, atol=2 * truth.TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("window", [None, 5])
def test_blocks_of_queries_change_nothing(window: int | None) -> None:
    q, k, v = arrays(cases.AttentionCase("blocks", 2, 19, 4, 2, 8), "float32")

    def loss(query_block):
        def of(q, k, v):
            out = reference.attention(q, k, v, window=window, query_block=query_block)
            return jnp.sum(jnp.sin(out)), out

        return jax.value_and_grad(of, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    (_, whole), whole_grads = loss(19)
    (_, blocked), blocked_grads = loss(4)
    np.testing.assert_allclose(blocked, whole, rtol=1e-5, atol=1e-6)
    for a, b in zip(blocked_grads, whole_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_later_tokens_do_not_change_earlier_ones() -> None:
    q, k, v = arrays(cases.AttentionCase("prefix", 1, 12, 4, 2, 8), "float32")
    short = attention(q[:, :7], k[:, :7], v[:, :7])
    np.testing.assert_allclose(attention(q, k, v)[:, :7], short, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN runs here")
def test_cudnn_without_gpu_says_why() -> None:
    q, k, v = arrays(cases.ATTENTION_TESTS[0], "float32")
    with pytest.raises(dispatch.Unsupported, match="needs an NVIDIA GPU"):
        attention(q, k, v, implementation="cudnn")


def test_wrong_arguments_are_named() -> None:
    q, k, v = arrays(cases.AttentionCase("wrong", 1, 4, 4, 2, 8), "float32")
    with pytest.raises(ValueError, match="G dividing H"):
        attention(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match="window=0"):
        attention(q, k, v, window=0)
    with pytest.raises(ValueError, match="does not exist"):
        attention(q, k, v, implementation="flash")
    with pytest.raises(ValueError, match="cast them to one"):
        attention(q, k, v.astype(jnp.bfloat16))
