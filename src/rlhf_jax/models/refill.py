"""Prompts read into some rows of a KV cache, while its other rows stay as they are."""

import jax

from meshes.layout import Layout
from meshes.reshard import local_shards
from rlhf_jax.models.cache import Cached, KVCache, axes_of, stored
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.decoder import finish, layer_rows, start
from rlhf_jax.models.params import Params


def prefill_into(
    params: Params[jax.Array],
    tokens_CP: jax.Array,
    slots_C: jax.Array,
    cache: KVCache,
    cfg: ModelConfig,
    layout: Layout,
) -> tuple[jax.Array, KVCache]:
    """Hidden states of whole prompts `[C, P, W]`, and the cache with each in the row `slots_C`.

    Rows are counted on each device's share. Prompts whose slot lies beyond it are left out; no two
    have the same. What a row held before is overwritten as far as the prompt goes, and behind it
    by decode before it is read.
    """
    x = start(params, tokens_CP, cfg, layout)
    new = KVCache([], [])
    for layer, keys, values in zip(params.layers, cache.keys, cache.values, strict=True):
        x, keys_CGPK, values_CGPK = layer_rows(layer, x, cfg, layout, keep_cache=True)
        assert keys_CGPK is not None
        assert values_CGPK is not None
        new.keys.append(put_into(keys, slots_C, stored(keys_CGPK, keys), layout))
        new.values.append(put_into(values, slots_C, stored(values_CGPK, values), layout))
    return finish(params, x, cfg), new


def put_into(cached: Cached, slots_C: jax.Array, new: Cached, layout: Layout) -> Cached:
    """The first positions of some rows of a cache replaced, in place where it is not used again."""

    def local(cached: Cached, slots: jax.Array, new: Cached) -> Cached:
        def one(cache: jax.Array, new: jax.Array) -> jax.Array:
            return cache.at[slots, :, : new.shape[2]].set(new, mode="drop", unique_indices=True)

        return jax.tree.map(one, cached, new)

    axes = axes_of(cached)
    run = local_shards(local, layout, in_axes=(axes, ("batch",), axes), out_axes=axes)
    return run(cached, slots_C, new)
