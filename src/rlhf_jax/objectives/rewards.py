"""The reward of each response token: a KL penalty everywhere, the score at the last token."""

import jax
import jax.numpy as jnp

from rlhf_jax.objectives.kl import KLKind, kl_estimate
from rlhf_jax.objectives.masked import last_mask


def standardize_scores(
    scores_B: jax.Array, *, mean: float | jax.Array, std: float | jax.Array
) -> jax.Array:
    """`(score - mean) / std`, with the moments of the reward model's scores on its training data.

    The pairwise loss fixes scores only up to a constant, so clips and penalties need this first.
    """
    return (scores_B - mean) / std


def shape_scores(
    scores_B: jax.Array,
    ended_B: jax.Array,
    *,
    clip: float | None,
    missing_eos_penalty: float | None,
) -> jax.Array:
    """`clip(score, -clip, clip)`, minus the penalty in rows that did not produce a stop token.

    The penalty comes after the clip, so that it also counts where the score is already at -clip.
    """
    if clip is not None:
        scores_B = jnp.clip(scores_B, -clip, clip)
    if missing_eos_penalty is not None:
        scores_B = scores_B - jnp.where(ended_B.astype(bool), 0.0, missing_eos_penalty)
    return scores_B


def token_rewards(
    scores_B: jax.Array,
    logprobs_BR: jax.Array,
    ref_logprobs_BR: jax.Array,
    mask_BR: jax.Array,
    lengths_B: jax.Array,
    ended_B: jax.Array,
    *,
    kl_coef: float | jax.Array,
    kl_kind: KLKind = "k1",
    score_clip: float | None = None,
    missing_eos_penalty: float | None = None,
) -> jax.Array:
    """`r_t = -kl_coef·KL_t + [t = length - 1]·shaped score`, 0 outside the mask: [B, R].

    `scores_B` are of whole responses, `logprobs_BR` of the policy that sampled them, `lengths_B`
    count the stop token, and `ended_B` tells whether there is one. `mask_BR` keeps the slots of a
    response: `length_mask(lengths_B, R)`, empty in filler rows. For the rest see `shape_scores`.
    """
    score_B = shape_scores(
        scores_B, ended_B, clip=score_clip, missing_eos_penalty=missing_eos_penalty
    )
    penalty_BR = -kl_coef * kl_estimate(logprobs_BR, ref_logprobs_BR, kl_kind)
    at_end_BR = last_mask(lengths_B, mask_BR.shape[1])
    rewards_BR = penalty_BR + jnp.where(at_end_BR, score_B[:, None], 0.0)
    return jnp.where(mask_BR.astype(bool), rewards_BR, 0.0)


def add_scores(model_B: jax.Array | None, extra_B: jax.Array | None) -> jax.Array:
    """Scores of the reward model and from outside, of which one may be missing."""
    if model_B is None or extra_B is None:
        found = model_B if extra_B is None else extra_B
        assert found is not None, "neither a reward model nor scores from outside"
        return found
    return model_B + extra_B
