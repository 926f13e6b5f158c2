"""Which tokens are drawn and how often, against the distribution they should come from."""

from functools import partial

import jax
import numpy as np
import pytest
from scipy.stats import chisquare

from meshes.layout import Layout, make_mesh, parse_mesh
from rlhf_jax.engine.sampling import SamplingConfig, sample, seen_tokens
from tests.reference.sampling import penalised, probabilities

V, MANY = 8, 4096
LOGITS = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -1.0, -2.0, -np.inf], np.float32)
LAYOUT = Layout.create(make_mesh(parse_mesh("1x1"), 1), "generate", {"vocab": V})


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


@partial(jax.jit, static_argnums=(3, 4))
def run(logits, ids, index, cfg: SamplingConfig, stop_ids: tuple[int, ...], seen, key):
    return sample(logits, ids, index, cfg, stop_ids, LAYOUT, seen, key=key)


def draw(
    cfg: SamplingConfig, *, index: int = 0, stop_ids=(), seed: int = 0, ids=None, logits=None,
    seen=None,
):  # fmt: skip
    """Tokens and log-probabilities of many samples from the same logits."""
    ids = np.arange(MANY, dtype=np.int32) if ids is None else ids
    logits = np.tile(LOGITS, (len(ids), 1)) if logits is None else logits
    with jax.set_mesh(LAYOUT.mesh):
        token, logprob = run(
            logits,
            ids,
            np.full(len(ids), index, np.int32),
            cfg,
            stop_ids,
            seen,
            jax.random.key(seed),
        )
    return np.asarray(token), np.asarray(logprob)


def assert_drawn_from(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    counts = np.bincount(tokens, minlength=V)
    possible = probabilities > 0
    assert (counts[~possible] == 0).all()
    expected = probabilities[possible] * len(tokens)
    if possible.sum() > 1:
        assert chisquare(counts[possible], expected).pvalue > 1e-3


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_frequencies_follow_the_softmax_at_the_temperature(temperature):
    tokens, logprobs = draw(SamplingConfig(temperature=temperature))
    expected = softmax(LOGITS / temperature)
    assert_drawn_from(tokens, expected)
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), rtol=1e-5)


def test_the_test_of_frequencies_notices_another_temperature():
    tokens, _ = draw(SamplingConfig(temperature=1.0))
    with pytest.raises(AssertionError):
        assert_drawn_from(tokens, softmax(LOGITS / 1.2))


@pytest.mark.parametrize(
    ("cfg", "kept"),
    [
        (SamplingConfig(top_k=3), 3),
        (SamplingConfig(top_k=100), 7),
        (SamplingConfig(top_p=0.7), 3),  # 0.41 + 0.25 + 0.15 is the first sum beyond 0.7
        (SamplingConfig(top_p=1e-6), 1),
        (SamplingConfig(top_k=2, top_p=0.99), 2),
    ],
)
def test_top_k_and_top_p_draw_from_what_they_keep(cfg, kept):
    tokens, logprobs = draw(cfg)
    expected = softmax(np.where(np.arange(V) < kept, LOGITS, -np.inf))
    assert_drawn_from(tokens, expected)
    np.testing.assert_allclose(logprobs, np.log(softmax(LOGITS)[tokens]), rtol=1e-5)


@pytest.mark.parametrize("cfg", [SamplingConfig(top_p=0.9999), SamplingConfig(top_k=7)])
def test_a_rule_that_keeps_everything_changes_no_token(cfg):
    """Truncation makes its own noise, of the tokens it needs."""
    np.testing.assert_array_equal(draw(cfg)[0], draw(SamplingConfig())[0])


@pytest.mark.parametrize(
    "cfg",
    [
        SamplingConfig(min_p=0.3),
        SamplingConfig(min_p=0.3, temperature=2.0),
        SamplingConfig(min_p=1.0),
        SamplingConfig(min_p=0.5, top_k=4, top_p=0.9, temperature=0.7),
    ],
)
def test_min_p_keeps_what_has_its_share_of_the_likeliest_at_the_temperature(cfg):
    """The log-probability stays the policy's: what training computes from the row."""
    tokens, logprobs = draw(cfg)
    expected = probabilities(
        LOGITS, temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p, min_p=cfg.min_p
    )
    assert 0 < (expected == 0).sum() < V
    assert_drawn_from(tokens, expected)
    np.testing.assert_allclose(
        logprobs, np.log(softmax(LOGITS / cfg.temperature)[tokens]), rtol=1e-5
    )


