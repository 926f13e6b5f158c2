"""Direct preference optimization: a policy from pairs, without a reward model or sampling."""

import jax
import jax.numpy as jnp

from rlhf_jax.objectives.losses import Metrics
from rlhf_jax.objectives.masked import masked_mean


def answer_logprob(logprobs_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """`log p(answer | prompt)`: the sum over what the mask keeps, `[B]`."""
    return jnp.sum(jnp.where(mask_BT, logprobs_BT, 0.0), axis=1)


def dpo_loss(
    chosen_B: jax.Array,
    rejected_B: jax.Array,
    ref_chosen_B: jax.Array,
    ref_rejected_B: jax.Array,
    valid_B: jax.Array,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> tuple[jax.Array, Metrics]:
    """The loss of pairs of answers, given their log-probabilities, and metrics by TRL's names.

        reward = beta · (log p - log p_ref)
        margin = reward(chosen) - reward(rejected)
        loss = mean(-(1 - ε) log σ(margin) - ε log σ(-margin))

    `label_smoothing` ε is the probability that a pair is labelled the wrong way round
    (conservative DPO): the margin then has a finite optimum, log((1 - ε)/ε). A log-probability is
    a sum over an answer's tokens, its EOS included. Tokens that both answers begin with cancel in
    the margin, and so does everything in the prompt. In the accuracy a margin of 0 counts one half.
    """
    chosen_rewards_B = beta * (chosen_B - ref_chosen_B)
    rejected_rewards_B = beta * (rejected_B - ref_rejected_B)
    margins_B = chosen_rewards_B - rejected_rewards_B
    right_B, flipped_B = -jax.nn.log_sigmoid(margins_B), -jax.nn.log_sigmoid(-margins_B)
    loss = masked_mean((1.0 - label_smoothing) * right_B + label_smoothing * flipped_B, valid_B)
    return loss, {
        "loss": loss,
        "rewards/chosen": masked_mean(chosen_rewards_B, valid_B),
        "rewards/rejected": masked_mean(rejected_rewards_B, valid_B),
        "rewards/accuracies": masked_mean(jnp.heaviside(margins_B, 0.5), valid_B),
        "rewards/margins": masked_mean(margins_B, valid_B),
        "logps/chosen": masked_mean(chosen_B, valid_B),
        "logps/rejected": masked_mean(rejected_B, valid_B),
    }
