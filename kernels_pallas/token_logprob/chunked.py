"""Log-probability and entropy of tokens, `chunk` rows of logits at a time, forward and backward.

With z = h W^T / temperature, p = softmax(z), s = logsumexp(z):
  logprob = z_target - s          d logprob / dz = onehot(target) - p
  entropy = s - sum p z           d entropy / dz = -p (log p + entropy)

The derivative is written out, rather than left to jax.checkpoint, for two reasons: the gradient
of the unembedding is summed over chunks in fp32 (a scan's transpose sums it in the parameter's
dtype), and the backward matrix products take the parameter's dtype (a transposed einsum with an
fp32 result multiplies an fp32 cotangent with bf16 weights, in fp32).

Where devices hold parts of the vocabulary, each sums over its own columns, and four numbers a row
are summed over devices once, after the last chunk.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Finite, so that probability 0 times this is 0 and not NaN.
MASKED = -1e30


@dataclass(frozen=True)
class Settings:
    """See api.token_logprob."""

    valid_vocab: int
    chunk: int
    temperature: float
    vocab_axis: str | None
    keep_probs: bool

    def columns(self, unembed_VD: jax.Array) -> jax.Array:
        """Numbers of this device's columns in the whole vocabulary, `[V]`."""
        num_columns = unembed_VD.shape[0]
        first = 0 if self.vocab_axis is None else lax.axis_index(self.vocab_axis) * num_columns
        return first + jnp.arange(num_columns, dtype=jnp.int32)

    def sum_over_devices(self, tree: Any) -> Any:
        """Of what each has for its own columns."""
        return tree if self.vocab_axis is None else lax.psum(tree, self.vocab_axis)

    def max_over_devices(self, x: jax.Array) -> jax.Array:
        return x if self.vocab_axis is None else lax.pmax(x, self.vocab_axis)