@pytest.mark.parametrize("penalty", [1.5, 0.7])
def test_tokens_that_were_there_become_less_likely_or_more(penalty):
    """Of both signs; logits are penalised before they are divided by the temperature."""
    cfg = SamplingConfig(repetition_penalty=penalty, temperature=0.6)
    logits, seen = LOGITS - 1.0, [0, 3, 6]
    assert logits[seen].min() < 0 < logits[seen].max()
    seen_BV = np.tile(np.isin(np.arange(V), seen), (MANY, 1))
    tokens, logprobs = draw(cfg, logits=np.tile(logits, (MANY, 1)), seen=seen_BV)
    assert_drawn_from(tokens, probabilities(penalised(logits, seen, penalty), temperature=0.6))
    np.testing.assert_allclose(logprobs, np.log(softmax(logits / 0.6)[tokens]), rtol=1e-5)


def test_the_tokens_of_a_row_are_those_before_its_length():
    tokens = np.array([[3, 1, 3, 0], [2, 2, 5, 6], [4, 4, 4, 4]], np.int32)
    with jax.set_mesh(LAYOUT.mesh):
        seen = jax.jit(partial(seen_tokens, vocab=V, layout=LAYOUT))(
            tokens, np.array([3, 4, 0], np.int32)
        )
    assert [set(np.flatnonzero(row)) for row in np.asarray(seen)] == [{1, 3}, {2, 5, 6}, set()]


@pytest.mark.parametrize(
    ("cfg", "named"),
    [
        (SamplingConfig(temperature=0.5), ()),
        (SamplingConfig(min_p=0.1, top_k=5), ("top_k=5", "min_p=0.1")),
        (SamplingConfig(repetition_penalty=1.2), ("repetition_penalty=1.2",)),
        (SamplingConfig(temperature=0.0), ("temperature=0.0",)),
        (SamplingConfig(top_p=0.9, min_new_tokens=2), ("min_new_tokens=2", "top_p=0.9")),
    ],
)
def test_what_draws_from_another_distribution_than_it_reports_is_named(cfg, named):
    assert cfg.off_policy == named


def test_greedy_takes_the_largest_and_scores_at_temperature_1():
    logits = np.random.default_rng(0).normal(size=(16, V)).astype(np.float32)
    tokens, logprobs = draw(
        SamplingConfig(temperature=0), ids=np.zeros(16, np.int32), logits=logits
    )
    np.testing.assert_array_equal(tokens, logits.argmax(1))
    expected = [np.log(softmax(row)[token]) for row, token in zip(logits, tokens, strict=True)]
    np.testing.assert_allclose(logprobs, expected, rtol=1e-5)


def test_no_stop_token_is_drawn_before_min_new_tokens():
    """The log-probability is still the policy's, which may stop: training computes the same."""
    cfg = SamplingConfig(min_new_tokens=2)
    early, logprobs = draw(cfg, index=1, stop_ids=(0, 3))
    stopped = np.isin(np.arange(V), (0, 3))
    assert_drawn_from(early, softmax(np.where(stopped, -np.inf, LOGITS)))
    np.testing.assert_allclose(logprobs, np.log(softmax(LOGITS)[early]), rtol=1e-5)
    late, _ = draw(cfg, index=2, stop_ids=(0, 3))
    assert_drawn_from(late, softmax(LOGITS))


def test_noise_depends_on_key_sample_and_index_and_not_on_the_place_in_the_batch():
    cfg, ids = SamplingConfig(), np.arange(MANY, dtype=np.int32)
    tokens, _ = draw(cfg)
    order = np.random.default_rng(1).permutation(MANY).astype(np.int32)
    np.testing.assert_array_equal(draw(cfg, ids=ids[order])[0], tokens[order])
    chance = np.square(softmax(LOGITS)).sum()
    for other in (draw(cfg, index=1), draw(cfg, seed=1), draw(cfg, ids=ids + MANY)):
        assert np.mean(other[0] == tokens) == pytest.approx(chance, abs=0.04)
    assert np.mean(tokens[1:] == tokens[:-1]) == pytest.approx(chance, abs=0.04)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        (
            {"max_new_tokens": 4, "min_new_tokens": 5},
            "min_new_tokens=5 must lie .* max_new_tokens=4",
        ),
        ({"temperature": -1.0}, r"temperature must be 0 \(greedy\) or positive, .* got -1.0"),
        ({"top_k": -1}, "top_k must be 0 .* got top_k=-1"),
        ({"min_p": 1.5}, r"min_p must lie in \[0, 1\] .* got 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive .* got 0.0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be .* got inf"),
        ({"temperature": float("inf")}, "temperature must be .* got inf"),
        ({"temperature": float("nan")}, "temperature must be .* got nan"),
        ({"temperature": 1e-40}, "temperature must be .* from 1e-30 to 1e.30, got 1e-40"),
        ({"temperature": 1e38}, "temperature must be .* got 1e.38"),
        ({"repetition_penalty": 1e39}, "repetition_penalty must be .* got 1e.39"),
        ({"top_p": 0.0}, r"top_p in \(0, 1\], got .*top_p=0.0"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**changes)
