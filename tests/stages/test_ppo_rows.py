"""How the batches of a run are packed: rows, widths, places, and what is said to be saved."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.data.batches import PromptBatch
from rlhf_jax.data.placing import Groups, place
from rlhf_jax.engine.generate import Rollout
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.ppo_rows import RowPacking, RowSizes, Scored
from tests.engine.drive import Driver
from tests.models.cases import OPT

B, P, R, LONGEST = 32, 16, 24, 40


def batch(answers: np.ndarray) -> tuple[PromptBatch, Rollout]:
    """Prompts of 9 to 16 tokens, of which the last is a filler; answers of these lengths."""
    valid_B = np.ones(B, np.float32)
    valid_B[-1] = 0
    lengths_B = np.random.default_rng(0).integers(9, P + 1, B).astype(np.int32)
    tokens_BP = np.arange(B * P, dtype=np.int32).reshape(B, P)
    prompts = PromptBatch(tokens_BP, lengths_B, np.arange(B, dtype=np.int32), valid_B)
    answers = answers * (valid_B > 0)
    arrays: dict[str, Any] = {
        "tokens_BR": np.zeros((B, R), np.int32), "logprobs_BR": np.zeros((B, R), np.float32),
        "lengths_B": jnp.asarray(answers, jnp.int32), "ended_B": answers < R,
    }  # fmt: skip
    return prompts, Rollout(**arrays)


def packing(mesh: str = "1x1", longest: int = LONGEST, **changes: Any) -> RowPacking:
    cfg = PPOConfig(batch_size=B, max_answer_seq_len=R, **{"packing": True, **changes})
    return RowPacking.create(cfg, Driver(OPT, mesh).engine.compute, longest)


def measured(answers: np.ndarray) -> tuple[PromptBatch, RowSizes]:
    prompts, rollout = batch(answers)
    sizes = packing().sizes(prompts, rollout)
    assert sizes is not None
    return prompts, sizes


def scored_batch(sizes: RowSizes, width: int) -> Scored:
    experience: Any = type("Experience", (), {"tokens_BT": np.zeros((B, width))})()
    return Scored(experience, np.ones(B, np.float32), sizes)


def test_sizes_count_prompt_and_answer_and_leave_fillers_out() -> None:
    answers = np.arange(B) % 5 + 1
    prompts, sizes = measured(answers)
    assert sizes.width == P + R
    np.testing.assert_array_equal(sizes.lengths_B[:-1], (prompts.lengths_B + answers)[:-1])
    assert sizes.lengths_B[-1] == 0


def test_a_batch_to_score_is_as_wide_as_any_and_says_what_it_saves() -> None:
    """Saved is counted from what the batch would have without: rows of its own bucket."""
    prompts, sizes = measured(np.full(B, 3))
    wide, places, saved = packing().score(prompts, sizes)
    assert places is not None
    assert wide.tokens_BP.shape == (B, LONGEST)
    np.testing.assert_array_equal(wide.tokens_BP[:, :P], prompts.tokens_BP)
    assert (wide.tokens_BP[:, P:] == 0).all()
    assert saved == {"perf/score_tokens_saved": pytest.approx(1 - places.num_tokens / (B * 40))}
    assert 0.1 < saved["perf/score_tokens_saved"] < 1 - sizes.lengths_B.sum() / (B * 40)


def test_rows_are_scored_on_devices_that_have_about_as_many_tokens() -> None:
    """Where one device wrote all the long answers, its rows alone could not be packed."""
    prompts, sizes = measured(np.where(np.arange(B) < B // 4, R, 1))
    groups = Groups(4)
    assert place(sizes.lengths_B, groups, width=LONGEST + R, unpacked=P + R) is None
    _, places, saved = packing("4x1").score(prompts, sizes)
    assert places is not None
    rows, entries = np.asarray(places.rows_B), np.asarray(places.entries_B)
    np.testing.assert_array_equal(places.lengths_B, sizes.lengths_B[rows])
    np.testing.assert_array_equal(rows[entries], np.arange(B))
    sums = groups.split(np.asarray(places.lengths_B)).sum(1)
    assert sums.max() < 1.2 * sums.min()
    assert saved["perf/score_tokens_saved"] > 0.3


def test_full_rows_are_scored_and_trained_as_without() -> None:
    prompts, sizes = measured(np.full(B, R))
    same, places, saved = packing().score(prompts, sizes)
    assert (same is prompts, places) == (True, None)
    assert saved == {"perf/score_tokens_saved": 0}
    rows = np.random.default_rng(1).permutation(B)
    kept, places, saved = packing().minibatch(rows, scored_batch(sizes, P + R))
    assert (kept is rows, places) == (True, None)
    assert saved == {"perf/update_tokens_saved": 0}


def test_without_packing_nothing_comes_to_the_host() -> None:
    prompts, _ = batch(np.full(B, 3))
    off, nothing = packing(packing=False), Any
    rollout: Any = None
    assert off.sizes(prompts, rollout) is None
    assert off.score(prompts, None) == (prompts, None, {})
    rows = np.arange(B)
    experience: Any = nothing
    assert off.minibatch(rows, Scored(experience, prompts.valid_B)) == (rows, None, {})


def test_rows_of_a_minibatch_are_dealt_to_devices_and_parts_by_their_lengths() -> None:
    """Unordered, some group would have twice the tokens of another."""
    answers = np.where(np.arange(B) % 4 == 0, R, 1)
    _, sizes = measured(answers)
    rows = np.arange(B).reshape(-1, 4).T.reshape(-1)
    groups = Groups(4, 2)
    before = groups.split(sizes.lengths_B[rows]).sum(1)
    assert before.max() > 1.5 * before.min()
    order, places, _ = packing("4x1", gradient_accumulation_steps=2).minibatch(
        rows, scored_batch(sizes, P + R)
    )
    assert places is not None
    assert sorted(order) == sorted(rows)
    after = groups.split(sizes.lengths_B[order]).sum(1)
    assert after.max() < 1.2 * after.min()
    np.testing.assert_array_equal(places.lengths_B, sizes.lengths_B[order])


def test_no_update_has_more_tokens_than_rows_as_wide_as_their_bucket() -> None:
    """Two rows a device of 39 tokens, whose bucket is 40 wide: of eighths of two rows of 72 the
    smallest that holds both has 96 tokens.
    """
    lengths_B = np.where(np.arange(B) < 8, P + R - 1, 5)
    rows, groups = np.arange(8), Groups(4)
    sequences = place(lengths_B[rows], groups, width=72, unpacked=72)
    assert sequences is not None
    assert sequences.num_tokens == 96
    batch = scored_batch(RowSizes(lengths_B, P + R), 72)
    order, places, saved = packing("4x1", 48).minibatch(rows, batch)
    assert places is not None
    np.testing.assert_array_equal(places.lengths_B, lengths_B[order])
    np.testing.assert_array_equal(places.begins_B, np.arange(8) % 2 * (P + R))
    assert (places.num_sequences, places.length) == (2, P + R)
    assert saved == {"perf/update_tokens_saved": 0}
    _, places, saved = packing("4x1", 48).minibatch(rows + 8, batch)
    assert places is not None
    assert saved["perf/update_tokens_saved"] == pytest.approx(1 - places.num_tokens / 80)
    assert saved["perf/update_tokens_saved"] > 0.5