def token_logprob(
    hidden_ND: jax.Array,
    unembed_VD: jax.Array,
    targets_N: jax.Array,
    *,
    valid_vocab: int,
    chunk: int,
    temperature: float,
    vocab_axis: str | None,
    keep_probs: bool,
    count: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """See api.token_logprob."""
    N = hidden_ND.shape[0]
    chunk = min(chunk, N)
    padding = -N % chunk
    hidden_ND = jnp.pad(hidden_ND, ((0, padding), (0, 0)))
    targets_N = jnp.pad(targets_N, (0, padding))
    settings = Settings(valid_vocab, chunk, temperature, vocab_axis, keep_probs)
    pair: Any = _chunked(hidden_ND, unembed_VD, targets_N, count, settings)
    logprob_N, entropy_N = pair
    return logprob_N[:N], entropy_N[:N]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(
    hidden_ND: jax.Array,
    unembed_VD: jax.Array,
    targets_N: jax.Array,
    count: jax.Array | None,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    return _values(hidden_ND, unembed_VD, targets_N, count, settings, keep=False)[:2]


def _values(hidden_ND, unembed_VD, targets_N, count, settings: Settings, *, keep: bool):
    """Log-probabilities, entropies and log-sums `[N]`; where kept, exp(z - max) of this device's
    columns by chunk and that max.
    """
    column_V = settings.columns(unembed_VD)
    num_columns = len(column_V)

    def one_chunk(nothing, xs):
        hidden_CD, targets_C = xs
        logits_CV = _logits(hidden_CD, unembed_VD, column_V, settings)
        max_C = logits_CV.max(axis=-1)
        below_CV = logits_CV - max_C[:, None]
        weights_CV = jnp.exp(below_CV)
        own_C = targets_C - column_V[0]
        target_C1 = jnp.take_along_axis(logits_CV, own_C[:, None], axis=-1, mode="clip")
        target_C = jnp.where((own_C >= 0) & (own_C < num_columns), target_C1[:, 0], 0.0)
        sums = weights_CV.sum(axis=-1), (weights_CV * below_CV).sum(axis=-1)
        kept_CV = weights_CV.astype(hidden_CD.dtype) if keep else None
        return nothing, ((max_C, target_C, *sums), kept_CV)

    chunks = _split(hidden_ND, settings.chunk), _split(targets_N, settings.chunk)
    _, (found, weights) = _over_chunks(one_chunk, (), chunks, count, settings)
    own_max_N, target_N, sum_N, moment_N = (x.reshape(-1) for x in found)
    max_N = settings.max_over_devices(own_max_N)
    below_N = own_max_N - max_N
    scale_N = jnp.exp(below_N)
    target_N, sum_N, moment_N = settings.sum_over_devices(
        (target_N, scale_N * sum_N, scale_N * (moment_N + below_N * sum_N))
    )
    if count is not None:  # of a chunk that was left out everything is 0
        sum_N = jnp.where(sum_N > 0, sum_N, 1.0)
    log_sum_N = max_N + jnp.log(sum_N)
    entropy_N = jnp.log(sum_N) - moment_N / sum_N
    return target_N - log_sum_N, entropy_N, log_sum_N, (weights, own_max_N) if keep else None


def _forward(hidden_ND, unembed_VD, targets_N, count, settings: Settings):
    logprob_N, entropy_N, log_sum_N, kept = _values(
        hidden_ND, unembed_VD, targets_N, count, settings, keep=settings.keep_probs
    )
    residuals = hidden_ND, unembed_VD, targets_N, count, entropy_N, log_sum_N, kept
    return (logprob_N, entropy_N), residuals


def _backward(settings: Settings, residuals, cotangents):
    hidden_ND, unembed_VD, targets_N, count, entropy_N, log_sum_N, kept = residuals
    column_V = settings.columns(unembed_VD)
    # Values are equal on all devices of `vocab_axis`: shard_map gives each a share of a cotangent.
    cotangents = settings.sum_over_devices(cotangents)

    def distribution(hidden_CD, log_sum_C, kept_C):
        """Probabilities, and each times its logarithm."""
        if kept_C is None:
            logits_CV = _logits(hidden_CD, unembed_VD, column_V, settings)
            logprobs_CV = logits_CV - log_sum_C[:, None]
            probs_CV = jnp.exp(logprobs_CV)
            return probs_CV, probs_CV * logprobs_CV
        weights_CV, max_C = kept_C
        probs_CV = weights_CV.astype(jnp.float32) * jnp.exp(max_C - log_sum_C)[:, None]
        return probs_CV, jnp.where(probs_CV > 0, probs_CV * jnp.log(probs_CV), 0.0)

    def one_chunk(unembed_grad_VD, xs):
        hidden_CD, targets_C, entropy_C, log_sum_C, to_logprob_C, to_entropy_C, kept_C = xs
        probs_CV, terms_CV = distribution(hidden_CD, log_sum_C, kept_C)
        onehot_CV = (column_V[None] == targets_C[:, None]).astype(jnp.float32)
        grad_CV = to_logprob_C[:, None] * (onehot_CV - probs_CV)
        grad_CV -= to_entropy_C[:, None] * (terms_CV + entropy_C[:, None] * probs_CV)
        grad_CV = (grad_CV / settings.temperature).astype(hidden_CD.dtype)
        hidden_grad_CD = jnp.einsum("CV,VD->CD", grad_CV, unembed_VD)
        unembed_grad_VD += jnp.einsum(
            "CV,CD->VD", grad_CV, hidden_CD, preferred_element_type=jnp.float32
        )
        return unembed_grad_VD, hidden_grad_CD

    rows = (hidden_ND, targets_N, entropy_N, log_sum_N, *cotangents)
    chunks = tuple(_split(x, settings.chunk) for x in rows)
    if kept is not None:
        weights_XCV, max_N = kept
        kept = weights_XCV, _split(max_N, settings.chunk)
    unembed_grad_VD, hidden_grad = _over_chunks(
        one_chunk, jnp.zeros(unembed_VD.shape, jnp.float32), (*chunks, kept), count, settings
    )
    unembed_grad_VD = unembed_grad_VD.astype(unembed_VD.dtype)
    return hidden_grad.reshape(hidden_ND.shape), unembed_grad_VD, None, None


_chunked.defvjp(_forward, _backward)


def _logits(hidden_CD, unembed_VD, column_V, settings: Settings) -> jax.Array:
    """fp32 logits / temperature with padded columns masked."""
    logits_CV = jnp.einsum("CD,VD->CV", hidden_CD, unembed_VD, preferred_element_type=jnp.float32)
    return jnp.where(
        column_V[None] < settings.valid_vocab, logits_CV / settings.temperature, MASKED
    )


def _over_chunks(function, carry: Any, chunks: Any, count: jax.Array | None, settings: Settings):
    """`lax.scan`, but only over the chunks that hold the first `count` rows; results of the others
    are 0. A single chunk is computed in any case: then no sum is carried.
    """
    total = len(jax.tree.leaves(chunks)[0])
    if count is None or total == 1:
        return lax.scan(function, carry, chunks)

    def chunk(number: Any) -> Any:
        take = functools.partial(lax.dynamic_index_in_dim, index=number, keepdims=False)
        return jax.tree.map(take, chunks)

    def step(number: jax.Array, state: Any) -> Any:
        carry, results = state
        carry, new = function(carry, chunk(number))
        put = functools.partial(lax.dynamic_update_index_in_dim, index=number, axis=0)
        return carry, jax.tree.map(put, results, new)

    _, shapes = jax.eval_shape(function, carry, chunk(0))
    results = jax.tree.map(lambda x: jnp.zeros((total, *x.shape), x.dtype), shapes)
    counted = lax.div(count + (settings.chunk - 1), jnp.int32(settings.chunk))
    return lax.fori_loop(0, jnp.minimum(counted, total), step, (carry, results))


def _split(x: jax.Array, chunk: int) -> jax.Array:
    return x.reshape(-1, chunk, *x.shape[1:])
