"""In its mode, our right-padded arrays give DeepSpeed-Chat's numbers on its left-padded rows."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.objectives.experience import DEEPSPEED_CHAT, build_experience
from rlhf_jax.objectives.losses import pairwise_loss, policy_loss, value_loss
from rlhf_jax.objectives.masked import length_mask
from rlhf_jax.objectives.rewards import token_rewards
from tests.reference import deepspeed_chat as dsc

NUM_BATCHES = 40
B, P, A = 6, 5, 7
T = 12


@dataclass(frozen=True)
class Rollout:
    """A batch as DeepSpeed-Chat holds it; `lengths` and `ended` are known from how it was made."""

    ids: np.ndarray
    logprobs: np.ndarray
    ref_logprobs: np.ndarray
    new_logprobs: np.ndarray
    values: np.ndarray
    new_values: np.ndarray
    scores: np.ndarray
    lengths: np.ndarray
    ended: np.ndarray


def random_rollout(rng: np.random.Generator) -> Rollout:
    ids = rng.integers(3, 9, (B, P + A))
    num_answer_tokens = rng.integers(0, A + 1, B)
    num_answer_tokens[:2] = A, A - 1  # never ended; ended in the very last slot
    for i in range(B):
        ids[i, : rng.integers(0, P)] = dsc.PAD
        ids[i, P + num_answer_tokens[i] :] = dsc.PAD
    ended = num_answer_tokens < A
    logprobs, ref_logprobs, values = rng.normal(size=(3, B, P + A - 1))
    return Rollout(
        ids=ids,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        new_logprobs=logprobs + 0.3 * rng.normal(size=logprobs.shape),
        values=values,
        new_values=values + 0.3 * rng.normal(size=values.shape),
        scores=6 * rng.normal(size=B),
        lengths=num_answer_tokens + ended,
        ended=ended,
    )


def answer_slots(x: np.ndarray) -> np.ndarray:
    """[B, P+A-1] by predicting position -> our [B, R] by response token."""
    return x[:, P - 1 :].astype(np.float32)


@jax.jit
def our_ppo(arrays, lengths_B, ended_B, scores_B):
    experience, _ = build_experience(
        DEEPSPEED_CHAT,
        tokens_BT=jnp.zeros((B, P + A), jnp.int32),
        prompt_lengths_B=jnp.full(B, P),
        response_lengths_B=lengths_B,
        ended_B=ended_B,
        valid_B=jnp.ones(B),
        logprobs_BR=arrays["logprobs"],
        ref_logprobs_BR=arrays["ref_logprobs"],
        values_BR=arrays["values"],
        scores_B=scores_B,
    )
    rewards_BR = token_rewards(
        scores_B,
        arrays["logprobs"],
        arrays["ref_logprobs"],
        length_mask(lengths_B, A),
        lengths_B,
        ended_B,
        kl_coef=DEEPSPEED_CHAT.kl_coef,
        score_clip=DEEPSPEED_CHAT.score_clip,
    )
    policy, _ = policy_loss(
        arrays["new_logprobs"],
        experience.logprobs_BR,
        experience.advantages_BR,
        experience.mask_BR,
        clip=dsc.POLICY_CLIP,
    )
    value, _ = value_loss(
        arrays["new_values"],
        experience.values_BR,
        experience.returns_BR,
        experience.mask_BR,
        clip=dsc.VALUE_CLIP,
    )
    return rewards_BR, experience.advantages_BR, experience.returns_BR, policy, value


def test_ppo_arrays_and_losses(tolerance):
    rng = np.random.default_rng(0)
    for _ in range(NUM_BATCHES):
        rollout = random_rollout(rng)
        targets = dsc.ppo_targets(
            rollout.ids, P, rollout.logprobs, rollout.ref_logprobs, rollout.scores, rollout.values
        )
        losses = dsc.ppo_losses(
            rollout.ids,
            P,
            rollout.new_logprobs,
            rollout.logprobs,
            rollout.new_values,
            rollout.values,
            *targets[1:],
        )
        names = ("logprobs", "ref_logprobs", "new_logprobs", "values", "new_values")
        ours = our_ppo(
            {name: answer_slots(vars(rollout)[name]) for name in names},
            rollout.lengths.astype(np.int32),
            rollout.ended,
            rollout.scores.astype(np.float32),
        )
        for our, their in zip(ours, (*targets, *losses), strict=True):
            np.testing.assert_allclose(our, their, **tolerance(np.float32))


def random_pairs(rng: np.random.Generator, num_padding_at_beginning: int):
    """Chosen and rejected ids with one prompt each, and their true lengths."""
    chosen = rng.integers(3, 9, (B, T))
    rejected = chosen.copy()
    lengths = np.empty((2, B), np.int32)
    for i in range(B):
        split = rng.integers(2, T - 2)
        lengths[:, i] = rng.integers(split + 1, T + 1, 2)
        if i == 0:  # the same text twice
            lengths[1, i] = lengths[0, i]
        elif i > 1:  # in row 1 one answer begins with the whole of the other, or equals it
            rejected[i, split:] = rng.integers(3, 9, T - split)
        chosen[i, lengths[0, i] :] = dsc.PAD
        rejected[i, lengths[1, i] :] = dsc.PAD
    if num_padding_at_beginning:
        chosen[:, 0] = rejected[:, 0] = dsc.PAD
    return chosen, rejected, lengths


@pytest.mark.parametrize("num_padding_at_beginning", [0, 1])
def test_pairwise_loss(num_padding_at_beginning, tolerance):
    rng = np.random.default_rng(1)
    ours = jax.jit(partial(pairwise_loss, span="divergence"))
    for _ in range(NUM_BATCHES):
        chosen, rejected, lengths = random_pairs(rng, num_padding_at_beginning)
        scores = 3 * rng.normal(size=(2, B, T))
        losses, chosen_ends, rejected_ends = dsc.pair_losses(
            chosen, rejected, scores[0], scores[1], num_padding_at_beginning
        )
        found = ours(
            *scores.astype(np.float32),
            chosen.astype(np.int32),
            rejected.astype(np.int32),
            *lengths,
            np.ones(B, np.float32),
        )
        np.testing.assert_allclose(found.loss, losses.mean(), **tolerance(np.float32))
        np.testing.assert_allclose(found.chosen_scores_B, chosen_ends, **tolerance(np.float32))
        np.testing.assert_allclose(found.rejected_scores_B, rejected_ends, **tolerance(np.float32))
        np.testing.assert_allclose(found.accuracy, (chosen_ends > rejected_ends).mean())
