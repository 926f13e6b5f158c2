"""Prefill and decode as one program over the parameters that training updates."""

from dataclasses import replace

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from meshes.layout import Layout
from meshes.reshard import reshard_params
from rlhf_jax.engine.sampling import SamplingConfig, sample
from rlhf_jax.models.cache import KVCache
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.decoder import decode_step, prefill
from rlhf_jax.models.layers import logits_from_hidden
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


@flax.struct.dataclass
class LoopState:
    """What one decode step reads and writes. `[R, B]` arrays are filled row by row."""

    cache: KVCache
    index: jax.Array
    tokens_RB: jax.Array
    logprobs_RB: jax.Array
    lengths_B: jax.Array
    last_B: jax.Array
    done_B: jax.Array


def generate(
    params: Params[jax.Array],
    prompts_BP: jax.Array,
    prompt_lengths_B: jax.Array,
    sample_ids_B: jax.Array,
    active_B: jax.Array,
    cfg: ModelConfig,
    layout: Layout,
    sampling: SamplingConfig,
    stop_ids: tuple[int, ...],
    *,
    key: jax.Array,
) -> Rollout:
    """Answers to right-padded prompts. Traced inside jit; `params` come in STORE.

    The change of layout happens here, inside the program: equal layouts cost nothing, and a
    gathered copy dies with it. Rows that are not `active_B` stay empty. The loop ends when every
    row has ended.
    """
    params = reshard_params(params, param_specs(cfg), layout)
    state = first_token(
        params, prompts_BP, prompt_lengths_B, sample_ids_B, active_B,
        cfg, layout, sampling, stop_ids, key=key,
    )  # fmt: skip

    def step(state: LoopState) -> LoopState:
        # A finished row has no position: it neither writes to the cache nor reads it.
        position = jnp.where(state.done_B, -1, prompt_lengths_B + state.index - 1)
        hidden, cache = decode_step(params, state.last_B, position, state.cache, cfg, layout)
        logits = logits_from_hidden(params, hidden, cfg)
        token, logprob = sample(
            logits, sample_ids_B, state.index, sampling, stop_ids, layout, key=key
        )
        return record(replace(state, cache=cache), token, logprob, stop_ids)

    state = lax.while_loop(
        lambda state: (state.index < sampling.max_new_tokens) & ~state.done_B.all(), step, state
    )
    ended = is_stop(state.last_B, stop_ids) & active_B
    return Rollout(state.tokens_RB.T, state.logprobs_RB.T, state.lengths_B, ended)


def first_token(
    params: Params[jax.Array],
    prompts_BP: jax.Array,
    prompt_lengths_B: jax.Array,
    sample_ids_B: jax.Array,
    active_B: jax.Array,
    cfg: ModelConfig,
    layout: Layout,
    sampling: SamplingConfig,
    stop_ids: tuple[int, ...],
    *,
    key: jax.Array,
) -> LoopState:
    """Prefill, and the first token of every row."""
    length = prompts_BP.shape[1] + sampling.max_new_tokens
    with jax.named_scope("prefill"):
        hidden, cache = prefill(params, prompts_BP, length, cfg, layout)
        last = take_window(hidden, jnp.maximum(prompt_lengths_B - 1, 0), 1, layout)[:, 0]
        logits = logits_from_hidden(params, last, cfg)
    token, logprob = sample(logits, sample_ids_B, jnp.int32(0), sampling, stop_ids, layout, key=key)
    shape = (sampling.max_new_tokens, token.shape[0])
    rows = layout.sharding(None, "batch")
    state = LoopState(
        cache=cache,
        index=jnp.int32(0),
        tokens_RB=jnp.zeros(shape, jnp.int32, out_sharding=rows),
        logprobs_RB=jnp.zeros(shape, jnp.float32, out_sharding=rows),
        lengths_B=jnp.zeros_like(token),
        last_B=jnp.zeros_like(token),
        done_B=~active_B,
    )
    return record(state, token, logprob, stop_ids)


def record(
    state: LoopState, token_B: jax.Array, logprob_B: jax.Array, stop_ids: tuple[int, ...]
) -> LoopState:
    """Appends one token to every row that has not ended."""
    token_B = jnp.where(state.done_B, 0, token_B)
    logprob_B = jnp.where(state.done_B, 0.0, logprob_B)
    here = (state.index, 0)
    return replace(
        state,
        index=state.index + 1,
        tokens_RB=lax.dynamic_update_slice(state.tokens_RB, token_B[None], here),
        logprobs_RB=lax.dynamic_update_slice(state.logprobs_RB, logprob_B[None], here),
        lengths_B=state.lengths_B + ~state.done_B,
        last_B=jnp.where(state.done_B, state.last_B, token_B),
        done_B=state.done_B | is_stop(token_B, stop_ids),
    )


def is_stop(token_B: jax.Array, stop_ids: tuple[int, ...]) -> jax.Array:
    """Whether each token ends its row."""
    stop = jnp.zeros_like(token_B, dtype=bool)
    for stop_id in stop_ids:
        stop = stop | (token_B == stop_id)
    return stop
