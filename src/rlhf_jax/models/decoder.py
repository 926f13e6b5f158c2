"""The decoder as pure functions: whole rows (training, prefill) and one token a row (decode)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from meshes.layout import Layout
from meshes.reshard import reshard_params
from rlhf_jax.models.attention import attend_cached, attend_rows, turn_of
from rlhf_jax.models.cache import KVCache, extend
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.decode_layers import decode_layers, fits
from rlhf_jax.models.layers import embed_tokens, feed_forward, normalize, project_down, project_up
from rlhf_jax.models.lora import reshard_model
from rlhf_jax.models.narrow import Narrow
from rlhf_jax.models.params import LayerParams, Params, layer_specs, param_specs
from rlhf_jax.models.remat import Remat, keep, rematerialised


def forward(
    params: Params[jax.Array],
    tokens_BT: jax.Array,
    cfg: ModelConfig,
    layout: Layout,
    *,
    starts_BT: jax.Array | None = None,
    remat: Remat = "none",
) -> jax.Array:
    """Hidden states `[B, T, W]` that the unembedding or a scalar head reads.

    Rows start at index 0 and attention is causal, so what stands behind a row's end changes
    nothing before it: no mask is built. Weights are gathered to `layout` layer by layer.

    Where several rows are packed into one, `starts_BT` says for each token where its row begins
    (`data/packing.py`): attention stays inside it, and positions count from there.
    """
    if starts_BT is None:
        check_length(tokens_BT.shape[1], cfg)
    run_layer = checkpointed(remat)
    params = gather_outer(params, cfg, layout)
    x = start(params, tokens_BT, cfg, layout, starts_BT)
    for layer in params.layers:
        x = run_layer(layer, x, cfg, layout, starts_BT)
    return finish(params, x, cfg)


def check_length(length: int, cfg: ModelConfig) -> None:
    """ValueError where rows are longer than the position table."""
    if length > cfg.max_positions:
        raise ValueError(
            f"rows of {length} tokens do not fit this model's {cfg.max_positions} positions"
        )


def gather_outer(params: Params[jax.Array], cfg: ModelConfig, layout: Layout) -> Params[jax.Array]:
    """What stands outside the layers, in `layout`; layers are left where they are."""
    outer = reshard_params(replace(params, layers=[]), replace(param_specs(cfg), layers=[]), layout)
    return replace(outer, layers=params.layers)


def checkpointed(remat: Remat):
    """`layer_rows` under a rematerialisation policy.

    The gather of a layer's weights sits inside the checkpoint: outside it the gathered weights
    would live until the backward pass. The barrier keeps the gathers of later layers from starting
    early, and trains in less memory than a scan over stacked layers.
    """

    def run(
        layer: LayerParams[jax.Array],
        x: jax.Array,
        cfg: ModelConfig,
        layout: Layout,
        starts_BT: jax.Array | None = None,
    ) -> jax.Array:
        layer, x = lax.optimization_barrier((layer, x))
        layer = reshard_model(layer, layer_specs(cfg), layout)
        return layer_rows(layer, x, cfg, layout, starts_BT=starts_BT)[0]

    return rematerialised(run, remat, static_argnums=(2, 3))


def start(
    params: Params[jax.Array],
    tokens_BT: jax.Array,
    cfg: ModelConfig,
    layout: Layout,
    starts_BT: jax.Array | None = None,
) -> jax.Array:
    """Embedded tokens with learned positions, `[B, T, D]`."""
    with jax.named_scope("embed"):
        x = embed_tokens(params, tokens_BT, layout)
        if params.positions_PD is None:
            return x
        first = cfg.position_offset
        if starts_BT is None:
            return x + params.positions_PD[None, first : first + tokens_BT.shape[1]]
        rows_BT = first + jnp.arange(tokens_BT.shape[1])[None] - starts_BT
        # In float32, because its gradient is a sum over all rows of a position.
        table_PD = params.positions_PD.astype(jnp.float32)
        here = layout.spec("batch", None, None)
        return x + table_PD.at[rows_BT].get(out_sharding=here, mode="clip").astype(x.dtype)


def finish(params: Params[jax.Array], x: jax.Array, cfg: ModelConfig) -> jax.Array:
    """The final norm and output projection, where the model has them."""
    if params.final_norm is not None:
        x = normalize(x, params.final_norm, cfg)
    return project_out(params, x)


def project_out(params: Params[jax.Array], x: jax.Array) -> jax.Array:
    """To the width that the unembedding reads."""
    if params.project_out_WD is not None:
        x = project_up(x, params.project_out_WD, None)
    return x


def layer_rows(
    layer: LayerParams[jax.Array],
    x_BTD: jax.Array,
    cfg: ModelConfig,
    layout: Layout,
    *,
    starts_BT: jax.Array | None = None,
    keep_cache: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """One layer over whole rows; with `keep_cache` also its keys and values `[B, G, T, K]`."""
    with jax.named_scope("attention"):
        h = normalize(x_BTD, layer.attention_norm, cfg) if cfg.pre_norm else x_BTD
        qkv = project_up(h, layer.qkv_ED, layer.qkv_bias_E)
        attended, keys, values = attend_rows(
            qkv, cfg, layout, starts_BT=starts_BT, keep_cache=keep_cache
        )
        attended = keep(attended, "attended")
        x = x_BTD + project_down(attended, layer.out_ED, layer.out_bias_D, layout)
        x = keep(x, "middle")
    return mlp_block(layer, x, cfg, layout), keys, values


def mlp_block(
    layer: LayerParams[jax.Array], x: jax.Array, cfg: ModelConfig, layout: Layout
) -> jax.Array:
    """The second half of a layer. Post-norm models normalise the sums, pre-norm the inputs."""
    with jax.named_scope("mlp"):
        if cfg.pre_norm:
            return x + feed_forward(normalize(x, layer.mlp_norm, cfg), layer, cfg, layout)
        x = normalize(x, layer.attention_norm, cfg)
        x = keep(x + feed_forward(x, layer, cfg, layout), "end")
        return normalize(x, layer.mlp_norm, cfg)


def prefill(
    params: Params[jax.Array],
    tokens_BP: jax.Array,
    cache_length: int,
    cfg: ModelConfig,
    layout: Layout,
    kv_cache: Narrow = "same",
) -> tuple[jax.Array, KVCache]:
    """Hidden states of whole prompts `[B, P, W]` and the cache with room for `cache_length`.

    `params` are in `layout` already. Positions behind a prompt's end hold values that decode
    overwrites before it reads them.
    """
    check_length(cache_length, cfg)
    x = start(params, tokens_BP, cfg, layout)
    cache = KVCache([], [])
    for layer in params.layers:
        x, keys, values = layer_rows(layer, x, cfg, layout, keep_cache=True)
        assert keys is not None
        assert values is not None
        cache.keys.append(extend(keys, cache_length, layout, kv_cache))
        cache.values.append(extend(values, cache_length, layout, kv_cache))
    return finish(params, x, cfg), cache


def start_token(
    params: Params[jax.Array],
    tokens_B: jax.Array,
    positions_B: jax.Array,
    cfg: ModelConfig,
    layout: Layout,
) -> jax.Array:
    """One embedded token a row, with its learned position, `[B, D]`."""
    x = embed_tokens(params, tokens_B, layout)
    if params.positions_PD is None:
        return x
    rows = positions_B + cfg.position_offset
    return x + params.positions_PD.at[rows].get(
        out_sharding=layout.spec("batch", None), mode="clip"
    )


def decode_step(
    params: Params[jax.Array],
    tokens_B: jax.Array,
    positions_B: jax.Array,
    cache: KVCache,
    cfg: ModelConfig,
    layout: Layout,
) -> tuple[jax.Array, KVCache]:
    """One token a row, each at its own position: hidden states `[B, W]` and the cache.

    Adapters go layer by layer through the functions of `layer_rows`.
    """
    x = start_token(params, tokens_B, positions_B, cfg, layout)
    if fits(params):
        x, cache = decode_layers(params, x, positions_B, cache, cfg, layout)
        return project_out(params, x), cache
    turn, new = turn_of(positions_B, cfg), KVCache([], [])
    for layer, keys, values in zip(params.layers, cache.keys, cache.values, strict=True):
        h = normalize(x, layer.attention_norm, cfg) if cfg.pre_norm else x
        qkv = project_up(h, layer.qkv_ED, layer.qkv_bias_E)
        out, keys, values = attend_cached(qkv, positions_B, turn, keys, values, cfg, layout)
        new.keys.append(keys)
        new.values.append(values)
        x = x + project_down(out, layer.out_ED, layer.out_bias_D, layout)
        x = mlp_block(layer, x, cfg, layout)
    return finish(params, x, cfg), new
