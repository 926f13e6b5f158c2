"""Prefill and decode as one program over the parameters that training updates."""

from dataclasses import dataclass, replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from meshes.layout import Layout
from rlhf_jax.engine.sampling import SamplingConfig, sample, seen_tokens
from rlhf_jax.models.adapted import merge, settled
from rlhf_jax.models.cache import KVCache
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.decoder import decode_step, prefill
from rlhf_jax.models.layers import logits_from_hidden
from rlhf_jax.models.lora import reshard_model
from rlhf_jax.models.narrow import Narrow, narrow_weights
from rlhf_jax.models.params import Params, param_specs
from rlhf_jax.models.scoring import take_window


@flax.struct.dataclass
class Rollout:
    """Sampled answers. Entry r of a row is its r-th new token; behind the end stands 0.

    `lengths_B` counts the stop token where a row ended with one (`ended_B`).
    """

    tokens_BR: jax.Array
    logprobs_BR: jax.Array
    lengths_B: jax.Array
    ended_B: jax.Array


@dataclass(frozen=True)
class Decoding:
    """What is static about a generation: the model, where it decodes, and how tokens are drawn.

    Adapters stay beside their weights unless `merge_adapters`: a sum in bfloat16 loses updates
    below its spacing. Merged, a token costs no more than without adapters.

    `weights` and `kv_cache` are the form that the layers' matrices and the cache have while
    decoding (`models/narrow.py`).
    """

    cfg: ModelConfig
    layout: Layout
    sampling: SamplingConfig
    stop_ids: tuple[int, ...]
    merge_adapters: bool = False
    weights: Narrow = "same"
    kv_cache: Narrow = "same"


@flax.struct.dataclass
class LoopState:
    """What one decode step reads and writes. `[R, B]` arrays are filled row by row.

    `seen_BV` holds the tokens of prompt and answer, where repetition is penalised.
    """

    cache: KVCache
    index: jax.Array
    tokens_RB: jax.Array
    logprobs_RB: jax.Array
    lengths_B: jax.Array
    last_B: jax.Array
    done_B: jax.Array
    seen_BV: jax.Array | None


def generate(
    params: Params[jax.Array], prompts: Any, decoding: Decoding, *, key: jax.Array
) -> Rollout:
    """Answers to a `PromptBatch`. Traced inside jit; `params` come in STORE.

    The change of layout happens here, inside the program: equal layouts cost nothing, and a
    gathered copy dies with it. Rows that are not valid stay empty. The loop ends when every row
    has ended.
    """
    sampling, stop_ids = decoding.sampling, decoding.stop_ids
    params = for_decoding(params, decoding)
    state = first_token(params, prompts, decoding, key=key)
    state = decode_until(params, prompts, state, sampling.max_new_tokens, decoding, key=key)
    ended = is_stop(state.last_B, stop_ids) & (prompts.valid_B > 0)
    return Rollout(state.tokens_RB.T, state.logprobs_RB.T, state.lengths_B, ended)


def decode_until(
    params: Params[jax.Array],
    prompts: Any,
    state: LoopState,
    limit: int | jax.Array,
    decoding: Decoding,
    *,
    key: jax.Array,
) -> LoopState:
    """Token after token, until every row has ended or has `limit` of them; `params` as
    `for_decoding` returns them.
    """
    cfg, layout = decoding.cfg, decoding.layout

    def step(state: LoopState) -> LoopState:
        # A finished row has no position: it neither writes to the cache nor reads it.
        position = jnp.where(state.done_B, -1, prompts.lengths_B + state.lengths_B - 1)
        hidden, cache = decode_step(params, state.last_B, position, state.cache, cfg, layout)
        logits = logits_from_hidden(params, hidden, cfg)
        state = replace(state, cache=cache)
        return record(state, logits, prompts, decoding, key=key)

    return lax.while_loop(lambda state: (state.index < limit) & ~state.done_B.all(), step, state)


