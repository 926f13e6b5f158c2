"""What PPO trains on: one rollout, scored, with its advantages and returns."""

from dataclasses import dataclass

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.objectives.advantages import gae
from rlhf_jax.objectives.kl import KLKind, kl_estimate
from rlhf_jax.objectives.masked import length_mask, masked_mean, masked_sum, masked_whiten
from rlhf_jax.objectives.rewards import token_rewards


@dataclass(frozen=True)
class RewardSettings:
    """How a rollout becomes rewards and advantages.

    `train_eos` False leaves the stop token's action out of the policy and value loss, though its
    slot still carries reward and value: DeepSpeed-Chat's behaviour, which never teaches when to
    stop. `score_clip` and `missing_eos_penalty` are in units of the score; None turns them off.
    """

    kl_coef: float = 0.1
    kl_kind: KLKind = "k1"
    score_clip: float | None = 5.0
    gamma: float = 1.0
    lam: float = 0.95
    whiten_advantages: bool = True
    train_eos: bool = True
    missing_eos_penalty: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name}={value} is not a discount: use 0 to 1")
        if self.kl_kind not in ("k1", "k3"):
            raise ValueError(f'kl_kind={self.kl_kind!r} is not known: use "k1" or "k3"')
        if not self.kl_coef >= 0:
            raise ValueError(f"kl_coef={self.kl_coef} would reward divergence: use 0 or more")
        if self.score_clip is not None and not self.score_clip > 0:
            raise ValueError(f"score_clip={self.score_clip} keeps no score: use > 0, or null")
        if self.missing_eos_penalty is not None and not self.missing_eos_penalty >= 0:
            raise ValueError(
                f"missing_eos_penalty={self.missing_eos_penalty} would reward answers that never "
                "stop: use 0 or more (it is subtracted), or null"
            )


DEEPSPEED_CHAT = RewardSettings(whiten_advantages=False, train_eos=False)
"""DeepSpeed-Chat's rules and constants (ppo_trainer.py). It scores a response at its last token
before the stop token, so `scores_B` must be read there."""


@flax.struct.dataclass
class Experience:
    """Rows of one rollout. Entry r of a [B, R] array belongs to response token r, the action.

    `mask_BR` (bool) keeps the actions of the policy and value loss; it is empty where `valid_B`
    is 0. Response lengths count the stop token. `logprobs_BR` and `values_BR` are those of the
    rollout, before any update; `values_BR[r]` is the value of the state before token r.
    `weights_BR` multiplies the policy loss of each action; None: 1.
    """

    tokens_BT: jax.Array
    prompt_lengths_B: jax.Array
    response_lengths_B: jax.Array
    logprobs_BR: jax.Array
    ref_logprobs_BR: jax.Array
    values_BR: jax.Array
    advantages_BR: jax.Array
    returns_BR: jax.Array
    mask_BR: jax.Array
    scores_B: jax.Array
    valid_B: jax.Array
    weights_BR: jax.Array | None = None


def build_experience(
    settings: RewardSettings,
    *,
    tokens_BT: jax.Array,
    prompt_lengths_B: jax.Array,
    response_lengths_B: jax.Array,
    ended_B: jax.Array,
    valid_B: jax.Array,
    logprobs_BR: jax.Array,
    ref_logprobs_BR: jax.Array,
    values_BR: jax.Array,
    scores_B: jax.Array,
    rewarded_scores_B: jax.Array | None = None,
    kl_coef: jax.Array | None = None,
    entropies_BR: jax.Array | None = None,
    weights_BR: jax.Array | None = None,
) -> tuple[Experience, dict[str, jax.Array]]:
    """Rewards, advantages and returns of a rollout, and its metrics under TRL's names.

    The arrays are those of `Experience`; `ended_B` tells whether a response has a stop token, and
    `entropies_BR` (nats) serves its metric alone. Scores come standardised where that is wanted;
    `rewarded_scores_B` is what PPO is rewarded with where that is not the score itself, and
    `kl_coef` replaces the settings' where it adapts.
    `settings` is static under `jax.jit`. Everything computes in float32.
    """
    logprobs_BR, ref_logprobs_BR, values_BR, scores_B = (
        x.astype(jnp.float32) for x in (logprobs_BR, ref_logprobs_BR, values_BR, scores_B)
    )
    width = logprobs_BR.shape[1]
    slots_BR = length_mask(response_lengths_B, width) & valid_B.astype(bool)[:, None]
    coef = settings.kl_coef if kl_coef is None else kl_coef
    rewarded_B = scores_B if rewarded_scores_B is None else rewarded_scores_B
    rewards_BR = token_rewards(
        rewarded_B, logprobs_BR, ref_logprobs_BR, slots_BR, response_lengths_B, ended_B,
        kl_coef=coef, kl_kind=settings.kl_kind, score_clip=settings.score_clip,
        missing_eos_penalty=settings.missing_eos_penalty,
    )  # fmt: skip
    mask_BR = slots_BR
    if not settings.train_eos:
        mask_BR &= length_mask(response_lengths_B - ended_B.astype(jnp.int32), width)
    advantages_BR, returns_BR = estimate_advantages(
        settings, rewards_BR, values_BR, slots_BR, mask_BR
    )
    experience = Experience(
        tokens_BT=tokens_BT,
        prompt_lengths_B=prompt_lengths_B,
        response_lengths_B=response_lengths_B,
        logprobs_BR=logprobs_BR,
        ref_logprobs_BR=ref_logprobs_BR,
        values_BR=values_BR,
        advantages_BR=advantages_BR,
        returns_BR=returns_BR,
        mask_BR=mask_BR,
        scores_B=scores_B,
        valid_B=valid_B,
        weights_BR=weights_BR,
    )
    metrics = kl_metrics(experience, slots_BR, coef, settings.kl_kind)
    metrics |= objective_metrics(experience, slots_BR, rewards_BR, entropies_BR)
    metrics |= clip_metrics(rewarded_B, valid_B, settings.score_clip)
    return experience, metrics | length_metrics(response_lengths_B, ended_B, valid_B, width)


