"""Choosing the next token: greedy, temperature, top-k, top-p, with a key for every sample."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.truncated_sampling.api import truncated_sampling
from meshes.layout import Layout
from meshes.reshard import local_shards
from rlhf_jax.engine.noise import gumbel_noise, gumbel_noise_from, sample_keys

LARGEST = 1e30
"""Logits that are divided by more than this, or by less than its inverse, leave float32: they
become infinite, or NaN where they are infinite."""


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
        if self.temperature != 0 and not 1 / LARGEST <= self.temperature <= LARGEST:
            raise ValueError(
                f"temperature must be 0 (greedy) or positive, from {1 / LARGEST:g} to "
                f"{LARGEST:g}, got {self.temperature}"
            )
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_k must be 0 (off) or positive and top_p in (0, 1], got top_k={self.top_k}, "
                f"top_p={self.top_p}"
            )
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1] (0 is off), got {self.min_p}")
        if not 1 / LARGEST <= self.repetition_penalty <= LARGEST:
            raise ValueError(
                f"repetition_penalty must be positive (1 is off), from {1 / LARGEST:g} to "
                f"{LARGEST:g}, got {self.repetition_penalty}"
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
    def truncates(self) -> bool:
        """Whether tokens are left out by how likely they are."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

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
    index_B: jax.Array,
    cfg: SamplingConfig,
    stop_ids: tuple[int, ...],
    layout: Layout,
    seen_BV: jax.Array | None = None,
    *,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Token `index_B` of every answer and its log-probability, `[B]` each.

    The noise depends on the key, the sample's id and the index alone, so neither the mesh nor the
    place in the batch changes an answer. The log-probability is the policy's at the sampling
    temperature, before the repetition penalty (of tokens in `seen_BV`), `min_new_tokens`, top-k,
    top-p and min-p: what training computes from the row. So PPO's ratios start at 1, but with one
    of these the tokens come from another distribution than the ratio's denominator
    (`SamplingConfig.off_policy`), which nothing corrects.

    Where the vocabulary is sharded, every device draws from its own columns and the winners are
    compared: logits are not gathered. What is kept of a row (top-k, top-p, min-p) depends on all
    of it, so there the devices exchange columns for rows, each gets its part of the batch, and the
    logits travel once. A batch that does not divide over the devices is gathered on each.
    """
    rows, columns = ("batch", "vocab")
    if cfg.truncates:
        spread = logits_BV.shape[0] % layout.size(layout.mesh_axes("rows")) == 0
        rows, columns = "rows" if spread else "batch", None
    axes = layout.mesh_axes(columns)
    two, one = (rows, columns), (rows,)
    run = local_shards(
        partial(draw, cfg=cfg, stop_ids=stop_ids, axes=axes),
        layout,
        in_axes=(two, one, one, (None,), None if seen_BV is None else two),
        out_axes=(one, one),
    )

    def moved(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        return jax.sharding.reshard(x, layout.sharding(*axes))

    token_B, logprob_B = run(
        moved(logits_BV, two),
        moved(sample_ids_B, one),
        moved(index_B, one),
        jax.random.key_data(key),
        None if seen_BV is None else moved(seen_BV, two),
    )
    return moved(token_B, ("batch",)), moved(logprob_B, ("batch",))


def draw(
    logits_BV: jax.Array,
    ids_B: jax.Array,
    index_B: jax.Array,
    key_data: jax.Array,
    seen_BV: jax.Array | None,
    *,
    cfg: SamplingConfig,
    stop_ids: tuple[int, ...],
    axes: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """What `sample` returns, of one device's rows and, along the mesh axes `axes`, columns."""
    width = logits_BV.shape[1]
    first = lax.axis_index(axes) * width if axes else jnp.int32(0)
    allowed_BV, logits_BV = (
        z / cfg.score_temperature
        for z in (allowed(logits_BV, index_B, seen_BV, first, cfg, stop_ids), logits_BV)
    )
    if cfg.temperature == 0:
        return likeliest(allowed_BV, logits_BV, first, axes)
    if not cfg.truncates:
        if axes:
            noise_BV = gumbel_noise_from(key_data, index_B, ids_B, first, width)
        else:
            noise_BV = gumbel_noise(key_data, index_B, ids_B, width)
        return likeliest(allowed_BV + noise_BV, logits_BV, first, axes)
    keys_B2 = sample_keys(key_data, index_B, ids_B)
    token_B, logprob_B = truncated_sampling(
        allowed_BV, keys_B2, top_k=cfg.top_k, top_p=cfg.top_p, min_p=cfg.min_p
    )
    if seen_BV is None and not (cfg.min_new_tokens and stop_ids):
        return token_B, logprob_B
    return token_B, logprob_of(token_B, logits_BV)


def allowed(
    logits_BV: jax.Array,
    index_B: jax.Array,
    seen_BV: jax.Array | None,
    first: jax.Array,
    cfg: SamplingConfig,
    stop_ids: tuple[int, ...],
) -> jax.Array:
    """Logits with repetitions penalised, and early stops at -inf; columns start at `first`."""
    if seen_BV is not None:
        logits_BV = penalise(logits_BV, seen_BV, cfg.repetition_penalty)
    if cfg.min_new_tokens and stop_ids:
        column_V = first + jnp.arange(logits_BV.shape[1])
        stops_V = (column_V[:, None] == jnp.array(stop_ids)).any(-1)
        early_B = index_B < cfg.min_new_tokens
        logits_BV = jnp.where(stops_V[None] & early_B[:, None], -jnp.inf, logits_BV)
    return logits_BV


def likeliest(
    scores_BV: jax.Array, logits_BV: jax.Array, first: jax.Array, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """The token of the largest score and its log-softmax; columns start at `first` on this device
    and the others along `axes` have the rest. 16 bytes a row travel, in one all-gather.
    """
    token_B = jnp.argmax(scores_BV, -1).astype(jnp.int32)
    if not axes:
        return token_B, logprob_of(token_B, logits_BV)
    floats = (
        entry(scores_BV, token_B),
        entry(logits_BV, token_B),
        jax.nn.logsumexp(logits_BV, axis=-1),
    )
    words = [lax.bitcast_convert_type(x, jnp.int32) for x in floats]
    words_N4B = lax.all_gather(jnp.stack([*words, token_B + first]), axes)
    score_NB, logit_NB, log_sum_NB = (
        lax.bitcast_convert_type(words_N4B[:, i], jnp.float32) for i in range(3)
    )
    winner_1B = jnp.argmax(score_NB, 0)[None]  # the first of equals, as on one device
    token_B = jnp.take_along_axis(words_N4B[:, 3], winner_1B, axis=0)[0]
    logit_B = jnp.take_along_axis(logit_NB, winner_1B, axis=0)[0]
    return token_B, logit_B - jax.nn.logsumexp(log_sum_NB, axis=0)


def logprob_of(token_B: jax.Array, logits_BV: jax.Array) -> jax.Array:
    """log-softmax of one token in each row."""
    return entry(logits_BV, token_B) - jax.nn.logsumexp(logits_BV, axis=-1)


def entry(x_BV: jax.Array, token_B: jax.Array) -> jax.Array:
    """One column of each row."""
    return jnp.take_along_axis(x_BV, token_B[:, None], axis=1)[:, 0]


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
