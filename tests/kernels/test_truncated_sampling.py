"""Every form draws the token that sorting the row says, whatever the row.

The truth has JAX's own noise, which the forms make for some tokens alone.

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
from kernels_pallas.truncated_sampling import shortlist, survey, whole
from kernels_pallas.truncated_sampling.api import truncated_sampling
from kernels_pallas.truncated_sampling.noise import gumbel
from kernels_pallas.truncated_sampling.rows import Tiling
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
    return logits, some_keys(case.batch)


def some_keys(count: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 2**32, (count, 2), np.uint32)


@functools.partial(jax.jit, static_argnums=1)
def noise_of(keys: jax.Array, vocab: int) -> jax.Array:
    return jax.vmap(lambda key: jax.random.gumbel(jax.random.wrap_key_data(key), (vocab,)))(keys)


def expected(case: cases.SamplingCase, logits: np.ndarray, keys: np.ndarray):
    noise = np.asarray(noise_of(keys, case.vocab))
    rows = [kept(row, **settings(case)) for row in logits]
    tokens = np.argmax(np.where(rows, logits + noise, -np.inf), 1)
    wide = logits.astype(np.float64)
    largest = wide.max(1, keepdims=True)
    log_sums = largest[:, 0] + np.log(np.exp(wide - largest).sum(1))
    return tokens, wide[np.arange(case.batch), tokens] - log_sums


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_draws_what_sorting_says(case: cases.SamplingCase, implementation: str) -> None:
    logits, keys = arrays(case)
    draw = functools.partial(truncated_sampling, **settings(case), implementation=implementation)
    token, logprob = jax.jit(draw)(logits, keys)
    want, want_logprob = expected(case, logits, keys)
    unrestricted = np.argmax(logits + np.asarray(noise_of(keys, case.vocab)), 1)
    assert (want != unrestricted).any()
    np.testing.assert_array_equal(token, want)
    np.testing.assert_allclose(logprob, want_logprob, rtol=2e-5, atol=2e-5)
    assert (token.dtype, logprob.dtype) == (jnp.int32, jnp.float32)


KERNELS = {
    "whole": whole.sample,
    "list": shortlist.sample,
    "list_too_short": functools.partial(shortlist.sample, room=4),
}
PAIRS = [(name, kernel) for name in ("top_k", "all_three") for kernel in KERNELS]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many programs and steps a row, with few lanes, whose largest logits say little of its own."""
    for module in (survey, shortlist):
        monkeypatch.setattr(module, "TILING", Tiling(16, 3, 1))
    for name, tiling in (("DRAW", (16, 2, 1)), ("SEARCH", (64, 1, 1))):
        monkeypatch.setattr(whole, name, Tiling(*tiling))
    monkeypatch.setattr(shortlist, "SEARCH", Tiling(64, 1, 1))


def assert_kernel_draws(kernel: str, case: cases.SamplingCase, logits: np.ndarray) -> None:
    keys = some_keys(case.batch)
    run = functools.partial(
        KERNELS[kernel],
        rule=Rule(case.top_k, case.top_p, case.min_p),
        interpret=KERNEL == "interpret",
    )
    token, _ = jax.jit(run)(logits, keys)
    np.testing.assert_array_equal(token, expected(case, logits, keys)[0])


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(("name", "kernel"), [*PAIRS, ("top_p_ragged", "whole")])
def test_kernel_and_tiling_change_nothing(name: str, kernel: str) -> None:
    case = next(case for case in cases.SAMPLING_TESTS if case.name == name)
    assert_kernel_draws(kernel, case, arrays(case)[0])


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_a_list_leaves_out_nothing_that_counts(spread: float) -> None:
    """Though the largest logits are side by side, or most are too far below to be drawn."""
    case = cases.SamplingCase("clustered", 12, 500, top_k=40, top_p=0.9, scale=spread)
    assert_kernel_draws("list", case, -np.sort(-arrays(case)[0], axis=1))


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("kernel", KERNELS)
def test_fewer_tokens_are_possible_than_k(kernel: str) -> None:
    case = cases.SamplingCase("few_possible", 12, 300, top_k=200)
    logits = arrays(case)[0]
    logits[:, 100:] = -np.inf
    assert_kernel_draws(kernel, case, logits)


def test_noise_of_a_token_is_that_of_all() -> None:
    keys, tokens = some_keys(3), np.array([0, 5, 999])
    some = jax.jit(gumbel)(keys[:, :1], keys[:, 1:], tokens[None])
    np.testing.assert_array_equal(some, np.asarray(noise_of(keys, 1000))[:, tokens])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tokens_as_likely_as_the_k_th_are_kept(implementation: str) -> None:
    """And those as likely as the last one of the nucleus: 0.4 + 3 x 0.2."""
    logits = np.log(np.tile([0.2, 0.4, 0.2, 0.2], (400, 1))).astype(np.float32)
    keys = some_keys(len(logits))
    rules: list[dict[str, Any]] = [{"top_k": 2}, {"top_p": 0.5}]
    for rule in rules:
        draw = functools.partial(truncated_sampling, **rule, implementation=implementation)
        token, _ = jax.jit(draw)(logits, keys)
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
    draw = jax.jit(functools.partial(truncated_sampling, **rule, implementation=implementation))
    token, _ = draw(np.tile(logits, (count, 1)), some_keys(count))
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
    draw = jax.jit(functools.partial(truncated_sampling, **rule, implementation=implementation))
    token, logprob = (np.asarray(x) for x in draw(logits, some_keys(len(logits))))
    assert ((token >= 0) & (token < 20)).all()
    assert (token[3], token[5]) == (4, 7)
    assert logprob[5] == 0
    assert np.isnan(logprob[[0, 1]]).all()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the kernel runs here")
def test_kernel_without_gpu_says_why() -> None:
    with pytest.raises(dispatch.Unsupported, match="needs an NVIDIA GPU"):
        truncated_sampling(jnp.zeros((2, 8)), jnp.asarray(some_keys(2)), implementation="pallas")


def test_wrong_arguments_are_named() -> None:
    z, keys = jnp.zeros((2, 8)), jnp.asarray(some_keys(2))
    with pytest.raises(ValueError, match=r"expected \[B,V\], not empty, and \[B,2\]"):
        truncated_sampling(z, keys[:1])
    with pytest.raises(ValueError, match="keys are float32; expected uint32"):
        truncated_sampling(z, keys.astype(jnp.float32))
    rules: list[dict[str, Any]] = [{"top_k": -1}, {"top_p": 0.0}, {"min_p": 1.5}]
    for wrong in rules:
        with pytest.raises(ValueError, match="top_p in"):
            truncated_sampling(z, keys, **wrong)
