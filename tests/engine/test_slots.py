"""Slots that are filled again: the plain loop's answers, in as many passes as are counted."""

import functools
import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from meshes.reshard import put_batch
from rlhf_jax.data.batches import PromptBatch
from rlhf_jax.engine import hybrid as hybrid_module
from rlhf_jax.engine import slots as slots_module
from rlhf_jax.engine.generate import Decoding, Rollout, generate
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.engine.slot_counts import Passes, passes_in_slots, passes_in_waves
from rlhf_jax.engine.slots import generate_in_slots, group_size
from rlhf_jax.models.config import ModelConfig
from tests.engine.drive import Driver, P
from tests.meshes.compiled import TYPE, collectives, gathered
from tests.models.cases import LLAMA, OPT

N, R = 44, 12
STOPS = tuple(range(3, 24))
SAMPLED = SamplingConfig(max_new_tokens=R, temperature=0.7)
KEY = jax.random.key(5)


def many_prompts() -> PromptBatch:
    """Prompts of all lengths, with fillers at the end and between the others."""
    rng = np.random.default_rng(0)
    number = np.arange(N)
    return PromptBatch(
        tokens_BP=rng.integers(3, 99, (N, P)).astype(np.int32),
        lengths_B=rng.integers(1, P + 1, N).astype(np.int32),
        sample_ids_B=np.arange(100, 100 + N, dtype=np.int32),
        valid_B=((number % 9 != 4) & (number < N - 2)).astype(np.float32),
    )


def rows_of(batch: PromptBatch, where: Any) -> PromptBatch:
    return jax.tree.map(lambda array: array[where], batch)


def driver_on(mesh: str, tp: int, slots: int | None, cfg: ModelConfig = OPT) -> Driver:
    return Driver(cfg, mesh, tp, STOPS, slots=slots)


@functools.cache
def one_by_one(sampling: SamplingConfig, cfg: ModelConfig = OPT) -> Rollout:
    """The plain loop with one prompt at a time: nothing shares its batch."""
    driver, batch = Driver(cfg, stop_ids=STOPS), many_prompts()
    parts = [driver.generate(sampling, rows_of(batch, slice(n, n + 1))) for n in range(N)]
    return jax.tree.map(lambda *rows: np.concatenate(rows), *parts)


def limited(batch: PromptBatch) -> PromptBatch:
    """With limits from one token to more than the sampling's."""
    return replace(batch, limits_B=np.random.default_rng(1).integers(1, R + 3, N).astype(np.int32))


def assert_same(got: Rollout, expected: Rollout) -> None:
    np.testing.assert_array_equal(got.tokens_BR, expected.tokens_BR)
    np.testing.assert_array_equal(got.lengths_B, expected.lengths_B)
    np.testing.assert_array_equal(got.ended_B, expected.ended_B)
    np.testing.assert_allclose(got.logprobs_BR, expected.logprobs_BR, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "tp", "slots"), [("1x1", 1, 16), ("4x2", 2, 8), ("4x2", 4, 32), ("2x2x2", 2, 4)]
)
def test_a_prompt_gets_the_answer_that_it_gets_alone(mesh, tp, slots):
    """On one share of the batch, four and two; groups of two prompts, four, two times two."""
    assert_same(driver_on(mesh, tp, slots).generate(SAMPLED, many_prompts()), one_by_one(SAMPLED))


def test_it_does_with_grouped_heads_and_rotary_positions():
    got = driver_on("4x2", 2, 8, LLAMA).generate(SAMPLED, many_prompts())
    assert_same(got, one_by_one(SAMPLED, LLAMA))


def test_the_first_tokens_and_the_tokens_so_far_are_a_prompts_own():
    """`min_new_tokens` counts from its first token, the penalty knows its prompt and its answer."""
    sampling = replace(SAMPLED, min_new_tokens=3, repetition_penalty=1.5)
    got = driver_on("1x1", 1, 8).generate(sampling, many_prompts())
    assert_same(got, one_by_one(sampling))
    assert (got.tokens_BR != one_by_one(SAMPLED).tokens_BR).any(axis=1).sum() > N / 2


def test_limits_cut_the_answers_that_there_are_without_them():
    """In both loops; a row that is cut has not ended."""
    whole, batch = one_by_one(SAMPLED), limited(many_prompts())
    assert batch.limits_B is not None
    cut = whole.lengths_B > batch.limits_B
    assert 5 < cut.sum() < N - 5
    assert batch.limits_B.min() == 1
    keep = np.arange(R) < np.minimum(whole.lengths_B, batch.limits_B)[:, None]
    arrays: Any = (
        np.where(keep, whole.tokens_BR, 0), np.where(keep, whole.logprobs_BR, 0),
        keep.sum(1), whole.ended_B & ~cut,
    )  # fmt: skip
    expected = Rollout(*arrays)
    for slots in (16, None):
        assert_same(driver_on("1x1", 1, slots).generate(SAMPLED, batch), expected)


