"""Log-probabilities of tokens and scalar scores, from hidden states."""

import jax
import jax.numpy as jnp

from kernels_pallas.token_logprob.api import token_logprob
from meshes.layout import Layout
from meshes.offload import to_device
from meshes.reshard import local_shards
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.layers import unembedding
from rlhf_jax.models.params import Params, ScalarModel

CHUNK = 1024


def score_tokens(
    params: Params[jax.Array],
    hidden_BTW: jax.Array,
    targets_BT: jax.Array,
    cfg: ModelConfig,
    layout: Layout,
    *,
    temperature: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Log p(target) and the entropy at every position, `[B, T]` float32 each.

    Logits exist for a chunk of positions at a time. The unembedding is gathered once.
    """

    def local(unembed: jax.Array, hidden: jax.Array, targets: jax.Array):
        logprob, entropy = token_logprob(
            hidden.reshape(-1, hidden.shape[-1]),
            unembed,
            targets.reshape(-1),
            valid_vocab=cfg.vocab_size,
            temperature=temperature,
            chunk=CHUNK,
        )
        return logprob.reshape(targets.shape), entropy.reshape(targets.shape)

    rows = ("batch", None)
    run = local_shards(
        local,
        layout,
        in_axes=((None, None), ("batch", None, None), rows),
        out_axes=(rows, rows),
    )
    unembed = to_device(unembedding(params))
    unembed = jax.sharding.reshard(unembed, layout.sharding(None, None))
    with jax.named_scope("token_logprob"):
        return run(unembed, hidden_BTW, targets_BT)


def take_window(array_BT: jax.Array, start_B: jax.Array, length: int, layout: Layout) -> jax.Array:
    """`length` positions of every row from `start_B` on: `[B, T, ...]` to `[B, length, ...]`.

    Rows that end earlier repeat their last position; callers mask those.
    """

    def local(array: jax.Array, start: jax.Array) -> jax.Array:
        index = jnp.minimum(start[:, None] + jnp.arange(length), array.shape[1] - 1)
        return jax.vmap(lambda row, at: row[at])(array, index)

    axes = ("batch",) + (None,) * (array_BT.ndim - 1)
    return local_shards(local, layout, in_axes=(axes, ("batch",)), out_axes=axes)(array_BT, start_B)


def scalar_scores(model: ScalarModel[jax.Array], hidden_BTW: jax.Array) -> jax.Array:
    """The head's value at every position, `[B, T]` float32."""
    head_W = to_device(model.head_W)
    return jnp.einsum("BTW,W->BT", hidden_BTW, head_W, preferred_element_type=jnp.float32)
