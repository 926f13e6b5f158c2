"""Every implementation of attention equals the NumPy truth; so do its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import cases, dispatch
from kernels_pallas.attention import pallas, reference
from kernels_pallas.attention.api import attention
from kernels_pallas.attention.tiling import Tiling, Tilings
from tests.kernels import truth

IMPLEMENTATIONS = ["reference", "interpret"]
if jax.default_backend() == "gpu":
    IMPLEMENTATIONS = ["reference", "pallas", "cudnn"]
CASES = [pytest.param(case, id=case.name) for case in cases.ATTENTION_TESTS]


def arrays(case: cases.AttentionCase, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    q_shape = (case.batch, case.length, case.query_heads, case.head_size)
    kv_shape = (case.batch, case.length, case.kv_heads, case.head_size)
    q, k, v = (truth.normal(i, s, dtype) for i, s in enumerate((q_shape, kv_shape, kv_shape)))
    return q, k, v


def starts_of(case: cases.AttentionCase) -> jax.Array | None:
    starts = case.starts()
    if starts is None:
        return None
    return jnp.broadcast_to(jnp.array(starts, jnp.int32), (case.batch, case.length))


def dtypes_of(implementation: str) -> list[str]:
    return ["bfloat16"] if implementation == "cudnn" else ["float32", "bfloat16"]


RUNS = [(i, dtype) for i in IMPLEMENTATIONS for dtype in dtypes_of(i)]


@pytest.mark.parametrize(("implementation", "dtype"), RUNS)
@pytest.mark.parametrize("case", CASES)
def test_equals_truth(case: cases.AttentionCase, implementation: str, dtype: str) -> None:
    q, k, v = arrays(case, dtype)
    starts = starts_of(case)
    if implementation == "cudnn" and starts is not None:
        pytest.skip("cuDNN takes no packed rows")
    out = attention(q, k, v, starts, window=case.window, implementation=implementation)
    assert (out.dtype, out.shape) == (q.dtype, q.shape)
    truth.assert_close(out, truth.attention(q, k, v, case.window, case.starts()), dtype)


@pytest.mark.parametrize(("implementation", "dtype"), RUNS)
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.id in ("gqa2_k64", "window5_k8", "packed_gqa2_k64")]
)
def test_gradient_equals_difference_of_truth(
    case: cases.AttentionCase, implementation: str, dtype: str
) -> None:
    q, k, v = arrays(case, dtype)
    weight, starts = truth.normal(9, q.shape, dtype), starts_of(case)
    if implementation == "cudnn" and starts is not None:
        pytest.skip("cuDNN takes no packed rows")

    def loss(q, k, v):
        out = attention(q, k, v, starts, window=case.window, implementation=implementation)
        return jnp.sum(out.astype(jnp.float32) * weight.astype(jnp.float32))

    grads = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
    inputs = [np.asarray(x, np.float64) for x in (q, k, v)]
    weight64 = np.asarray(weight, np.float64)
    for i, grad in enumerate(grads):
        direction = np.random.default_rng(i).standard_normal(inputs[i].shape)
        direction /= np.linalg.norm(direction)

        def at(x: np.ndarray, i: int = i) -> float:
            q, k, v = (x if j == i else y for j, y in enumerate(inputs))
            out = truth.attention(q, k, v, case.window, case.starts())
            return float(np.sum(out * weight64))

        want = truth.central_difference(at, inputs[i], direction)
        got = np.sum(np.asarray(grad, np.float64) * direction)
        np.testing.assert_allclose(got, want, atol=2 * truth.TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize(("window", "segments"), [(None, ()), (5, ()), (None, (7, 5))])
def test_blocks_of_queries_change_nothing(window: int | None, segments: tuple[int, ...]) -> None:
    case = cases.AttentionCase("blocks", 2, 19, 4, 2, 8, segments=segments)
    q, k, v = arrays(case, "float32")
    starts = starts_of(case)

    def loss(query_block):
        def of(q, k, v):
            out = reference.attention(q, k, v, starts, window=window, query_block=query_block)
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


@pytest.mark.parametrize(
    ("segments", "tiles"),
    [((), (32, 16)), ((10, 41, 9, 20), (32, 16)), ((10, 41, 9, 20), (16, 32))],
)
def test_tiles_of_the_kernel_change_nothing(
    segments: tuple[int, ...], tiles: tuple[int, int]
) -> None:
    """Rows of several tiles: whole ones, those across the diagonal or a border, and left-out ones,
    with more queries than keys in a tile and the other way round.
    """
    case = cases.AttentionCase("tiles", 2, 90, 4, 2, 24, segments=segments)
    q, k, v = arrays(case, "float32")
    weight, starts = truth.normal(9, q.shape, "float32"), starts_of(case)
    tiling = Tiling(*tiles, num_warps=4)
    kernel = functools.partial(
        pallas.attention,
        tiling=Tilings(tiling, tiling, tiling),
        interpret=jax.default_backend() != "gpu",
    )

    def loss(run):
        def of(q, k, v):
            out = run(q, k, v, starts, window=None)
            return jnp.sum(out * weight), out

        return jax.jit(jax.value_and_grad(of, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    (_, want), want_grads = loss(reference.attention)
    (_, got), got_grads = loss(kernel)
    for a, b in zip((got, *got_grads), (want, *want_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_a_segment_is_as_if_alone() -> None:
    case = cases.AttentionCase("alone", 1, 30, 4, 2, 8, segments=(11, 13))
    q, k, v = arrays(case, "float32")
    whole = attention(q, k, v, starts_of(case))
    for here in (slice(0, 11), slice(11, 24)):
        alone = attention(*(x[:, here] for x in (q, k, v)))
        np.testing.assert_allclose(whole[:, here], alone, rtol=2e-6, atol=2e-6)


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
    with pytest.raises(ValueError, match=r"starts are int32 \(1, 3\); expected int32 \(1, 4\)"):
        attention(q, k, v, jnp.zeros((1, 3), jnp.int32))