def test_answers_under_test_have_many_lengths():
    lengths = one_by_one(SAMPLED).lengths_B
    assert (lengths == 1).sum() >= 2
    assert (lengths == R).sum() >= 2
    assert len(set(lengths)) > 8
    assert (lengths == 0).sum() == (many_prompts().valid_B == 0).sum() > 5


def test_a_batch_of_fillers_stays_empty():
    batch = replace(many_prompts(), valid_B=np.zeros(N, np.float32))
    rollout = driver_on("1x1", 1, 16).generate(SAMPLED, batch)
    assert not any(leaf.any() for leaf in jax.tree.leaves(rollout))


def test_as_many_slots_as_prompts_are_the_plain_loop(monkeypatch):
    monkeypatch.setattr(hybrid_module, "generate_in_slots", None)
    got = driver_on("1x1", 1, N).generate(SAMPLED, many_prompts())
    assert_same(got, one_by_one(SAMPLED))


@pytest.mark.parametrize(("mesh", "tp", "slots"), [("1x1", 1, 16), ("4x1", 1, 8)])
def test_the_model_runs_as_often_as_counted(monkeypatch, mesh, tp, slots):
    """Each pass is counted by the running program itself."""
    calls: list[str] = []

    def counted(name: str):
        original = getattr(slots_module, name)

        def run(*args: Any) -> Any:
            jax.debug.callback(lambda: calls.append(name))
            return original(*args)

        monkeypatch.setattr(slots_module, name, run)

    counted("decode_step")
    counted("prefill_into")
    driver = driver_on(mesh, tp, slots)
    lengths = np.asarray(driver.generate(SAMPLED, many_prompts()).lengths_B)
    jax.effects_barrier()
    found = passes_in_slots(lengths, slots, driver.engine.rollout.batch_size_divisor)
    assert calls.count("decode_step") == found.steps
    assert calls.count("prefill_into") == found.prefills
    assert found.steps < passes_in_waves(lengths, slots).steps


def test_passes_are_those_that_a_person_counts():
    """Two slots, groups of one. The first prompt and, as the second ends with its first token, the
    third start at once; a step later the fourth takes the third's place.
    """
    assert group_size(2, 1) == 1
    lengths = np.array([3, 1, 2, 2])
    assert passes_in_slots(lengths, 2) == Passes(prefills=4, steps=2, busy=1.0)
    assert passes_in_waves(lengths, 2) == Passes(prefills=2, steps=3, busy=4 / 6)


def test_a_group_is_an_eighth_of_the_slots_on_every_share():
    assert [group_size(128, 1), group_size(128, 8), group_size(16, 8), group_size(4, 1)] == [
        16, 16, 8, 1,
    ]  # fmt: skip


def test_slots_that_do_not_divide_are_refused():
    mesh = Driver(OPT, "8x1", 2).engine.mesh
    with pytest.raises(ValueError, match="6 slots do not divide over 4 devices: .* multiple of 4"):
        HybridEngine(OPT, mesh, (), slots=6)


@pytest.mark.parametrize(("mesh", "tp"), [("1x8", 8), ("4x2", 2)])
def test_slots_gather_no_more_than_the_plain_loop(mesh, tp):
    """But what chooses tokens for a group: prompts and answers stay on their share of the batch."""
    driver, slots = Driver(OPT, mesh, tp, STOPS), 8
    rows = group_size(slots, divisor := driver.engine.rollout.batch_size_divisor) // divisor
    plain = compiled(driver, generate, slots)
    found = compiled(driver, partial(generate_in_slots, num_slots=slots), N)
    more = [TYPE.findall(kind)[0] for kind in gathered(found) - gathered(plain)]
    sizes = [math.prod(map(int, re.findall(r"\d+", kind.split("[")[1]))) for kind in more]
    assert max(sizes, default=0) <= rows * OPT.padded_vocab < N * P
    assert set(collectives(found)) == set(collectives(plain)) >= {"all-reduce"}


def compiled(driver: Driver, function: Any, num_rows: int) -> jax.stages.Compiled:
    engine, batch = driver.engine, rows_of(many_prompts(), slice(num_rows))
    decoding = Decoding(OPT, engine.rollout, SAMPLED, STOPS)
    params, rows = driver.actor(), put_batch(batch, engine.rollout)
    with jax.set_mesh(engine.mesh):
        program = jax.jit(partial(function, decoding=decoding))
        return program.lower(params, rows, key=KEY).compile()
