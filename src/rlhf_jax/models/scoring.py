"""Log-probabilities of tokens and scalar scores, from hidden states."""

import jax
import jax.numpy as jnp

from kernels_pallas.token_logprob.api import token_logprob
from meshes.layout import Layout
from meshes.offload import to_device
from meshes.reshard import local_shards
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.layers import unembedding
from rlhf_jax.models.packed_rows import Places, read_rows
from rlhf_jax.models.params import Params, ScalarModel
from rlhf_jax.models.remat import Remat, keeps_products

CHUNK = 1024


def score_tokens(
    params: Params[jax.Array],
    hidden_BTW: jax.Array,
    targets_BT: jax.Array,
    cfg: ModelConfig,
    layout: Layout,
    *,
    temperature: float = 1.0,
    remat: Remat = "full",
    counts_B: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log p(target) and the entropy at every position, `[B, T]` float32 each.

    Logits exist for a chunk of positions at a time, and on a tensor-parallel device for its part of
    the vocabulary. The unembedding is gathered once. Where `remat` keeps products of the layers,
    the backward pass is given probabilities instead of computing logits anew.

    With `counts_B` only so many positions of a shard count as its rows have together, the first
    ones; chunks behind them are left out.
    """
    vocab_axes = layout.mesh_axes("vocab")
    assert len(vocab_axes) <= 1, "a device computes logits of one block of the vocabulary"

    def local(unembed: jax.Array, hidden: jax.Array, targets: jax.Array, counts: jax.Array | None):
        logprob, entropy = token_logprob(
            hidden.reshape(-1, hidden.shape[-1]),
            unembed,
            targets.reshape(-1),
            valid_vocab=cfg.vocab_size,
            temperature=temperature,
            chunk=CHUNK,
            vocab_axis=vocab_axes[0] if vocab_axes else None,
            keep_probs=keeps_products(remat),
            count=None if counts is None else counts.sum(dtype=jnp.int32),
        )
        return logprob.reshape(targets.shape), entropy.reshape(targets.shape)

    rows, counted = ("batch", None), None if counts_B is None else ("batch",)
    run = local_shards(
        local,
        layout,
        in_axes=(("vocab", None), ("batch", None, None), rows, counted),
        out_axes=(rows, rows),
    )
    unembed = to_device(unembedding(params))
    unembed = jax.sharding.reshard(unembed, layout.sharding("vocab", None))
    with jax.named_scope("token_logprob"):
        return run(unembed, hidden_BTW, targets_BT, counts_B)


def take_window(
    array_BT: jax.Array,
    start_B: jax.Array,
    length: int,
    layout: Layout,
    places: Places | None = None,
) -> jax.Array:
    """`length` positions of every row from `start_B` on: `[B, T, ...]` to `[B, length, ...]`.

    Rows that end earlier repeat their last position; callers mask those. Where rows have `places`,
    the array is that of their sequences.
    """
    if places is not None:
        return read_rows(array_BT, start_B, length, places, layout)

    def local(array: jax.Array, start: jax.Array) -> jax.Array:
        index = jnp.minimum(start[:, None] + jnp.arange(length), array.shape[1] - 1)
        return jax.vmap(lambda row, at: row[at])(array, index)

    axes = ("batch",) + (None,) * (array_BT.ndim - 1)
    return local_shards(local, layout, in_axes=(axes, ("batch",)), out_axes=axes)(array_BT, start_B)


def take_positions(array_BT: jax.Array, at_BN: jax.Array, layout: Layout) -> jax.Array:
    """N positions of every row: `[B, T]` to `[B, N]`."""
    rows = ("batch", None)
    run = local_shards(
        jax.vmap(lambda row, at: row[at]),
        layout, in_axes=(rows, rows), out_axes=rows,
    )  # fmt: skip
    return run(array_BT, at_BN)


def scalar_scores(model: ScalarModel[jax.Array], hidden_BTW: jax.Array) -> jax.Array:
    """The head's value at every position, `[B, T]` float32."""
    head_W = to_device(model.head_W)
    return jnp.einsum("BTW,W->BT", hidden_BTW, head_W, preferred_element_type=jnp.float32)
