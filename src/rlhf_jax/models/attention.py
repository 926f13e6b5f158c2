"""Attention of one layer on local shards: split the fused projection, rotate, attend.

Everything between the two projections runs inside `shard_map`: heads are never cut, so each device
works on its own rows and KV groups.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.attention.api import attention
from kernels_pallas.decode_attention.api import decode_attention
from meshes.layout import Layout
from meshes.reshard import local_shards
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.rope import rotate


def split_groups(qkv: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`[..., E]` as queries `[..., G, heads per group, K]`, keys and values `[..., G, K]`."""
    per_group = cfg.heads_per_group + 2
    groups = qkv.shape[-1] // (per_group * cfg.head_size)
    parts = qkv.reshape(*qkv.shape[:-1], groups, per_group, cfg.head_size)
    return parts[..., :-2, :], parts[..., -2, :], parts[..., -1, :]


def attend_rows(
    qkv_BTE: jax.Array, cfg: ModelConfig, layout: Layout, *, keep_cache: bool = False
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Causal attention over whole rows.

    Returns the heads' outputs `[B, T, H*K]` and, where `keep_cache`, keys and values as
    `[B, G, T, K]`.
    """

    def local(qkv: jax.Array) -> tuple[jax.Array, ...]:
        B, T, _ = qkv.shape
        q, k, v = split_groups(qkv, cfg)
        q = q.reshape(B, T, -1, cfg.head_size)
        if cfg.positions == "rope":
            positions = jnp.arange(T)[None]
            q, k = rotate(q, positions, cfg), rotate(k, positions, cfg)
        out = attention(q, k, v, window=cfg.sliding_window).reshape(B, T, -1)
        return (out, k.swapaxes(1, 2), v.swapaxes(1, 2)) if keep_cache else (out,)

    heads, cache = ("batch", None, "heads"), ("batch", "heads", None, None)
    out_axes = [heads, cache, cache] if keep_cache else [heads]
    run = local_shards(
        lambda qkv: list(local(qkv)), layout, in_axes=("batch", None, "qkv"), out_axes=out_axes
    )
    out = run(qkv_BTE)
    return (out[0], out[1], out[2]) if keep_cache else (out[0], None, None)


def attend_cached(
    qkv_BE: jax.Array,
    positions_B: jax.Array,
    keys_BGSK: jax.Array,
    values_BGSK: jax.Array,
    cfg: ModelConfig,
    layout: Layout,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token a row: its key and value enter the cache in place, then it attends.

    Returns the heads' outputs `[B, H*K]` and the caches.
    """

    def local(qkv: jax.Array, positions: jax.Array, keys: jax.Array, values: jax.Array):
        B = qkv.shape[0]
        q, k, v = split_groups(qkv, cfg)
        q = q.reshape(B, -1, cfg.head_size)
        if cfg.positions == "rope":
            q = rotate(q, positions, cfg)
            k = rotate(k, positions, cfg)
        out, keys, values = decode_attention(
            q, k, v, positions, keys, values, window=cfg.sliding_window
        )
        return out.reshape(B, -1), keys, values

    cache = ("batch", "heads", None, None)
    run = local_shards(
        local,
        layout,
        in_axes=(("batch", "qkv"), ("batch",), cache, cache),
        out_axes=(("batch", "heads"), cache, cache),
    )
    return run(qkv_BE, positions_B, keys_BGSK, values_BGSK)
