"""Log-probability and entropy of given tokens from hidden states, without holding all logits."""

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch
from kernels_pallas.token_logprob import chunked, reference

IMPLEMENTATIONS = {
    "chunked": dispatch.Implementation(chunked.token_logprob, dispatch.always),
    "reference": dispatch.Implementation(reference.token_logprob, dispatch.always),
}
GPU_ORDER = ("chunked",)


def token_logprob(
    hidden_ND: jax.Array,
    unembed_VD: jax.Array,
    targets_N: jax.Array,
    *,
    valid_vocab: int,
    chunk: int,
    temperature: float = 1.0,
    vocab_axis: str | None = None,
    keep_probs: bool = False,
    count: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(logprob_N, entropy_N) in fp32 of softmax(hidden unembed^T / temperature), differentiable.

    Args:
      hidden_ND: one row a token, in the unembedding's dtype.
      unembed_VD: one row an entry of the vocabulary.
      targets_N: integers in 0..valid_vocab-1 (rows that do not count may hold any of them).
      valid_vocab: columns from here on are padding and have probability 0.
      chunk: rows of logits held at a time: chunk * V * 4 bytes. Larger chunks spend less time on
        adding up the gradient of the unembedding (V * D * 4 bytes, once a chunk).
      temperature: positive; divides the logits.
      vocab_axis: inside shard_map, the mesh axis that rows of the unembedding are sharded over (in
        equal blocks, in order); hidden and targets are the same along it, and so are the results.
        `valid_vocab` and targets count in the whole vocabulary.
      keep_probs: the backward pass is given probabilities (N * V numbers in hidden's dtype) and
        needs two matrix products in place of three. Has no effect without a gradient.
      count: int32, how many rows count: the first ones. Chunks behind them are left out, and what
        rows behind them get is 0 or their own. None: all.
      implementation: "chunked" | "reference"; None takes chunked.

    Raises:
      ValueError: shapes, dtypes or options do not fit together.
    """
    _check(hidden_ND, unembed_VD, targets_N, valid_vocab, chunk, temperature, vocab_axis)
    return dispatch.run(
        "token_logprob",
        IMPLEMENTATIONS,
        GPU_ORDER,
        implementation,
        hidden_ND,
        unembed_VD,
        targets_N,
        valid_vocab=valid_vocab,
        chunk=chunk,
        temperature=temperature,
        vocab_axis=vocab_axis,
        keep_probs=keep_probs,
        count=count,
    )


def _check(
    hidden_ND: jax.Array,
    unembed_VD: jax.Array,
    targets_N: jax.Array,
    valid_vocab: int,
    chunk: int,
    temperature: float,
    vocab_axis: str | None,
) -> None:
    hidden, unembed, targets = hidden_ND.shape, unembed_VD.shape, targets_N.shape
    fits = len(hidden) == len(unembed) == 2 and hidden[1] == unembed[1] and targets == hidden[:1]
    if not fits or hidden[0] == 0:
        raise ValueError(
            f"token_logprob: got hidden {hidden}, unembed {unembed}, targets {targets}; expected "
            f"[N,D], [V,D] and [N] with N at least 1"
        )
    if hidden_ND.dtype != unembed_VD.dtype:
        raise ValueError(
            f"token_logprob: hidden is {hidden_ND.dtype} and unembed {unembed_VD.dtype}; "
            f"cast them to one dtype"
        )
    if not jnp.issubdtype(targets_N.dtype, jnp.integer):
        raise ValueError(f"token_logprob: targets are {targets_N.dtype}; use integers")
    columns = unembed[0] * (1 if vocab_axis is None else jax.lax.axis_size(vocab_axis))
    if not 1 <= valid_vocab <= columns:
        raise ValueError(
            f"token_logprob: valid_vocab={valid_vocab}; use 1..{columns} (rows of unembed)"
        )
    if chunk < 1:
        raise ValueError(f"token_logprob: chunk={chunk}; use at least 1")
    if temperature <= 0:
        raise ValueError(f"token_logprob: temperature={temperature}; use a positive number")
