"""What PPO adapts to its own rollouts: the KL coefficient, and the scale of the scores."""

from dataclasses import dataclass, replace

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.objectives.masked import masked_mean, masked_sum


@dataclass(frozen=True)
class AdaptiveKL:
    """Steers the KL of an answer (nats, summed over its tokens) towards `target`.

    `horizon` is the number of answers within which the coefficient follows. Ziegler et al. 2019,
    https://arxiv.org/abs/1909.08593, section 2.2.
    """

    target: float
    horizon: int

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon < 1:
            raise ValueError(
                f"a KL of {self.target} within {self.horizon} answers cannot be steered to: "
                "the target must be above 0 and the horizon at least 1"
            )


def adapt_kl_coef(
    coef: jax.Array, kl: jax.Array, num_answers: jax.Array, settings: AdaptiveKL
) -> jax.Array:
    """`coef · (1 + clip(KL/target - 1, -0.2, 0.2) · answers/horizon)`, never below 0.

    A KL that is not finite changes nothing.
    """
    error = jnp.clip(kl / settings.target - 1.0, -0.2, 0.2)
    factor = jnp.maximum(1.0 + error * num_answers / settings.horizon, 0.0)
    return jnp.where(jnp.isfinite(kl), coef * factor, coef)


@flax.struct.dataclass
class Moments:
    """Count, mean and summed squared deviation of all values so far: float32 scalars."""

    count: jax.Array
    mean: jax.Array
    deviations: jax.Array

    @property
    def std(self) -> jax.Array:
        """The population's deviation; 1 where the values do not differ (yet)."""
        variance = self.deviations / jnp.maximum(self.count, 1.0)
        return jnp.where(variance > 1e-12, jnp.sqrt(jnp.maximum(variance, 1e-12)), 1.0)


def add_to_moments(moments: Moments, x: jax.Array, mask: jax.Array) -> Moments:
    """The moments with the finite values that the mask keeps (Welford, by batches).

    Chan et al. 1979: with δ the difference of both means, `M = M_a + M_b + δ² n_a n_b / n`.
    """
    mask = mask.astype(bool) & jnp.isfinite(x)
    count, mean = masked_sum(mask, mask), masked_mean(x, mask)
    deviations = masked_sum(jnp.square(x - mean), mask)
    total = jnp.maximum(moments.count + count, 1.0)
    delta = mean - moments.mean
    return Moments(
        count=moments.count + count,
        mean=moments.mean + delta * count / total,
        deviations=moments.deviations
        + deviations
        + jnp.square(delta) * moments.count * count / total,
    )


@flax.struct.dataclass
class Control:
    """The state of what adapts, part of a checkpoint; None where a setting is fixed."""

    kl_coef: jax.Array | None = None
    moments: Moments | None = None


def scale_scores(
    control: Control, scores_B: jax.Array, valid_B: jax.Array, *, center: bool
) -> tuple[Control, jax.Array]:
    """Scores over the deviation of all scores so far, these among them; less their mean where
    `center`. Without moments they stay as they are.
    """
    if control.moments is None:
        return control, scores_B
    moments = add_to_moments(control.moments, scores_B, valid_B)
    shift = moments.mean if center else 0.0
    return replace(control, moments=moments), (scores_B - shift) / moments.std
