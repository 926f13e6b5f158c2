"""Update rules, with groups, a learning-rate schedule and global-norm clipping, from optax."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from rlhf_jax.engine.moments import with_bfloat16_moments
from rlhf_jax.models.lora import is_adapter
from rlhf_jax.models.params import is_spec

Schedule = Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"]
Optim = Literal["adamw", "lion", "adafactor"]
MomentsDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class OptimizerConfig:
    """An update rule. Biases and norms are not decayed.

    `adamw` keeps two moments of each parameter, `lion` one (it wants a tenth of AdamW's rate),
    `adafactor` none of a matrix but a row and a column, and neither beta nor eps. In bfloat16
    moments are rounded stochastically.

    The rate rises linearly over `warmup_steps`, then stays (`constant`) or falls towards
    `final_fraction` of itself, where the step behind the last one would be: along a line, half a
    cosine, `num_cycles` of them that each start at the full rate, or a line to the `power`
    (`polynomial`).
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
    optim: Optim = "adamw"
    moments_dtype: MomentsDtype = "float32"

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
        if self.optim == "adafactor" and self.moments_dtype != "float32":
            raise ValueError(
                f"moments_dtype={self.moments_dtype}: adafactor keeps a row and a column of each "
                "matrix, in float32: leave it out, or use optim=adamw or lion"
            )


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


@dataclass(frozen=True)
class Rule:
    """How one parameter is updated, beside what all have in common."""

    decayed: bool
    is_adapter: bool


@dataclass(frozen=True)
class Common:
    """What all parameters of an optimizer have in common; with a `Rule` for each of some of them it
    is a transformation of those alone.
    """

    cfg: OptimizerConfig
    num_steps: int
    adapter_rate: float | None
    has_adapters: bool

    def transformation(
        self, decayed: Any, groups: Any, numbers: Any = None
    ) -> optax.GradientTransformation:
        """Of clipped gradients. `decayed` and `groups` (`adapters` or `rest`) are trees like the
        parameters, which have these `numbers` among all (None: they are all there are).
        """
        return optax.chain(
            self._direction(numbers),
            optax.add_decayed_weights(self.cfg.weight_decay, mask=decayed),
            self._scale_by_rate(groups),
        )

    def of(self, rules: Sequence[Rule], numbers: Any) -> optax.GradientTransformation:
        """Of a list of parameters."""
        groups = [group_of(rule.is_adapter) for rule in rules]
        return self.transformation([rule.decayed for rule in rules], groups, numbers)

    def _direction(self, numbers: Any) -> optax.GradientTransformation:
        cfg = self.cfg
        if cfg.optim == "adafactor":
            return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
        if cfg.optim == "lion":
            rule = optax.scale_by_lion(b1=cfg.beta1, b2=cfg.beta2)
        else:
            rule = optax.scale_by_adam(b1=cfg.beta1, b2=cfg.beta2, eps=cfg.eps)
        return with_bfloat16_moments(rule, numbers) if cfg.moments_dtype == "bfloat16" else rule

    def _scale_by_rate(self, groups: Any) -> optax.GradientTransformation:
        rest = adapters = learning_rate_schedule(self.cfg, self.num_steps)
        if self.adapter_rate is not None:
            adapters = learning_rate_schedule(
                replace(self.cfg, learning_rate=self.adapter_rate), self.num_steps
            )
        if not self.has_adapters:
            return optax.scale_by_learning_rate(rest)
        return optax.partition(
            {
                "adapters": optax.scale_by_learning_rate(adapters),
                "rest": optax.scale_by_learning_rate(rest),
            },
            groups,
        )


def group_of(is_adapter: bool) -> str:
    """Which learning rate a parameter has."""
    return "adapters" if is_adapter else "rest"


@dataclass(frozen=True, eq=False)
class Optimizer:
    """An optax optimizer that also knows its parameters one by one, in the order of their tree."""

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    common: Common
    rules: tuple[Rule, ...]


def make_optimizer(
    cfg: OptimizerConfig, specs: Any, num_steps: int, *, adapter_rate: float | None = None
) -> Optimizer:
    """Clip by the global norm, then the rule with decay where a parameter's declaration says so.

    `specs` declare what trains. Adapters have the rate `adapter_rate` where there is one; the norm
    is that of all gradients together, and the schedule has one shape.
    """
    decayed = jax.tree.map(lambda spec: spec.decay, specs, is_leaf=is_spec)
    adapters = is_adapter(specs)
    common = Common(cfg, num_steps, adapter_rate, any(jax.tree.leaves(adapters)))
    rule = common.transformation(decayed, jax.tree.map(group_of, adapters))
    whole = optax.chain(optax.clip_by_global_norm(cfg.clip_norm), rule)
    pairs = zip(jax.tree.leaves(decayed), jax.tree.leaves(adapters), strict=True)
    return Optimizer(whole.init, whole.update, common, tuple(Rule(*pair) for pair in pairs))


def clip(grad: jax.Array, norm: jax.Array, limit: float) -> jax.Array:
    """One gradient of those whose global norm is `norm`, as `optax.clip_by_global_norm` has it."""
    return jax.lax.select(norm < limit, grad, (grad / norm.astype(grad.dtype)) * limit)
