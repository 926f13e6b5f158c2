"""AdamW with separate groups, a learning-rate schedule and global-norm clipping, from optax."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from rlhf_jax.models.lora import is_adapter
from rlhf_jax.models.params import is_spec

Schedule = Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW. Biases and norms are not decayed.

    The rate rises linearly over `warmup_steps`, then stays (`constant`) or falls to
    `final_fraction` of itself at the last step: along a line, half a cosine, `num_cycles` of them
    that each start at the full rate, or a line to the `power` (`polynomial`).
    """

    learning_rate: float
    schedule: Schedule = "cosine"
    warmup_steps: int = 0
    final_fraction: float = 0.0
    num_cycles: int = 1
    power: float = 1.0
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
        if self.num_cycles < 1 or self.power <= 0:
            raise ValueError(
                f"num_cycles must be at least 1 and power above 0, got {self.num_cycles} and "
                f"{self.power}"
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
    elif cfg.schedule == "cosine":
        after = optax.cosine_decay_schedule(rate, rest, alpha=cfg.final_fraction)
    elif cfg.schedule == "polynomial":
        after = optax.polynomial_schedule(rate, rate * cfg.final_fraction, cfg.power, rest)
    else:
        after = cosine_with_restarts(cfg, rest)
    if warmup == 0:
        return after
    return optax.join_schedules(
        [lambda step: rate * (step + 1) / warmup, after], boundaries=[warmup]
    )


def cosine_with_restarts(cfg: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """`num_cycles` times half a cosine; the final rate from the last step on."""

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        done = jnp.asarray(step, jnp.float32) / num_steps
        share = 0.5 * (1 + jnp.cos(jnp.pi * ((cfg.num_cycles * done) % 1.0)))
        share = jnp.where(done < 1, share, 0.0)
        return cfg.learning_rate * (cfg.final_fraction + (1 - cfg.final_fraction) * share)

    return schedule


type Rates = dict[str, optax.Schedule]
"""Learning rates by optimizer step, by the name of the metric that shows them."""


def learning_rates(cfg: OptimizerConfig, num_steps: int, adapter_rate: float | None) -> Rates:
    """`lr`, and `lr_adapters` where adapters have a rate of their own."""
    rates: Rates = {"lr": learning_rate_schedule(cfg, num_steps)}
    if adapter_rate is not None:
        adapters = replace(cfg, learning_rate=adapter_rate)
        rates["lr_adapters"] = learning_rate_schedule(adapters, num_steps)
    return rates


def rate_metrics(rates: Rates, step: jax.Array, prefix: str = "") -> dict[str, jax.Array]:
    """The rates of the update that follows on `step` updates."""
    return {f"{prefix}{name}": jnp.float32(rate(step)) for name, rate in rates.items()}


def make_optimizer(
    cfg: OptimizerConfig, specs: Any, num_steps: int, *, adapter_rate: float | None = None
) -> optax.GradientTransformation:
    """Clip by the global norm, then AdamW with decay where a parameter's declaration says so.

    `specs` declare what trains. Adapters have the rate `adapter_rate` where there is one; the norm
    is that of all gradients together, and the schedule has one shape.
    """
    decayed = jax.tree.map(lambda spec: spec.decay, specs, is_leaf=is_spec)
    groups = jax.tree.map(lambda yes: "adapters" if yes else "rest", is_adapter(specs))
    rest = learning_rate_schedule(cfg, num_steps)
    adapters = rest
    if adapter_rate is not None:
        adapters = learning_rate_schedule(replace(cfg, learning_rate=adapter_rate), num_steps)
    if "adapters" in jax.tree.leaves(groups):
        scale_by_rate = optax.partition(
            {
                "adapters": optax.scale_by_learning_rate(adapters),
                "rest": optax.scale_by_learning_rate(rest),
            },
            groups,
        )
    else:
        scale_by_rate = optax.scale_by_learning_rate(rest)
    adamw = optax.chain(
        optax.scale_by_adam(b1=cfg.beta1, b2=cfg.beta2, eps=cfg.eps),
        optax.add_decayed_weights(cfg.weight_decay, mask=decayed),
        scale_by_rate,
    )
    return optax.chain(optax.clip_by_global_norm(cfg.clip_norm), adamw)
