"""Choosing the next token: greedy, temperature, top-k, top-p, with a key for every sample."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from meshes.layout import Layout
from meshes.reshard import local_shards


@dataclass(frozen=True)
class SamplingConfig:
    """How answers are sampled. Changing any of it compiles a new program.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 keep the whole vocabulary. A row ends with a
    stop id, which is not allowed among its first `min_new_tokens` tokens.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

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
    *,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Token `index` of every answer and its log-probability, `[B]` each.

    The noise depends on the key, the sample's id and the index alone, so neither the mesh nor the
    place in the batch changes an answer. The log-probability is the policy's at the sampling
    temperature, before `min_new_tokens`, top-k and top-p: what training computes from the row.
    """

    def local(logits: jax.Array, ids: jax.Array, index: jax.Array, key_data: jax.Array):
        logits = logits / cfg.score_temperature
        allowed = logits
        if cfg.min_new_tokens and stop_ids:
            stops = jnp.zeros(logits.shape[1], bool).at[jnp.array(stop_ids)].set(True)
            early = index < cfg.min_new_tokens
            allowed = jnp.where((stops & early)[None], -jnp.inf, logits)
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

    run = local_shards(
        local,
        layout,
        in_axes=(("batch", None), ("batch",), (), (None,)),
        out_axes=(("batch",), ("batch",)),
    )
    rows = jax.sharding.reshard(logits_BV, layout.sharding("batch", None))
    return run(rows, sample_ids_B, index, jax.random.key_data(key))


def keep_likely(logits_BV: jax.Array, cfg: SamplingConfig) -> jax.Array:
    """-inf outside the `top_k` largest logits and outside the smallest set of mass `top_p`."""
    if cfg.top_k and cfg.top_k < logits_BV.shape[1]:
        least = lax.top_k(logits_BV, cfg.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
    if cfg.top_p < 1:
        falling = -jnp.sort(-logits_BV, axis=-1)
        mass = jnp.cumsum(jax.nn.softmax(falling, axis=-1), axis=-1)
        inside = mass - jax.nn.softmax(falling, axis=-1) < cfg.top_p
        least = jnp.min(jnp.where(inside, falling, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
    return logits_BV
