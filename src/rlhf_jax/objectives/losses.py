"""The losses of the three stages, each a mean over what its mask keeps.

All inputs are float32. Filler rows (`valid_B` 0) must not be in a mask: `prediction_mask` folds
`valid_B` in, `Experience.mask_BR` carries it, and `pairwise_loss` takes it beside its rows.
"""

from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.objectives.kl import approx_kl
from rlhf_jax.objectives.masked import length_mask, masked_mean, take_last

type Metrics = dict[str, jax.Array]
type TrainOn = Literal["all", "completion"]
type PairSpan = Literal["last", "divergence"]


def prediction_mask(
    lengths_B: jax.Array,
    prompt_lengths_B: jax.Array,
    valid_B: jax.Array,
    *,
    width: int,
    train_on: TrainOn,
) -> jax.Array:
    """Which of the `width = T - 1` predictions are trained: bool [B, T-1].

    Entry t predicts token t + 1. "all" keeps every real token that has a predecessor, prompt
    included (DeepSpeed-Chat's rule); "completion" keeps those at or after the end of the prompt.
    """
    if train_on not in ("all", "completion"):
        raise ValueError(f'train_on={train_on!r} is not known: use "all" or "completion"')
    mask_BT = length_mask(lengths_B - 1, width) & valid_B.astype(bool)[:, None]
    if train_on == "completion":
        mask_BT &= ~length_mask(prompt_lengths_B - 1, width)
    return mask_BT


