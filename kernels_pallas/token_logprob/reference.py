"""Log-probability and entropy of tokens from all logits at once: the chunked form's meaning."""

import jax
import jax.numpy as jnp
from jax import lax


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
    """(logprob_N, entropy_N), fp32. Padded columns are cut off; `chunk`, `keep_probs` and `count`
    have no effect.
    """
    del chunk, keep_probs, count
    if vocab_axis is not None:
        unembed_VD = lax.all_gather(unembed_VD, vocab_axis, tiled=True)
    logits_NV = jnp.einsum(
        "ND,VD->NV", hidden_ND, unembed_VD[:valid_vocab], preferred_element_type=jnp.float32
    )
    logprobs_NV = jax.nn.log_softmax(logits_NV / temperature, axis=-1)
    logprob_N = jnp.take_along_axis(logprobs_NV, targets_N[:, None], axis=-1, mode="clip")[:, 0]
    return logprob_N, -jnp.sum(jnp.exp(logprobs_NV) * logprobs_NV, axis=-1)
