"""Attention of one layer on local shards: split the fused projection, rotate, attend.

Everything between the two projections runs inside `shard_map`: heads are never cut, so each device
works on its own rows and KV groups.
"""

from functools import partial

import jax
import jax.numpy as jnp

from kernels_pallas.attention.api import attention
from kernels_pallas.decode_attention.api import decode_attention
from meshes.layout import Layout
from meshes.reshard import local_shards
from rlhf_jax.models.cache import Cached, axes_of
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.remat import keep
from rlhf_jax.models.rope import rotate, turns


def split_groups(qkv: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`[..., E]` as queries `[..., G, heads per group, K]`, keys and values `[..., G, K]`."""
    per_group = cfg.heads_per_group + 2
    groups = qkv.shape[-1] // (per_group * cfg.head_size)
    parts = qkv.reshape(*qkv.shape[:-1], groups, per_group, cfg.head_size)
    return parts[..., :-2, :], parts[..., -2, :], parts[..., -1, :]


def attend_rows(
    qkv_BTE: jax.Array,
    cfg: ModelConfig,
    layout: Layout,
    *,
    starts_BT: jax.Array | None = None,
    keep_cache: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Causal attention over whole rows; with `starts_BT` inside each of the rows packed into one.

    Returns the heads' outputs `[B, T, H*K]` and, where `keep_cache`, keys and values as
    `[B, G, T, K]`.
    """

    def local(qkv: jax.Array, starts: jax.Array | None) -> list[jax.Array]:
        B, T, _ = qkv.shape
        q, k, v = split_groups(qkv, cfg)
        q = q.reshape(B, T, -1, cfg.head_size)
        if cfg.positions == "rope":
            positions = jnp.arange(T)[None] if starts is None else jnp.arange(T)[None] - starts
            q, k = rotate(q, positions, cfg), rotate(k, positions, cfg)
        q, k, v = (keep(x, "qkv") for x in (q, k, v))
        out = attention(q, k, v, starts, window=cfg.sliding_window).reshape(B, T, -1)
        return [out, k.swapaxes(1, 2), v.swapaxes(1, 2)] if keep_cache else [out]

    heads, cache = ("batch", None, "heads"), ("batch", "heads", None, None)
    out_axes = [heads, cache, cache] if keep_cache else [heads]
    rows = None if starts_BT is None else ("batch", None)
    run = local_shards(local, layout, in_axes=(("batch", None, "qkv"), rows), out_axes=out_axes)
    out = run(qkv_BTE, starts_BT)
    return (out[0], out[1], out[2]) if keep_cache else (out[0], None, None)


type Turn = tuple[jax.Array, jax.Array] | None


def turn_of(positions_B: jax.Array, cfg: ModelConfig) -> Turn:
    """What rotates the heads of one token a row, for all layers; None where nothing does."""
    return turns(positions_B, cfg) if cfg.positions == "rope" else None


def attend_cached(
    qkv_BE: jax.Array,
    positions_B: jax.Array,
    turn: Turn,
    keys: Cached,
    values: Cached,
    cfg: ModelConfig,
    layout: Layout,
) -> tuple[jax.Array, Cached, Cached]:
    """One token a row: its key and value enter the cache in place, then it attends.

    Returns the heads' outputs `[B, H*K]` and the caches.
    """
    cache = axes_of(keys)
    rows = jax.tree.map(lambda _: ("batch", None), turn)
    run = local_shards(
        partial(attend_shard, cfg=cfg),
        layout,
        in_axes=(("batch", "qkv"), ("batch",), rows, cache, cache),
        out_axes=(("batch", "heads"), cache, cache),
    )
    return run(qkv_BE, positions_B, turn, keys, values)


def attend_shard(
    qkv_BE: jax.Array,
    positions_B: jax.Array,
    turn: Turn,
    keys: Cached,
    values: Cached,
    cfg: ModelConfig,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, Cached, Cached]:
    """`attend_cached` on one device's rows and heads; inside `shard_map`."""
    B = len(qkv_BE)
    # Keys and values, then the scales of both where they have some.
    caches = [a for pair in zip(*map(jax.tree.leaves, (keys, values)), strict=True) for a in pair]
    k_scale, v_scale = caches[2:] or (None, None)
    cos, sin = turn or (None, None)
    qkv_BGEK = qkv_BE.reshape(B, -1, cfg.heads_per_group + 2, cfg.head_size)
    out, *caches = decode_attention(
        qkv_BGEK, positions_B, caches[0], caches[1], k_scale, v_scale, cos, sin,
        window=cfg.sliding_window, implementation=implementation,
    )  # fmt: skip
    keys, values = (
        jax.tree.unflatten(jax.tree.structure(keys), caches[first::2]) for first in range(2)
    )
    return out.reshape(B, -1), keys, values