def estimate_advantages(
    settings: RewardSettings,
    rewards_BR: jax.Array,
    values_BR: jax.Array,
    slots_BR: jax.Array,
    mask_BR: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Advantages, whitened over the mask where that is wanted, and returns."""
    advantages_BR, returns_BR = gae(
        rewards_BR, values_BR, slots_BR, gamma=settings.gamma, lam=settings.lam
    )
    if settings.whiten_advantages:
        advantages_BR = masked_whiten(advantages_BR, mask_BR)
    return advantages_BR, returns_BR


def kl_metrics(
    experience: Experience, slots_BR: jax.Array, coef: jax.Array | float, kind: KLKind
) -> dict[str, jax.Array]:
    """The divergence from the reference in nats an answer, and what it takes off the reward."""
    kl_BR = kl_estimate(experience.logprobs_BR, experience.ref_logprobs_BR, kind)
    kl = mean_row_sum(kl_BR, slots_BR, experience.valid_B)
    return {"objective/kl": kl, "objective/non_score_reward": -coef * kl}


def objective_metrics(
    experience: Experience,
    slots_BR: jax.Array,
    rewards_BR: jax.Array,
    entropies_BR: jax.Array | None,
) -> dict[str, jax.Array]:
    """TRL's `objective/*`, per response: `rlhf_reward` is what PPO maximises.

    `scores` are as they came: neither scaled by running moments, clipped nor penalised.
    """
    metrics = {
        "objective/rlhf_reward": mean_row_sum(rewards_BR, slots_BR, experience.valid_B),
        "objective/scores": masked_mean(experience.scores_B, experience.valid_B),
    }
    if entropies_BR is not None:
        metrics["objective/entropy"] = mean_row_sum(entropies_BR, slots_BR, experience.valid_B)
    return metrics


def clip_metrics(
    scores_B: jax.Array, valid_B: jax.Array, clip: float | None
) -> dict[str, jax.Array]:
    """The share of scores beyond the clip, where there is one."""
    if clip is None:
        return {}
    return {"objective/scores_clipped": masked_mean(jnp.abs(scores_B) > clip, valid_B)}


def mean_row_sum(x_BR: jax.Array, mask_BR: jax.Array, valid_B: jax.Array) -> jax.Array:
    """The mean over valid rows of each row's sum: an amount per response, not per token."""
    return masked_mean(jnp.sum(jnp.where(mask_BR, x_BR, 0.0), axis=1), valid_B)


def length_metrics(
    lengths_B: jax.Array, ended_B: jax.Array, valid_B: jax.Array, width: int
) -> dict[str, jax.Array]:
    """Lengths of valid responses in tokens; `clip_ratio` is the share that has no stop token."""
    valid_B = valid_B.astype(bool)
    lengths_B = lengths_B.astype(jnp.float32)
    return {
        "val/num_eos_tokens": masked_sum(ended_B, valid_B),
        "response_length/mean": masked_mean(lengths_B, valid_B),
        "response_length/min": jnp.min(jnp.where(valid_B, lengths_B, float(width))),
        "response_length/max": jnp.max(jnp.where(valid_B, lengths_B, 0.0)),
        "response_length/clip_ratio": masked_mean(~ended_B.astype(bool), valid_B),
    }
