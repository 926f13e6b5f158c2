"""Some tokens of a row at once, behind those that its cache holds: a prompt fed in pieces."""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.decode_attention.reference import MASKED
from meshes.layout import Layout
from meshes.reshard import local_shards
from rlhf_jax.models.attention import split_groups
from rlhf_jax.models.cache import CACHE_AXES, KVCache
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.decoder import finish, mlp_block
from rlhf_jax.models.layers import embed_tokens, normalize, project_down, project_up
from rlhf_jax.models.params import Params
from rlhf_jax.models.rope import rotate


def feed(
    params: Params[jax.Array],
    tokens_BT: jax.Array,
    start_B: jax.Array,
    cache: KVCache,
    cfg: ModelConfig,
    layout: Layout,
) -> tuple[jax.Array, KVCache]:
    """Hidden states `[B, T, W]` of tokens at positions `start_B + t`, and the cache with them.

    The cache must have room for all T: a write that would reach beyond it lands further in front.
    What stands behind a row's real tokens is overwritten before it is read, as in `prefill`.
    """
    places_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1])
    x = embed_tokens(params, tokens_BT, layout)
    if params.positions_PD is not None:
        x = x + params.positions_PD.at[places_BT + cfg.position_offset].get(
            out_sharding=layout.spec("batch", None, None), mode="clip"
        )
    new = KVCache([], [])
    for layer, keys, values in zip(params.layers, cache.keys, cache.values, strict=True):
        h = normalize(x, layer.attention_norm, cfg) if cfg.pre_norm else x
        qkv = project_up(h, layer.qkv_ED, layer.qkv_bias_E)
        out, keys, values = attend_chunk(qkv, places_BT, keys, values, cfg, layout)
        new.keys.append(keys)
        new.values.append(values)
        x = x + project_down(out, layer.out_ED, layer.out_bias_D, layout)
        x = mlp_block(layer, x, cfg, layout)
    return finish(params, x, cfg), new


def attend_chunk(
    qkv_BTE: jax.Array,
    places_BT: jax.Array,
    keys_BGSK: jax.Array,
    values_BGSK: jax.Array,
    cfg: ModelConfig,
    layout: Layout,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """T consecutive tokens a row enter the cache and attend to all that stand before them.

    Returns the heads' outputs `[B, T, H*K]` and the caches.
    """

    def local(qkv: jax.Array, places: jax.Array, keys: jax.Array, values: jax.Array):
        q, k, v = split_groups(qkv, cfg)
        B, T, G, M, K = q.shape
        if cfg.positions == "rope":
            q = rotate(q.reshape(B, T, G * M, K), places, cfg).reshape(q.shape)
            k = rotate(k, places, cfg)
        keys, values = (
            append(cache, new.swapaxes(1, 2), places[:, 0])
            for cache, new in ((keys, k), (values, v))
        )
        visible_BTS = visible(places, keys.shape[2], cfg.sliding_window)
        scores_BGMTS = jnp.einsum("BTGMK,BGSK->BGMTS", q, keys, preferred_element_type=jnp.float32)
        scores_BGMTS = jnp.where(visible_BTS[:, None, None], scores_BGMTS * K**-0.5, MASKED)
        probs_BGMTS = jax.nn.softmax(scores_BGMTS, axis=-1)
        out = jnp.einsum("BGMTS,BGSK->BTGMK", probs_BGMTS, values.astype(jnp.float32))
        return out.reshape(B, T, -1).astype(qkv.dtype), keys, values

    run = local_shards(
        local,
        layout,
        in_axes=(("batch", None, "qkv"), ("batch", None), CACHE_AXES, CACHE_AXES),
        out_axes=(("batch", None, "heads"), CACHE_AXES, CACHE_AXES),
    )
    return run(qkv_BTE, places_BT, keys_BGSK, values_BGSK)


def append(cache_BGSK: jax.Array, new_BGTK: jax.Array, start_B: jax.Array) -> jax.Array:
    """Writes T positions of every row from `start_B` on."""
    write = jax.vmap(lambda cache, new, at: lax.dynamic_update_slice_in_dim(cache, new, at, axis=1))
    return write(cache_BGSK, new_BGTK.astype(cache_BGSK.dtype), start_B)


def visible(places_BT: jax.Array, num_cached: int, window: int | None) -> jax.Array:
    """Which cached positions each token attends to, `[B, T, S]`: its own and those before."""
    index_S, places_BT1 = jnp.arange(num_cached), places_BT[..., None]
    seen = index_S <= places_BT1
    return seen if window is None else seen & (index_S > places_BT1 - window)
