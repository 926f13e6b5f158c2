"""Every implementation of token_logprob equals the NumPy truth; chunks change no gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import cases
from kernels_pallas.token_logprob.api import token_logprob
from tests.kernels import truth

CASES = [pytest.param(case, id=case.name) for case in cases.TOKEN_LOGPROB_TESTS]
IMPLEMENTATIONS = ["reference", "chunked"]


def arrays(case: cases.TokenLogprobCase, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    hidden = truth.normal(0, (case.tokens, case.width), dtype)
    unembed = truth.normal(1, (case.vocab, case.width), dtype)
    targets = np.random.default_rng(2).integers(0, case.valid_vocab, case.tokens)
    return hidden, unembed, jnp.asarray(targets, jnp.int32)


def function(case: cases.TokenLogprobCase, implementation: str | None = None, keep: bool = False):
    return functools.partial(
        token_logprob,
        valid_vocab=case.valid_vocab,
        chunk=case.chunk,
        temperature=case.temperature,
        implementation=implementation,
        keep_probs=keep,
    )


def gradients(
    case: cases.TokenLogprobCase,
    implementation: str,
    dtype: str,
    scale: float = 1.0,
    *,
    keep: bool = False,
):
    """Gradients of weighted log-probs and entropies with respect to hidden and unembed."""
    hidden, unembed, targets = arrays(case, dtype)
    weights = truth.normal(5, (2, case.tokens), "float32")

    def loss(hidden, unembed):
        logprob, entropy = function(case, implementation, keep)(hidden * scale, unembed, targets)
        return jnp.sum(weights[0] * logprob + weights[1] * entropy)

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, unembed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_equals_truth(case: cases.TokenLogprobCase, implementation: str, dtype: str) -> None:
    inputs = arrays(case, dtype)
    logprob, entropy = function(case, implementation)(*inputs)
    assert logprob.dtype == entropy.dtype == jnp.float32
    want = truth.token_logprob(*inputs, case.valid_vocab, case.temperature)
    # Logits come in fp32 from bf16 inputs as well: the products are exact.
    truth.assert_close(logprob, want[0], "float32")
    truth.assert_close(entropy, want[1], "float32")


@pytest.mark.parametrize("case", CASES)
def test_gradient_equals_plain_form(case: cases.TokenLogprobCase) -> None:
    chunked, plain = (gradients(case, i, "float32") for i in ("chunked", "reference"))
    for a, b in zip(chunked, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_kept_probabilities_change_no_gradient(case: cases.TokenLogprobCase) -> None:
    """In float32; in bfloat16 probabilities are rounded, as their gradient is anyway."""
    kept, anew = (gradients(case, "chunked", "float32", keep=keep) for keep in (True, False))
    for a, b in zip(kept, anew, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    kept, anew = (gradients(case, "chunked", "bfloat16", keep=keep) for keep in (True, False))
    for a, b in zip(kept, anew, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0.03, atol=0.01 * np.abs(b).max())


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("count", [0, 1, 9, 12, 13, 26])
def test_rows_that_do_not_count_are_left_out(count: int, keep: bool) -> None:
    """In chunks of 4. Values of the others, and gradients of a loss that reads only them, are those
    of the plain form; behind the last chunk with a row that counts stands 0.
    """
    case = cases.TokenLogprobCase("counted", 26, 16, 32, 30, 4)
    hidden, unembed, targets = arrays(case, "float32")
    weights = truth.normal(5, (2, case.tokens), "float32") * (jnp.arange(case.tokens) < count)
    # What does not count may be anything.
    hidden = hidden.at[-(-count // 4) * 4 :].set(jnp.nan)

    def loss(hidden, unembed, count):
        both = function(case, keep=keep)(hidden, unembed, targets, count=count)
        return jnp.sum(weights * jnp.where(weights != 0, jnp.stack(both), 0)), both

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, both), grads = run(hidden, unembed, jnp.int32(count))
    zeros = jnp.where(jnp.isnan(hidden), 0, hidden)
    want = truth.token_logprob(zeros, unembed, targets, case.valid_vocab, case.temperature)
    for got, expected in zip(both, want, strict=True):
        truth.assert_close(got[:count], expected[:count], "float32")
        np.testing.assert_array_equal(got[-(-count // 4) * 4 :], 0)
    (_, _), plain = run(zeros, unembed, None)
    for a, b in zip(grads, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_gradient_equals_difference_of_truth() -> None:
    case = cases.TOKEN_LOGPROB_TESTS[1]
    hidden, unembed, targets = (np.asarray(x) for x in arrays(case, "float32"))
    weights = np.asarray(truth.normal(5, (2, case.tokens), "float32"), np.float64)

    def loss(hidden, unembed):
        both = truth.token_logprob(hidden, unembed, targets, case.valid_vocab, case.temperature)
        return float(np.sum(weights * np.stack(both)))

    grads = [np.asarray(g, np.float64) for g in gradients(case, "chunked", "float32")]
    h, w = hidden.astype(np.float64), unembed.astype(np.float64)
    along_h, along_w = (np.random.default_rng(7).standard_normal(x.shape) for x in (h, w))
    want_h = truth.central_difference(lambda x: loss(x, w), h, along_h)
    want_w = truth.central_difference(lambda x: loss(h, x), w, along_w)
    np.testing.assert_allclose(np.sum(grads[0] * along_h), want_h, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.sum(grads[1] * along_w), want_w, rtol=1e-4, atol=1e-4)


def test_unembedding_gradient_does_not_lose_precision_with_many_chunks() -> None:
    case = cases.TokenLogprobCase("long", 512, 16, 32, 32, 4)
    whole = cases.TokenLogprobCase("long", 512, 16, 32, 32, 512)
    got, want = (
        np.asarray(gradients(c, "chunked", "bfloat16")[1], np.float64) for c in (case, whole)
    )
    # One rounding to bf16 at the end on both sides: at most one unit in the last place apart.
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("keep", [False, True])
def test_padding_and_certainty_give_no_nan(implementation: str, keep: bool) -> None:
    """Probabilities that underflow to 0, and padded columns, leave values and gradients finite."""
    case = cases.TOKEN_LOGPROB_TESTS[1]
    grads = gradients(case, implementation, "float32", scale=100.0, keep=keep)
    assert all(np.all(np.isfinite(g)) for g in grads)
    np.testing.assert_array_equal(grads[1][case.valid_vocab :], 0.0)


def test_padded_columns_have_no_effect() -> None:
    case = cases.TOKEN_LOGPROB_TESTS[1]
    hidden, unembed, targets = arrays(case, "float32")
    loud = unembed.at[case.valid_vocab :].set(1e4)
    for a, b in zip(
        function(case)(hidden, unembed, targets), function(case)(hidden, loud, targets), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_wrong_arguments_are_named() -> None:
    hidden, unembed, targets = arrays(cases.TOKEN_LOGPROB_TESTS[0], "float32")
    with pytest.raises(ValueError, match="valid_vocab=33"):
        token_logprob(hidden, unembed, targets, valid_vocab=33, chunk=4)
    with pytest.raises(ValueError, match="chunk=0"):
        token_logprob(hidden, unembed, targets, valid_vocab=32, chunk=0)
    with pytest.raises(ValueError, match="one dtype"):
        token_logprob(hidden.astype(jnp.bfloat16), unembed, targets, valid_vocab=32, chunk=4)
    with pytest.raises(ValueError, match="temperature=0"):
        token_logprob(hidden, unembed, targets, valid_vocab=32, chunk=4, temperature=0.0)
