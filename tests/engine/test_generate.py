"""Answers on one device: they are what the whole-row forward pass would give, and end when due."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.engine import generate as generate_module
from rlhf_jax.engine.generate import Rollout
from rlhf_jax.engine.sampling import SamplingConfig
from tests.engine.drive import PROMPT_LENGTHS, Driver, P, prompts
from tests.models.cases import MODELS, OPT
from tests.reference.sampling import penalised

R = 6
STOPS = tuple(range(3, 17))
"""So many that rows end at different lengths."""
SAMPLED = SamplingConfig(max_new_tokens=R, temperature=0.7)


@functools.cache
def rollout_of(name: str) -> Rollout:
    return Driver(MODELS[name], stop_ids=STOPS).generate(SAMPLED)


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decode_equal_the_whole_row(name, tolerance):
    """The rollout's log-probabilities are the training graph's on prompt and answer."""
    driver, rollout = Driver(MODELS[name], stop_ids=STOPS), rollout_of(name)
    whole = driver.logprobs(rollout, prompts(), SAMPLED.temperature)
    real = np.arange(R) < rollout.lengths_B[:, None]
    assert real.sum() > 15
    np.testing.assert_allclose(rollout.logprobs_BR[real], whole[real], **tolerance(np.float32))


def test_they_do_in_bfloat16_on_a_mesh_too(tolerance):
    """Decode and training round differently: what the run logs as rollout/logprob_diff_mean."""
    driver = Driver(OPT, "4x2", 4, dtype=jnp.bfloat16)
    rollout = driver.generate(SAMPLED)
    whole = driver.logprobs(rollout, prompts(), SAMPLED.temperature)
    assert whole.dtype == rollout.logprobs_BR.dtype == np.float32
    np.testing.assert_allclose(rollout.logprobs_BR[:-1], whole[:-1], **tolerance(jnp.bfloat16))


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_a_row_ends_with_its_first_stop_token(name):
    rollout = rollout_of(name)
    lengths = rollout.lengths_B[:-1]
    assert len(set(lengths)) > 2
    for tokens, length, ended in zip(rollout.tokens_BR, lengths, rollout.ended_B, strict=False):
        assert not np.isin(tokens[: length - 1], STOPS).any()
        assert np.isin(tokens[length - 1], STOPS) == ended
        assert ended or length == R
    behind = np.arange(R) >= rollout.lengths_B[:, None]
    assert (rollout.tokens_BR[behind] == 0).all()
    assert (rollout.logprobs_BR[behind] == 0).all()


def test_an_inactive_row_stays_empty():
    rollout = rollout_of("opt")
    assert rollout.lengths_B[-1] == 0
    assert not rollout.ended_B[-1]
    assert (rollout.tokens_BR[-1] == 0).all()


@pytest.fixture(scope="module")
def padded() -> tuple[np.ndarray, Rollout]:
    """Which sample each row is, and answers to wider prompts with more filler, in another order."""
    batch = prompts(width=P + 5)
    order = np.array([4, 7, 0, 7, 2, 6, 5, 7, 1, 7, 3, 7])
    wide = jax.tree.map(lambda array: array[order], batch)
    wide = replace(wide, sample_ids_B=np.where(order == 7, 0, wide.sample_ids_B))
    return order, Driver(MODELS["opt"], stop_ids=STOPS).generate(SAMPLED, wide)


def test_neither_padding_nor_filler_rows_nor_order_change_an_answer(padded, tolerance):
    order, wide = padded
    narrow = rollout_of("opt")
    np.testing.assert_array_equal(wide.tokens_BR, narrow.tokens_BR[order])
    np.testing.assert_array_equal(wide.lengths_B, narrow.lengths_B[order])
    np.testing.assert_allclose(wide.logprobs_BR, narrow.logprobs_BR[order], **tolerance(np.float32))


def test_the_same_prompt_with_another_sample_id_gets_another_answer():
    driver = Driver(MODELS["opt"], stop_ids=STOPS)
    batch = prompts()
    other = driver.generate(SAMPLED, replace(batch, sample_ids_B=batch.sample_ids_B + 50))
    assert (other.tokens_BR != rollout_of("opt").tokens_BR)[:-1].any(axis=1).sum() >= 6


def test_the_loop_ends_with_the_last_row(monkeypatch):
    """Each pass through the model is counted by the running program itself."""
    calls = []
    decode_step = generate_module.decode_step

    def counted(*args):
        jax.debug.callback(lambda: calls.append(1))
        return decode_step(*args)

    monkeypatch.setattr(generate_module, "decode_step", counted)
    sampling = SamplingConfig(max_new_tokens=20)
    rollout = Driver(OPT, stop_ids=tuple(range(3, 60))).generate(sampling)
    jax.effects_barrier()
    assert rollout.ended_B[:-1].all()
    assert 2 < rollout.lengths_B.max() < 20
    assert len(calls) == rollout.lengths_B.max() - 1  # prefill gives the first token


def test_min_new_tokens_holds_back_every_stop_token():
    """With all tokens but one stopping, the first tokens are that one and the next one ends."""
    stops = tuple(token for token in range(OPT.vocab_size) if token != 50)
    driver = Driver(OPT, stop_ids=stops)
    rollout = driver.generate(SamplingConfig(max_new_tokens=R, min_new_tokens=3))
    assert (rollout.tokens_BR[:-1, :3] == 50).all()
    assert (rollout.lengths_B[:-1] >= 4).all()
    assert (rollout.lengths_B[:-1] == 4).sum() >= 6
    whole = driver.logprobs(rollout, prompts(), 1.0)
    np.testing.assert_allclose(rollout.logprobs_BR[:-1, :3], whole[:-1, :3], rtol=1e-4)


@pytest.mark.parametrize(("mesh", "inference_tp"), [("1x1", 1), ("4x2", 4)])
def test_a_repetition_penalty_counts_prompt_and_answer(mesh, inference_tp):
    """Greedy answers against the logits of whole rows, penalised one token at a time in NumPy."""
    driver = Driver(OPT, mesh, inference_tp)
    sampling = SamplingConfig(max_new_tokens=R, temperature=0.0, repetition_penalty=3.0)
    rollout, batch = driver.generate(sampling), prompts()
    rows = driver.rows(rollout, batch)
    logits, changed = driver.logits(rows), 0
    for row, start, scores in zip(rows[:-1], batch.lengths_B, logits, strict=False):
        for t in range(start, start + R):
            plain = scores[t - 1, : OPT.vocab_size]
            choice = penalised(plain, list(row[:t]), 3.0)
            best, second = np.sort(choice)[[-1, -2]]
            assert row[t] == choice.argmax() or best - second < 1e-5
            changed += row[t] != plain.argmax()
    assert changed > 10


def test_answers_never_hold_padding_of_the_vocabulary():
    """Padded columns are -inf, even at a temperature that makes all tokens equally likely."""
    hot = Driver(OPT).generate(SamplingConfig(max_new_tokens=25, temperature=1e6))
    assert hot.tokens_BR.max() < OPT.vocab_size
    assert (hot.lengths_B == np.where(np.arange(8) < 7, 25, 0)).all()
    assert len(set(hot.tokens_BR[:-1].ravel())) > 80
    np.testing.assert_allclose(hot.logprobs_BR[:-1], -np.log(OPT.vocab_size), rtol=1e-4)


def test_prompt_lengths_differ_in_the_batch_under_test():
    assert len(set(PROMPT_LENGTHS)) > 4
    assert PROMPT_LENGTHS.max() == P
