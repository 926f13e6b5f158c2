"""Estimates of a KL divergence from the log-probabilities of sampled tokens.

Source: http://joschu.net/blog/kl-approx.html, which names them k1, k2 and k3.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from rlhf_jax.objectives.masked import masked_mean

type KLKind = Literal["k1", "k3"]


def kl_estimate(logprobs: jax.Array, ref_logprobs: jax.Array, kind: KLKind) -> jax.Array:
    """KL(policy ‖ reference) at each token that the policy sampled, in nats.

    With `d = logprobs - ref_logprobs`: `k1 = d` is unbiased and can be negative (DeepSpeed-Chat's);
    `k3 = e⁻ᵈ - 1 + d` is unbiased too, never negative, and varies less.
    """
    log_ratio = logprobs - ref_logprobs
    match kind:
        case "k1":
            return log_ratio
        case "k3":
            return jnp.expm1(-log_ratio) + log_ratio
        case _:
            raise ValueError(f'KL estimator {kind!r} is not known: use "k1" or "k3"')


def approx_kl(logprobs: jax.Array, old_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """`mean(½ (logprobs - old_logprobs)²)`, k2: how far updates moved the policy off its rollout.

    A target-KL stop compares it with its limit.
    """
    return masked_mean(0.5 * jnp.square(logprobs - old_logprobs), mask)
