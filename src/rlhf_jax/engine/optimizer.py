"""AdamW with separate groups, a learning-rate schedule and global-norm clipping, from optax."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax

from rlhf_jax.models.params import is_spec

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW. Biases and norms are not decayed.

    The rate rises linearly over `warmup_steps`, then stays (`constant`) or falls (`linear`,
    `cosine`) to `final_fraction` of itself at the last step.
    """

    learning_rate: float
    schedule: Schedule = "cosine"
    warmup_steps: int = 0
    final_fraction: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.learning_rate < 0 or self.weight_decay < 0 or self.warmup_steps < 0:
            raise ValueError(
                f"learning_rate, weight_decay and warmup_steps must not be negative: {self}"
            )
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"beta1 and beta2 must lie in [0, 1), got {self.beta1}, {self.beta2}")
        if self.clip_norm <= 0:
            raise ValueError(f"clip_norm must be positive, got {self.clip_norm}")


def learning_rate_schedule(cfg: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Learning rate by optimizer step."""
    rate, warmup = cfg.learning_rate, cfg.warmup_steps
    rest = max(num_steps - warmup, 1)
    if cfg.schedule == "constant":
        after = optax.constant_schedule(rate)
    elif cfg.schedule == "linear":
        after = optax.linear_schedule(rate, rate * cfg.final_fraction, rest)
    else:
        after = optax.cosine_decay_schedule(rate, rest, alpha=cfg.final_fraction)
    if warmup == 0:
        return after
    return optax.join_schedules(
        [lambda step: rate * (step + 1) / warmup, after], boundaries=[warmup]
    )


def make_optimizer(
    cfg: OptimizerConfig, specs: Any, num_steps: int
) -> optax.GradientTransformation:
    """Clip by the global norm, then AdamW with decay where a parameter's declaration says so."""
    decayed = jax.tree.map(lambda spec: spec.decay, specs, is_leaf=is_spec)
    return optax.chain(
        optax.clip_by_global_norm(cfg.clip_norm),
        optax.adamw(
            learning_rate_schedule(cfg, num_steps),
            b1=cfg.beta1,
            b2=cfg.beta2,
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
            mask=decayed,
        ),
    )