def sft_loss(logprobs_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """`mean(-log p(token))`: cross-entropy in nats a token. Both [B, T-1]; a scalar."""
    return -masked_mean(logprobs_BT, mask_BT)


@flax.struct.dataclass
class PairwiseLoss:
    """`loss`, a mean over valid rows, and the scores at the last tokens.

    `accuracy`: how often chosen scores higher; a tie counts one half.
    """

    loss: jax.Array
    chosen_scores_B: jax.Array
    rejected_scores_B: jax.Array
    accuracy: jax.Array


def divergence_mask(
    chosen_tokens_BT: jax.Array,
    rejected_tokens_BT: jax.Array,
    chosen_lengths_B: jax.Array,
    rejected_lengths_B: jax.Array,
) -> jax.Array:
    """`first difference <= t < longer length`: bool [B, T], never empty in a row.

    Rows that are identical keep slot T-1 alone, where their scores agree: a constant loss of log 2.
    What lies beyond a length counts as padding whatever its id.
    """
    width = chosen_tokens_BT.shape[1]
    chosen_BT = jnp.where(length_mask(chosen_lengths_B, width), chosen_tokens_BT, -1)
    rejected_BT = jnp.where(length_mask(rejected_lengths_B, width), rejected_tokens_BT, -1)
    differs_BT = chosen_BT != rejected_BT
    differs_B = jnp.any(differs_BT, axis=1)
    start_B = jnp.where(differs_B, jnp.argmax(differs_BT, axis=1), width - 1)
    end_B = jnp.where(differs_B, jnp.maximum(chosen_lengths_B, rejected_lengths_B), width)
    return length_mask(end_B, width) & ~length_mask(start_B, width)


def pairwise_loss(
    chosen_scores_BT: jax.Array,
    rejected_scores_BT: jax.Array,
    chosen_tokens_BT: jax.Array,
    rejected_tokens_BT: jax.Array,
    chosen_lengths_B: jax.Array,
    rejected_lengths_B: jax.Array,
    valid_B: jax.Array,
    margins_B: jax.Array | None = None,
    *,
    span: PairSpan = "last",
    center_coef: float = 0.0,
) -> PairwiseLoss:
    """Bradley-Terry loss of pairs, with `c` and `r` the scores of chosen and rejected and `m` the
    margin by which they should differ (Llama 2, https://arxiv.org/abs/2307.09288; 0 without).

        "last":        -log σ(c - r - m) at the last real token of each
        "divergence":  mean of -log σ(c_t - r_t - m) over `divergence_mask`

    plus `center_coef · (c² + r²)/2` at the last tokens, which holds scores near 0 (the pairs alone
    fix them only up to a constant). "divergence" is DeepSpeed-Chat's rule (reward_model.py): it
    counts the positions of the shorter answer's padding up to the longer one's end.
    """
    chosen_B = take_last(chosen_scores_BT, chosen_lengths_B)
    rejected_B = take_last(rejected_scores_BT, rejected_lengths_B)
    margins_B = jnp.zeros_like(chosen_B) if margins_B is None else margins_B
    match span:
        case "last":
            return last_token_loss(
                chosen_B, rejected_B, valid_B, margins_B, center_coef=center_coef
            )
        case "divergence":
            span_BT = divergence_mask(
                chosen_tokens_BT, rejected_tokens_BT, chosen_lengths_B, rejected_lengths_B
            )
            differences_BT = chosen_scores_BT - rejected_scores_BT - margins_B[:, None]
            losses_BT = -jax.nn.log_sigmoid(differences_BT)
            losses_B = jnp.mean(losses_BT, axis=1, where=span_BT)
        case _:
            raise ValueError(f'span={span!r} is not known: use "last" or "divergence"')
    return _mean_of_pairs(losses_B, chosen_B, rejected_B, valid_B, center_coef)


def last_token_loss(
    chosen_B: jax.Array,
    rejected_B: jax.Array,
    valid_B: jax.Array,
    margins_B: jax.Array,
    *,
    center_coef: float = 0.0,
) -> PairwiseLoss:
    """`pairwise_loss` with span "last", of the scores at the last tokens (in any shape)."""
    losses_B = -jax.nn.log_sigmoid(chosen_B - rejected_B - margins_B)
    return _mean_of_pairs(losses_B, chosen_B, rejected_B, valid_B, center_coef)


def _mean_of_pairs(
    losses_B: jax.Array,
    chosen_B: jax.Array,
    rejected_B: jax.Array,
    valid_B: jax.Array,
    center_coef: float,
) -> PairwiseLoss:
    losses_B += 0.5 * center_coef * (jnp.square(chosen_B) + jnp.square(rejected_B))
    return PairwiseLoss(
        loss=masked_mean(losses_B, valid_B),
        chosen_scores_B=chosen_B,
        rejected_scores_B=rejected_B,
        accuracy=masked_mean(jnp.heaviside(chosen_B - rejected_B, 0.5), valid_B),
    )


def policy_loss(
    logprobs_BR: jax.Array,
    old_logprobs_BR: jax.Array,
    advantages_BR: jax.Array,
    mask_BR: jax.Array,
    weights_BR: jax.Array | None = None,
    *,
    clip: float,
) -> tuple[jax.Array, Metrics]:
    """PPO's clipped surrogate, a mean over the actions that the mask keeps.

        ratio = exp(logp - old logp)
        loss = mean(w·max(-A·ratio, -A·clip(ratio, 1 - clip, 1 + clip)))

    `w` is 1, or `weights_BR` (`rollout_correction.py`): constants, through which nothing is
    differentiated.
    An entropy bonus is `- entropy_coef · masked_mean(entropies_BR, mask_BR)` beside it. The metrics
    are means; `of_whole_batch` makes those of a batch of them.
    """
    log_ratio_BR = jnp.where(mask_BR.astype(bool), logprobs_BR - old_logprobs_BR, 0.0)
    ratio_BR = jnp.exp(log_ratio_BR)
    plain_BR = -advantages_BR * ratio_BR
    clipped_BR = -advantages_BR * jnp.clip(ratio_BR, 1.0 - clip, 1.0 + clip)
    losses_BR = jnp.maximum(plain_BR, clipped_BR)
    if weights_BR is not None:
        losses_BR = weights_BR * losses_BR
    loss = masked_mean(losses_BR, mask_BR)
    metrics = {
        "loss/policy_avg": loss,
        "policy/approxkl_avg": approx_kl(logprobs_BR, old_logprobs_BR, mask_BR),
        "policy/clipfrac_avg": masked_mean(clipped_BR > plain_BR, mask_BR),
        "val/ratio": masked_mean(ratio_BR, mask_BR),
        "square/ratio": masked_mean(jnp.square(ratio_BR - 1.0), mask_BR),
    }
    return loss, metrics


def value_loss(
    values_BR: jax.Array,
    old_values_BR: jax.Array,
    returns_BR: jax.Array,
    mask_BR: jax.Array,
    center: jax.Array | float = 0.0,
    *,
    clip: float | None,
) -> tuple[jax.Array, Metrics]:
    """Half the squared error, the worse of the value and the value held near the old one.

        loss = ½ mean(max((V - G)², (clip(V, V_old - clip, V_old + clip) - G)²))

    None does not clip. The metrics are means; `of_whole_batch` makes those of a batch of them.
    `center` is about the mean of `V - G`: a variance is the difference of means of squares, so
    these must not be large.
    """
    error_BR = jnp.where(mask_BR.astype(bool), values_BR - returns_BR, 0.0)
    near_BR = values_BR
    if clip is not None:
        near_BR = jnp.clip(values_BR, old_values_BR - clip, old_values_BR + clip)
    plain_BR = jnp.square(error_BR)
    clipped_BR = jnp.square(jnp.where(mask_BR.astype(bool), near_BR - returns_BR, 0.0))
    loss = 0.5 * masked_mean(jnp.maximum(plain_BR, clipped_BR), mask_BR)
    metrics = {
        "loss/value_avg": loss,
        "val/clipfrac_avg": masked_mean(clipped_BR > plain_BR, mask_BR),
        "mean/error": masked_mean(error_BR - center, mask_BR),
        "square/error": masked_mean(jnp.square(error_BR - center), mask_BR),
    }
    return loss, metrics


def of_whole_batch(metrics: Metrics, returns_var: jax.Array) -> Metrics:
    """The metrics of a batch, from `policy_loss` and `value_loss` of its parts, averaged by how
    many actions each has: `val/ratio_var`, and the explained variance `1 - var(G - V)/var(G)`, 0
    where the returns are constant, in place of the means of squares. Variances of parts would not
    average.
    """
    metrics = dict(metrics)

    def var(name: str, mean: jax.Array) -> jax.Array:
        return jnp.maximum(metrics.pop(f"square/{name}") - jnp.square(mean), 0.0)

    unexplained = var("error", metrics.pop("mean/error"))
    explained = 1.0 - unexplained / jnp.maximum(returns_var, 1e-8)
    metrics["val/ratio_var"] = var("ratio", metrics["val/ratio"] - 1.0)
    metrics["critic/vf_explained_var"] = jnp.where(returns_var > 1e-8, explained, 0.0)
    return metrics