def for_decoding(params: Params[jax.Array], decoding: Decoding) -> Params[jax.Array]:
    """The model as it decodes. Adapters are merged and matrices rounded where they lie, shard by
    shard, before weights are gathered.
    """
    if decoding.merge_adapters:
        params = merge(params)
    params = narrow_weights(params, decoding.weights)
    return settled(reshard_model(params, param_specs(decoding.cfg), decoding.layout))


def first_token(
    params: Params[jax.Array], prompts: Any, decoding: Decoding, *, key: jax.Array
) -> LoopState:
    """Prefill, and the first token of every row."""
    cfg, layout, sampling = decoding.cfg, decoding.layout, decoding.sampling
    tokens_BP, lengths_B = prompts.tokens_BP, prompts.lengths_B
    length = tokens_BP.shape[1] + sampling.max_new_tokens
    with jax.named_scope("prefill"):
        hidden, cache = prefill(params, tokens_BP, length, cfg, layout, decoding.kv_cache)
        last = take_window(hidden, jnp.maximum(lengths_B - 1, 0), 1, layout)[:, 0]
        logits = logits_from_hidden(params, last, cfg)
    seen = None
    if sampling.penalises:
        seen = seen_tokens(tokens_BP, lengths_B, logits.shape[1], layout)
    shape = (sampling.max_new_tokens, tokens_BP.shape[0])
    rows = layout.sharding(None, "batch")
    state = LoopState(
        cache=cache,
        index=jnp.int32(0),
        tokens_RB=jnp.zeros(shape, jnp.int32, out_sharding=rows),
        logprobs_RB=jnp.zeros(shape, jnp.float32, out_sharding=rows),
        lengths_B=jnp.zeros_like(lengths_B),
        last_B=jnp.zeros_like(lengths_B),
        done_B=prompts.valid_B <= 0,
        seen_BV=seen,
    )
    return record(state, logits, prompts, decoding, key=key)


def record(
    state: LoopState,
    logits_BV: jax.Array,
    prompts: Any,
    decoding: Decoding,
    *,
    key: jax.Array,
) -> LoopState:
    """Draws a token for every row that has not ended, and appends it."""
    token_B, logprob_B = sample(
        logits_BV, prompts.sample_ids_B, state.lengths_B, decoding.sampling, decoding.stop_ids,
        decoding.layout, state.seen_BV, key=key,
    )  # fmt: skip
    token_B = jnp.where(state.done_B, 0, token_B)
    logprob_B = jnp.where(state.done_B, 0.0, logprob_B)
    here, lengths_B = (state.index, 0), state.lengths_B + ~state.done_B
    done_B = state.done_B | is_stop(token_B, decoding.stop_ids)
    if prompts.limits_B is not None:
        done_B = done_B | (lengths_B >= prompts.limits_B)
    return replace(
        state,
        index=state.index + 1,
        tokens_RB=lax.dynamic_update_slice(state.tokens_RB, token_B[None], here),
        logprobs_RB=lax.dynamic_update_slice(state.logprobs_RB, logprob_B[None], here),
        lengths_B=lengths_B,
        last_B=jnp.where(state.done_B, state.last_B, token_B),
        done_B=done_B,
        seen_BV=with_token(state.seen_BV, token_B),
    )


def with_token(seen_BV: jax.Array | None, token_B: jax.Array) -> jax.Array | None:
    """The tokens that a row has seen, and its new one."""
    if seen_BV is None:
        return None
    return seen_BV | (jnp.arange(seen_BV.shape[1])[None] == token_B[:, None])


def is_stop(token_B: jax.Array, stop_ids: tuple[int, ...]) -> jax.Array:
    """Whether each token ends its row."""
    stop = jnp.zeros_like(token_B, dtype=bool)
    for stop_id in stop_ids:
        stop = stop | (token_B == stop_id)
    return stop
