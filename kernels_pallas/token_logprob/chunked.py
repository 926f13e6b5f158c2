"""Log-probability and entropy of tokens, `chunk` rows of logits at a time, forward and backward.

With z = h W^T / temperature, p = softmax(z), s = logsumexp(z):
  logprob = z_target - s          d logprob / dz = onehot(target) - p
  entropy = s - sum p z           d entropy / dz = -p (log p + entropy)

The derivative is written out, rather than left to jax.checkpoint, for two reasons: the gradient
of the unembedding is summed over chunks in fp32 (a scan's transpose sums it in the parameter's
dtype), and the backward matrix products take the parameter's dtype (a transposed einsum with an
fp32 result multiplies an fp32 cotangent with bf16 weights, in fp32).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Finite, so that probability 0 times this is 0 and not NaN.
MASKED = -1e30


def token_logprob(
    hidden_ND: jax.Array,
    unembed_VD: jax.Array,
    targets_N: jax.Array,
    *,
    valid_vocab: int,
    chunk: int,
    temperature: float,
) -> tuple[jax.Array, jax.Array]:
    """See api.token_logprob."""
    N = hidden_ND.shape[0]
    chunk = min(chunk, N)
    padding = -N % chunk
    hidden_ND = jnp.pad(hidden_ND, ((0, padding), (0, 0)))
    targets_N = jnp.pad(targets_N, (0, padding))
    pair: Any = _chunked(hidden_ND, unembed_VD, targets_N, valid_vocab, chunk, temperature)
    logprob_N, entropy_N = pair
    return logprob_N[:N], entropy_N[:N]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _chunked(
    hidden_ND: jax.Array,
    unembed_VD: jax.Array,
    targets_N: jax.Array,
    valid_vocab: int,
    chunk: int,
    temperature: float,
) -> tuple[jax.Array, jax.Array]:
    return _forward(hidden_ND, unembed_VD, targets_N, valid_vocab, chunk, temperature)[0]


def _forward(hidden_ND, unembed_VD, targets_N, valid_vocab: int, chunk: int, temperature: float):
    def one_chunk(xs):
        hidden_CD, targets_C = xs
        logits_CV = _logits(hidden_CD, unembed_VD, valid_vocab, temperature)
        log_sum_C = jax.nn.logsumexp(logits_CV, axis=-1)
        target_C1 = jnp.take_along_axis(logits_CV, targets_C[:, None], axis=-1, mode="clip")
        probs_CV = jnp.exp(logits_CV - log_sum_C[:, None])
        entropy_C = log_sum_C - jnp.sum(probs_CV * logits_CV, axis=-1)
        return target_C1[:, 0] - log_sum_C, entropy_C, log_sum_C

    chunks = _split(hidden_ND, chunk), _split(targets_N, chunk)
    results: tuple[jax.Array, ...] = lax.map(one_chunk, chunks)
    logprob_N, entropy_N, log_sum_N = (x.reshape(-1) for x in results)
    return (logprob_N, entropy_N), (hidden_ND, unembed_VD, targets_N, entropy_N, log_sum_N)


def _backward(valid_vocab: int, chunk: int, temperature: float, residuals, cotangents):
    hidden_ND, unembed_VD, targets_N, entropy_N, log_sum_N = residuals
    column_1V = jnp.arange(unembed_VD.shape[0], dtype=targets_N.dtype)[None, :]

    def one_chunk(unembed_grad_VD, xs):
        hidden_CD, targets_C, entropy_C, log_sum_C, to_logprob_C, to_entropy_C = xs
        logits_CV = _logits(hidden_CD, unembed_VD, valid_vocab, temperature)
        logprobs_CV = logits_CV - log_sum_C[:, None]
        probs_CV = jnp.exp(logprobs_CV)
        onehot_CV = (column_1V == targets_C[:, None]).astype(jnp.float32)
        grad_CV = to_logprob_C[:, None] * (onehot_CV - probs_CV)
        grad_CV -= to_entropy_C[:, None] * probs_CV * (logprobs_CV + entropy_C[:, None])
        grad_CV = (grad_CV / temperature).astype(hidden_CD.dtype)
        hidden_grad_CD = jnp.einsum("CV,VD->CD", grad_CV, unembed_VD)
        unembed_grad_VD += jnp.einsum(
            "CV,CD->VD", grad_CV, hidden_CD, preferred_element_type=jnp.float32
        )
        return unembed_grad_VD, hidden_grad_CD

    rows = (hidden_ND, targets_N, entropy_N, log_sum_N, *cotangents)
    unembed_grad_VD, hidden_grad = lax.scan(
        one_chunk,
        jnp.zeros(unembed_VD.shape, jnp.float32),
        tuple(_split(x, chunk) for x in rows),
    )
    return hidden_grad.reshape(hidden_ND.shape), unembed_grad_VD.astype(unembed_VD.dtype), None


_chunked.defvjp(_forward, _backward)


def _logits(hidden_CD: jax.Array, unembed_VD: jax.Array, valid_vocab: int, temperature: float):
    """fp32 logits / temperature with padded columns masked."""
    logits_CV = jnp.einsum("CD,VD->CV", hidden_CD, unembed_VD, preferred_element_type=jnp.float32)
    column_1V = jnp.arange(unembed_VD.shape[0], dtype=jnp.int32)[None, :]
    return jnp.where(column_1V < valid_vocab, logits_CV / temperature, MASKED)


def _split(x: jax.Array, chunk: int) -> jax.Array:
    return x.reshape(-1, chunk, *x.shape[1:])
