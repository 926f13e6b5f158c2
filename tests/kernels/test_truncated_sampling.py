"""Both forms draw the token that sorting the row says, whatever the row.

On a GPU the compiled kernel takes the interpreter's place: `pytest --noconftest tests/kernels`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from kernels_pallas import cases, dispatch
from kernels_pallas.truncated_sampling import pallas
from kernels_pallas.truncated_sampling.api import truncated_sampling
from kernels_pallas.truncated_sampling.pallas import Tiling
from kernels_pallas.truncated_sampling.search import Rule
from tests.reference.sampling import kept, probabilities

KERNEL = "pallas" if jax.default_backend() == "gpu" else "interpret"
IMPLEMENTATIONS = ["reference", KERNEL]
CASES = [pytest.param(case, id=case.name) for case in cases.SAMPLING_TESTS]


def settings(case: cases.SamplingCase) -> dict[str, Any]:
    return {"top_k": case.top_k, "top_p": case.top_p, "min_p": case.min_p}


def arrays(case: cases.SamplingCase) -> tuple[np.ndarray, np.ndarray]:
    """A third of the rows have many equal logits; in one, half of the tokens are impossible."""
    rng = np.random.default_rng(0)
    shape = case.batch, case.vocab
    logits = rng.normal(0, case.scale, shape).astype(np.float32)
    logits[::3] = np.round(logits[::3], 1)
    logits[1, case.vocab // 2 :] = -np.inf
    return logits, rng.gumbel(size=shape).astype(np.float32)


def expected(case: cases.SamplingCase, logits: np.ndarray, noise: np.ndarray):
    rows = [kept(row, **settings(case)) for row in logits]
    tokens = np.argmax(np.where(rows, logits + noise, -np.inf), 1)
    wide = logits.astype(np.float64)
    largest = wide.max(1, keepdims=True)
    log_sums = largest[:, 0] + np.log(np.exp(wide - largest).sum(1))
    return tokens, wide[np.arange(case.batch), tokens] - log_sums


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_draws_what_sorting_says(case: cases.SamplingCase, implementation: str) -> None:
    logits, noise = arrays(case)
    draw = functools.partial(truncated_sampling, **settings(case), implementation=implementation)
    token, logprob = jax.jit(draw)(logits, noise)
    want, want_logprob = expected(case, logits, noise)
    unrestricted = np.argmax(logits + noise, 1)
    assert (want != unrestricted).any()
    np.testing.assert_array_equal(token, want)
    np.testing.assert_allclose(logprob, want_logprob, rtol=2e-5, atol=2e-5)
    assert (token.dtype, logprob.dtype) == (jnp.int32, jnp.float32)


@pytest.mark.parametrize("plan", [Tiling(16, 1), Tiling(64, 4)], ids=str)
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.id in ("top_p_of_top_k", "top_p_ragged", "min_p")]
)
def test_tiling_changes_nothing(case: cases.SamplingCase, plan: Tiling) -> None:
    """With few lanes, whose largest logits say little of the row's."""
    logits, noise = arrays(case)
    run = functools.partial(
        pallas.truncated_sampling,
        rule=Rule(case.top_k, case.top_p, case.min_p),
        tiling=plan,
        interpret=KERNEL == "interpret",
    )
    token, _ = jax.jit(run)(logits, noise)
    np.testing.assert_array_equal(token, expected(case, logits, noise)[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tokens_as_likely_as_the_k_th_are_kept(implementation: str) -> None:
    """And those as likely as the last one of the nucleus: 0.4 + 3 x 0.2."""
    logits = np.log(np.tile([0.2, 0.4, 0.2, 0.2], (400, 1))).astype(np.float32)
    noise = np.random.default_rng(0).gumbel(size=logits.shape).astype(np.float32)
    rules: list[dict[str, Any]] = [{"top_k": 2}, {"top_p": 0.5}]
    for rule in rules:
        draw = functools.partial(truncated_sampling, **rule, implementation=implementation)
        token, _ = jax.jit(draw)(logits, noise)
        assert set(np.asarray(token)) == {0, 1, 2, 3}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "rule",
    [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.7, "min_p": 0.1}],
    ids=str,
)
def test_frequencies_follow_the_truncated_softmax(
    rule: dict[str, Any], implementation: str
) -> None:
    logits, count = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -1.0, -np.inf], np.float32), 2000
    noise = np.random.default_rng(1).gumbel(size=(count, len(logits))).astype(np.float32)
    draw = jax.jit(functools.partial(truncated_sampling, **rule, implementation=implementation))
    token, _ = draw(np.tile(logits, (count, 1)), noise)
    want = probabilities(logits, temperature=1.0, **rule)
    counts = np.bincount(np.asarray(token), minlength=len(logits))
    assert (counts[want == 0] == 0).all()
    assert (want > 0).sum() > 1
    assert chisquare(counts[want > 0], want[want > 0] * count).pvalue > 1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "rule",
    [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.7, "min_p": 0.1}],
    ids=str,
)
def test_rows_that_are_not_numbers_end(rule: dict[str, Any], implementation: str) -> None:
    """What is drawn beside NaN and infinities does not matter, only that something is."""
    inf, nan, least = np.inf, np.nan, np.finfo(np.float32).min
    logits = np.zeros((7, 20), np.float32)
    logits[0], logits[1, ::2], logits[2], logits[3, 4], logits[4, :9] = nan, nan, -inf, inf, inf
    logits[5], logits[5, 7] = -inf, -3.0  # one token is allowed
    logits[6] = least
    noise = np.random.default_rng(2).gumbel(size=logits.shape).astype(np.float32)
    draw = jax.jit(functools.partial(truncated_sampling, **rule, implementation=implementation))
    token, logprob = (np.asarray(x) for x in draw(logits, noise))
    assert ((token >= 0) & (token < 20)).all()
    assert (token[3], token[5]) == (4, 7)
    assert logprob[5] == 0
    assert np.isnan(logprob[[0, 1]]).all()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the kernel runs here")
def test_kernel_without_gpu_says_why() -> None:
    with pytest.raises(dispatch.Unsupported, match="needs an NVIDIA GPU"):
        truncated_sampling(jnp.zeros((2, 8)), jnp.zeros((2, 8)), implementation="pallas")


def test_wrong_arguments_are_named() -> None:
    z = jnp.zeros((2, 8))
    with pytest.raises(ValueError, match=r"expected \[B,V\] twice"):
        truncated_sampling(z, z[:1])
    with pytest.raises(ValueError, match="noise are bfloat16; cast to float32"):
        truncated_sampling(z, z.astype(jnp.bfloat16))
    rules: list[dict[str, Any]] = [{"top_k": -1}, {"top_p": 0.0}, {"min_p": 1.5}]
    for wrong in rules:
        with pytest.raises(ValueError, match="top_p in"):
            truncated_sampling(z, z, **wrong)
