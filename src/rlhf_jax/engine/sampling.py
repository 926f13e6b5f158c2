"""Choosing the next token: greedy, temperature, top-k, top-p, with a key for every sample."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from meshes.layout import Layout
from meshes.reshard import local_shards


@dataclass(frozen=True)
class SamplingConfig:
    """How answers are sampled. Changing any of it compiles a new program.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 keep the whole vocabulary;
    `min_p` leaves out what has less than this share of the likeliest token's probability.
    `repetition_penalty` divides the positive logits of tokens in the prompt or the answer so far
    and multiplies the negative ones (1: off). A row ends with a stop id, which is not allowed
    among its first `min_new_tokens` tokens.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} must lie between 0 and "
                f"max_new_tokens={self.max_new_tokens}"
            )
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or positive, got {self.temperature}")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_k must be 0 (off) or positive and top_p in (0, 1], got top_k={self.top_k}, "
                f"top_p={self.top_p}"
            )
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1] (0 is off), got {self.min_p}")
        if self.repetition_penalty <= 0:
            raise ValueError(
                f"repetition_penalty must be positive (1 is off), got {self.repetition_penalty}"
            )

    @property
    def off_policy(self) -> tuple[str, ...]:
        """The settings by which tokens are drawn from another distribution than the one that
        their log-probabilities are of.
        """
        return tuple(
            f"{name}={getattr(self, name)}"
            for name, off in (
                ("temperature", self.temperature > 0),
                ("min_new_tokens", self.min_new_tokens == 0),
                ("top_k", self.top_k == 0),
                ("top_p", self.top_p == 1),
                ("min_p", self.min_p == 0),
                ("repetition_penalty", not self.penalises),
            )
            if not off
        )

    @property
    def penalises(self) -> bool:
        """Whether sampling has to know which tokens were there before."""
        return self.repetition_penalty != 1

    @property
    def score_temperature(self) -> float:
        """The temperature that log-probabilities are taken at: the sampling one, 1 for greedy."""
        return self.temperature if self.temperature > 0 else 1.0


def sample(
    logits_BV: jax.Array,
    sample_ids_B: jax.Array,
    index: jax.Array,
    cfg: SamplingConfig,
    stop_ids: tuple[int, ...],
    layout: Layout,
    seen_BV: jax.Array | None = None,
    *,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Token `index` of every answer and its log-probability, `[B]` each.

    The noise depends on the key, the sample's id and the index alone, so neither the mesh nor the
    place in the batch changes an answer. The log-probability is the policy's at the sampling
    temperature, before the repetition penalty (of tokens in `seen_BV`), `min_new_tokens`, top-k,
    top-p and min-p: what training computes from the row. So PPO's ratios start at 1, but with one
    of these the tokens come from another distribution than the ratio's denominator
    (`SamplingConfig.off_policy`), which nothing corrects.
    """

    def local(logits, ids, index, key_data, seen):
        allowed = logits if seen is None else penalise(logits, seen, cfg.repetition_penalty)
        allowed = allowed / cfg.score_temperature
        logits = logits / cfg.score_temperature
        if cfg.min_new_tokens and stop_ids:
            stops = jnp.zeros(logits.shape[1], bool).at[jnp.array(stop_ids)].set(True)
            early = index < cfg.min_new_tokens
            allowed = jnp.where((stops & early)[None], -jnp.inf, allowed)
        if cfg.temperature == 0:
            token = jnp.argmax(allowed, -1)
        else:
            key = jax.random.fold_in(jax.random.wrap_key_data(key_data), index)
            keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(ids)
            noise = jax.vmap(lambda k: jax.random.gumbel(k, logits.shape[1:]))(keys)
            token = jnp.argmax(keep_likely(allowed, cfg) + noise, -1)
        token = token.astype(jnp.int32)
        chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        return token, chosen - jax.nn.logsumexp(logits, axis=-1)

    rows = ("batch", None)
    run = local_shards(
        local,
        layout,
        in_axes=(rows, ("batch",), (), (None,), None if seen_BV is None else rows),
        out_axes=(("batch",), ("batch",)),
    )
    logits_BV = jax.sharding.reshard(logits_BV, layout.sharding(*rows))
    return run(logits_BV, sample_ids_B, index, jax.random.key_data(key), seen_BV)


def penalise(logits_BV: jax.Array, seen_BV: jax.Array, penalty: float) -> jax.Array:
    """`z / penalty` where z > 0, `z · penalty` elsewhere, for tokens that were there before.

    Keskar et al. 2019 (https://arxiv.org/abs/1909.05858), with Hugging Face's rule for negative
    logits; it applies to the logits before the temperature.
    """
    lower = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return jnp.where(seen_BV, lower, logits_BV)


def seen_tokens(
    tokens_BP: jax.Array, lengths_B: jax.Array, vocab: int, layout: Layout
) -> jax.Array:
    """Which tokens occur in each row, `[B, V]` bool: padding is none of them."""

    def local(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        real = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
        rows = jnp.arange(tokens.shape[0])[:, None]
        return jnp.zeros((tokens.shape[0], vocab), bool).at[rows, tokens].max(real)

    rows = ("batch", None)
    run = local_shards(local, layout, in_axes=(rows, ("batch",)), out_axes=rows)
    return run(tokens_BP, lengths_B)


def keep_likely(logits_BV: jax.Array, cfg: SamplingConfig) -> jax.Array:
    """-inf outside the `top_k` largest logits, then outside the smallest set of mass `top_p`, then
    below `min_p` times the largest probability.
    """
    if cfg.top_k and cfg.top_k < logits_BV.shape[1]:
        least = lax.top_k(logits_BV, cfg.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
    if cfg.top_p < 1:
        falling = -jnp.sort(-logits_BV, axis=-1)
        mass = jnp.cumsum(jax.nn.softmax(falling, axis=-1), axis=-1)
        inside = mass - jax.nn.softmax(falling, axis=-1) < cfg.top_p
        least = jnp.min(jnp.where(inside, falling, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
    if cfg.min_p > 0:
        least = jnp.max(logits_BV, axis=-1, keepdims=True) + math.log(cfg.min_p)
        logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
    return logits_BV
