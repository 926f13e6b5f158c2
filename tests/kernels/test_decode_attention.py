"""Every implementation of decode_attention equals the NumPy truth and keeps its promises.

On a GPU the compiled kernel takes the interpreter's place: `pytest --noconftest tests/kernels`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import cases, dispatch
from kernels_pallas.attention.api import attention
from kernels_pallas.decode_attention import pallas, tiling
from kernels_pallas.decode_attention.api import decode_attention
from kernels_pallas.decode_attention.narrow import narrowed, widened
from kernels_pallas.decode_attention.tiling import Tiling
from tests.kernels import truth

KERNEL = "pallas" if jax.default_backend() == "gpu" else "interpret"
IMPLEMENTATIONS = ["reference", KERNEL]
CASES = [pytest.param(case, id=case.name) for case in cases.DECODE_TESTS]
BF16 = ("mha_k64", "mha_k80_ragged_cache", "gqa4_k128", "rope_gqa3_k80", "rope_window20_gqa4_k96")
TILINGS = [
    Tiling(16, 1, 1, False),
    Tiling(32, 1, 3, False),
    Tiling(16, 4, 1, True),
    Tiling(32, 4, 3, True),
]
kernel = functools.partial(pallas.decode_attention, interpret=KERNEL == "interpret")


def named(*names: str) -> list[Any]:
    """Cases by their names."""
    return [case for case in CASES if case.id in names]


def arrays(case: cases.DecodeCase, dtype: str) -> list[Any]:
    """The arrays of a case in the api's order, with NaN in the caches where a row must not read."""
    B, G, S, K = case.batch, case.kv_heads, case.cached, case.head_size
    qkv = truth.normal(0, (B, G, case.query_heads // G + 2, K), dtype)
    positions_B = jnp.asarray(case.row_positions(), jnp.int32)
    unread_BS = jnp.arange(S)[None, :] >= positions_B[:, None]
    caches = [
        jnp.where(unread_BS[:, None, :, None], jnp.nan, truth.normal(seed, (B, G, S, K), dtype))
        for seed in (1, 2)
    ]
    turn = [None, None]
    if case.rope:
        cos, sin = np.cos(angles(case)), np.sin(angles(case))
        turn = [np.concatenate([cos, cos], 1), np.concatenate([-sin, sin], 1)]
        turn = [jnp.asarray(t, jnp.float32) for t in turn]
    return [qkv, positions_B, *caches, None, None, *turn]


def angles(case: cases.DecodeCase) -> np.ndarray:
    """One angle for each row and pair of lanes; any will do."""
    return np.random.default_rng(3).uniform(-4, 4, (case.batch, case.head_size // 2))


def parts(case: cases.DecodeCase, qkv: Any) -> list[np.ndarray]:
    """Queries `[B, H, K]`, key and value `[B, G, K]` of a projection, rotated."""
    qkv = np.asarray(qkv, np.float64)
    q, k, v = qkv[:, :, :-2].reshape(len(qkv), -1, case.head_size), qkv[:, :, -2], qkv[:, :, -1]
    return [truth.turn(q, angles(case)), truth.turn(k, angles(case)), v] if case.rope else [q, k, v]


def check(case: cases.DecodeCase, inputs: Any, got: Any, dtype: str) -> None:
    """The output of active rows, and all of both caches, against the truth."""
    qkv, _, k_cache, v_cache, *_ = inputs
    q, k, v = parts(case, qkv)
    positions = case.row_positions()
    out, *caches = truth.decode(q, k, v, positions, k_cache, v_cache, case.window)
    active = np.array([0 <= p < case.cached for p in positions])
    assert (got[0].dtype, got[0].shape) == (qkv.dtype, q.shape)
    truth.assert_close(got[0][active], out[active], dtype)
    assert np.all(np.isfinite(np.asarray(got[0], np.float32)))
    for cache, want, exact in zip(got[1:], caches, (not case.rope, True), strict=True):
        if exact:
            np.testing.assert_array_equal(np.asarray(cache, np.float64), want)
        else:
            truth.assert_close(cache, want, dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_equals_truth_and_writes_one_row(case: cases.DecodeCase, implementation: str) -> None:
    """With NaN at every position that the row has not reached yet."""
    inputs = arrays(case, "float32")
    got = decode_attention(*inputs, window=case.window, implementation=implementation)
    check(case, inputs, got, "float32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", named(*BF16))
def test_equals_truth_in_bfloat16(case: cases.DecodeCase, implementation: str) -> None:
    inputs = arrays(case, "bfloat16")
    got = decode_attention(*inputs, window=case.window, implementation=implementation)
    check(case, inputs, got, "bfloat16")


@pytest.mark.parametrize("plan", TILINGS, ids=str)
@pytest.mark.parametrize(
    "case", named("gqa3_k8", "window40_gqa4_k8", "inactive_rows", "rope_gqa3_k80")
)
def test_tiling_changes_nothing(case: cases.DecodeCase, plan: Tiling) -> None:
    inputs = arrays(case, "float32")
    got = kernel(*inputs, window=case.window, tiling=plan)
    check(case, inputs, got, "float32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decoding_token_by_token_equals_attention(implementation: str) -> None:
    B, T, H, G, K = 2, 6, 4, 2, 8
    q, k, v = (truth.normal(i, (B, T, n, K), "float32") for i, n in enumerate((H, G, G)))
    caches = (jnp.full((B, G, T, K), jnp.nan),) * 2
    step = jax.jit(functools.partial(decode_attention, implementation=implementation))
    outs = []
    for t in range(T):
        token = q[:, t].reshape(B, G, -1, K), k[:, t, :, None], v[:, t, :, None]
        qkv = jnp.concatenate(token, axis=2)
        out, *caches = step(qkv, jnp.full((B,), t, jnp.int32), *caches)
        outs.append(out)
    want = attention(q, k, v, implementation="reference")
    truth.assert_close(jnp.stack(outs, axis=1), np.asarray(want), "float32")


@functools.cache
def narrow_arrays(case: cases.DecodeCase, form: str) -> tuple[Any, ...]:
    """Those of a case with caches of one byte a number, full of numbers, and their scales."""
    qkv, positions_B, k_cache, v_cache, _, _, *turn = arrays(case, "float32")
    stored = [narrowed(jnp.nan_to_num(cache), form) for cache in (k_cache, v_cache)]
    values, scales = zip(*stored, strict=True)
    return qkv, positions_B, *values, *scales, *turn


def check_narrow(case: cases.DecodeCase, inputs: Any, got: Any) -> None:
    """Against the truth on what the caches stand for, the rounded token among it. What is written
    may differ by one step, where a division rounds otherwise.
    """
    qkv, _, *stored = inputs[:6]
    form, caches = stored[0].dtype, [np.asarray(a).astype(np.float64) for a in stored]
    positions = case.row_positions()
    q, *token = parts(case, qkv)
    k, v = (np.asarray(widened(*narrowed(jnp.float32(a), form)), np.float64) for a in token)
    wide_k, wide_v = (caches[n] * caches[n + 2][..., None] for n in range(2))
    out, *stored = truth.decode(q, k, v, positions, wide_k, wide_v, case.window)
    active = np.array([0 <= p < case.cached for p in positions])
    np.testing.assert_allclose(got[0][active], out[active], rtol=1e-3, atol=1e-3)
    for n, want in enumerate(stored):
        values, scale = np.asarray(got[1 + n]).astype(np.float64), np.asarray(got[3 + n])
        assert got[1 + n].dtype == form
        np.testing.assert_allclose(values * scale[..., None], want, rtol=0.13, atol=0.05)
        changed = (values != caches[n]).any(axis=(1, 3)) | (scale != caches[n + 2]).any(axis=1)
        np.testing.assert_array_equal(changed.sum(axis=1), active)


NARROW = named("gqa3_k8", "mha_k80_ragged_cache", "inactive_rows", "rope_gqa3_k80")


@pytest.mark.parametrize("form", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", NARROW)
def test_caches_of_one_byte_equal_what_they_stand_for(
    case: cases.DecodeCase, implementation: str, form: str
) -> None:
    inputs = narrow_arrays(case, form)
    got = decode_attention(*inputs, window=case.window, implementation=implementation)
    check_narrow(case, inputs, got)


@pytest.mark.parametrize("plan", [TILINGS[1], TILINGS[3]], ids=str)
def test_tiling_changes_nothing_with_one_byte(plan: Tiling) -> None:
    case = next(c for c in cases.DECODE_TESTS if c.name == "window40_gqa4_k8")
    inputs = narrow_arrays(case, "int8")
    check_narrow(case, inputs, kernel(*inputs, window=case.window, tiling=plan))


@pytest.mark.parametrize(("form", "error"), [("int8", 0.5 / 127), ("float8_e4m3fn", 2**-4)])
def test_rounding_errs_by_half_a_step(form: str, error: float) -> None:
    """Of the largest number in int8; of each number, or of the smallest step, in fp8."""
    x = np.asarray(truth.normal(0, (5, 3, 64), "float32")).copy()
    x[2, 1] = 0
    x[3, 1] *= 1e-38
    values, scale = narrowed(jnp.asarray(x), form)
    largest = np.abs(x).max(-1, keepdims=True)
    bound = error * (largest if form == "int8" else np.maximum(np.abs(x), largest / 448 * 2**-5))
    wide = np.asarray(widened(values, scale))
    x[3, 1] = 0
    assert (np.abs(wide - x) <= bound * (1 + 1e-5)).all()
    assert (wide[2:4, 1] == 0).all()


def test_chosen_tiling_fits_small_and_large_shapes() -> None:
    assert tiling.choose(1, 32, 1, 64, 512, None) == Tiling(64, 4, 8, False)
    assert tiling.choose(64, 32, 1, 64, 512, None) == Tiling(64, 2, 1, True)
    assert tiling.choose(64, 32, 1, 128, 512, None) == Tiling(64, 4, 1, True)
    assert tiling.choose(64, 32, 1, 128, 512, None, 1) == Tiling(32, 1, 1, False)
    assert tiling.choose(64, 32, 1, 128, 512, None, 4) == Tiling(32, 2, 1, False)
    assert tiling.choose(8, 32, 1, 64, 512, None) == Tiling(128, 4, 1, False)
    assert tiling.choose(8, 32, 1, 64, 96, None) == Tiling(64, 4, 1, False)
    assert tiling.choose(1, 8, 4, 128, 4096, 64).num_splits == 1
    assert tiling.choose(1, 1, 1, 8, 3, None).num_splits == 1


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the kernel runs here")
def test_kernel_without_gpu_says_why() -> None:
    inputs = arrays(cases.DECODE_TESTS[0], "float32")
    with pytest.raises(dispatch.Unsupported, match="needs an NVIDIA GPU"):
        decode_attention(*inputs, implementation="pallas")


@pytest.mark.parametrize(
    ("rows", "dtype", "refused"),
    [
        (1024, "int8", False),
        (1025, "int8", True),
        (2048, "float8_e4m3fn", True),
        (2049, "int8", False),
        (1025, "bfloat16", False),
    ],
)
def test_offsets_that_wrap_are_refused(rows: int, dtype: str, refused: bool) -> None:
    """The backend counts in int32 up to 2^32 bytes, in int64 beyond. A row here has 2^21."""
    cache = jax.ShapeDtypeStruct((rows, 16, 2048, 64), dtype)
    qkv = jax.ShapeDtypeStruct((rows, 16, 3, 64), jnp.bfloat16)
    positions = jax.ShapeDtypeStruct((rows,), jnp.int32)
    args: Any = (qkv, positions, cache, cache)
    reason = pallas.why_not_interpret(*args, window=None)
    assert (reason is not None) == refused


def test_wrong_arguments_are_named() -> None:
    qkv, positions, k_cache, v_cache, *_ = arrays(cases.DECODE_TESTS[0], "float32")
    with pytest.raises(ValueError, match="expected"):
        decode_attention(qkv[:, :1], positions, k_cache, v_cache)
    with pytest.raises(ValueError, match="at least one query head"):
        decode_attention(qkv[:, :, :2], positions, k_cache, v_cache)
    with pytest.raises(ValueError, match="int32"):
        decode_attention(qkv, positions.astype(jnp.float32), k_cache, v_cache)
    with pytest.raises(ValueError, match="one dtype"):
        decode_attention(qkv, positions, k_cache, v_cache.astype(jnp.bfloat16))
    with pytest.raises(dispatch.Unsupported, match="one dtype"):
        decode_attention(
            qkv.astype(jnp.bfloat16), positions, k_cache, v_cache, implementation="interpret"
        )
    with pytest.raises(ValueError, match=r"expected two of float32 \[B,G,S\]"):
        decode_attention(qkv, positions, k_cache.astype("int8"), v_cache.astype("int8"))
    with pytest.raises(ValueError, match=r"expected float32 \[3,8\] both"):
        decode_attention(qkv, positions, k_cache, v_cache, cos_BK=jnp.ones((3, 8)))
    with pytest.raises(ValueError, match="power of two"):
        Tiling(48, 1, 1, False)


@pytest.mark.parametrize("form", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_token_that_is_not_a_number_shows_in_one_byte(implementation: str, form: str) -> None:
    """In its row's output and its scale, and in no other row's."""
    case = next(c for c in cases.DECODE_TESTS if c.name == "mha_k64")
    qkv, *rest = narrow_arrays(case, form)
    got = decode_attention(qkv.at[1, 0, 1, 3].set(jnp.nan), *rest, implementation=implementation)
    at = case.row_positions()[1]
    assert np.isnan(got[0][1, 0]).all()
    assert np.isnan(got[3][1, 0, at])
    assert np.isfinite(np.asarray(got[0])[0]).all()
    assert np.isfinite(np.asarray(got[0])[1, 1]).all()
