"""Weights that correct for answers drawn by other arithmetic than training's."""

import jax
import jax.numpy as jnp

from rlhf_jax.objectives.masked import masked_mean

DEFAULT_THRESHOLD = 2.0


def compare_with_rollout(
    logprobs_BR: jax.Array,
    rollout_logprobs_BR: jax.Array,
    mask_BR: jax.Array,
    *,
    threshold: float | None,
) -> tuple[jax.Array | None, dict[str, jax.Array]]:
    """By how much training's log-probabilities differ from the rollout's; with a threshold also
    `importance_weights`.
    """
    difference = masked_mean(jnp.abs(logprobs_BR - rollout_logprobs_BR), mask_BR)
    metrics = {"rollout/logprob_diff_mean": difference}
    if threshold is None:
        return None, metrics
    weights_BR, weighing = importance_weights(
        logprobs_BR, rollout_logprobs_BR, mask_BR, threshold=threshold
    )
    return weights_BR, metrics | weighing


def importance_weights(
    logprobs_BR: jax.Array, rollout_logprobs_BR: jax.Array, mask_BR: jax.Array, *, threshold: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"), one weight a token:

        w = min(exp(logp of the training graph - logp of the rollout), threshold)

    Both are of the policy before any update. Tokens outside the mask have weight 1; the metrics
    are means over the mask: the weights, and the share that is cut off.
    """
    mask_BR = mask_BR.astype(bool)
    difference_BR = jnp.where(mask_BR, logprobs_BR - rollout_logprobs_BR, 0.0)
    # Cut before the exponential, which may overflow.
    weights_BR = jnp.exp(jnp.minimum(difference_BR, jnp.log(threshold)))
    metrics = {
        "rollout/is_weight_mean": masked_mean(weights_BR, mask_BR),
        "rollout/is_truncated": masked_mean(difference_BR > jnp.log(threshold), mask_BR),
    }
    return jnp.where(mask_BR, weights_BR, 1.0), metrics
