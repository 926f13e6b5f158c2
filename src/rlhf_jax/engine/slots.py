"""More prompts than rows that decode at once: a row that ends makes room for the next prompt."""

from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from meshes.layout import Layout
from meshes.reshard import local_shards
from rlhf_jax.engine.generate import (
    Decoding,
    Rollout,
    for_decoding,
    is_stop,
    with_token,
)
from rlhf_jax.engine.sampling import sample, seen_tokens
from rlhf_jax.models.cache import KVCache, empty
from rlhf_jax.models.decoder import check_length, decode_step
from rlhf_jax.models.layers import logits_from_hidden
from rlhf_jax.models.params import Params
from rlhf_jax.models.refill import prefill_into
from rlhf_jax.models.scoring import take_window

GROUPS = 8
"""The slots are this many groups; free ones wait until a group of them is. Where reading a group
costs about a step whatever its size, S·sqrt(2 / L) prompts are best for answers of L tokens."""


@flax.struct.dataclass
class Slots:
    """Rows that decode at once, and the prompts that they answer.

    `row_B` numbers a slot's prompt on its device's share. `done_B`: the slot is free.
    """

    row_B: jax.Array
    sample_ids_B: jax.Array
    prompt_lengths_B: jax.Array
    limits_B: jax.Array
    lengths_B: jax.Array
    last_B: jax.Array
    done_B: jax.Array
    seen_BV: jax.Array | None


@flax.struct.dataclass
class SlotState:
    """What the loop carries. `taken_X`: how many prompts have got a slot, one number a share of the
    batch. Of tokens that are not there yet stands -1.
    """

    cache: KVCache
    slots: Slots
    tokens_NR: jax.Array
    logprobs_NR: jax.Array
    taken_X: jax.Array


@flax.struct.dataclass
class Queue:
    """The order in which prompts get slots, on each share of the batch: real ones, then fillers.

    `count_X` is how many are real.
    """

    rows_N: jax.Array
    count_X: jax.Array


def group_size(num_slots: int, num_shares: int) -> int:
    """Prompts that are read at once, over all shares of the batch."""
    return max(1, round(num_slots / num_shares / GROUPS)) * num_shares


def generate_in_slots(
    params: Params[jax.Array],
    prompts: Any,
    num_slots: int,
    decoding: Decoding,
    *,
    key: jax.Array,
) -> Rollout:
    """`generate` with a cache of `num_slots` rows: the same answers to a `PromptBatch` of any size.

    Prompts stay on their share of the batch, which has its part of the slots. Whenever as many
    slots are free as a group has rows, a group of prompts is read into them, in the place that the
    cache has, and decoding goes on.
    """
    cfg, layout = decoding.cfg, decoding.layout
    params = for_decoding(params, decoding)
    queue = line_up(prompts, layout)
    group = group_size(num_slots, layout.batch_size_divisor)

    def fill(state: SlotState) -> SlotState:
        slots_C, taken_X, new, tokens_CP = take_prompts(state, queue, prompts, group, decoding)
        with jax.named_scope("prefill"):
            hidden, cache = prefill_into(params, tokens_CP, slots_C, state.cache, cfg, layout)
            ends = jnp.maximum(new.prompt_lengths_B - 1, 0)
            last = take_window(hidden, ends, 1, layout)[:, 0]
            logits = logits_from_hidden(params, last, cfg)
        state = replace(state, cache=cache, taken_X=taken_X)
        state, new = append(state, new, logits, decoding, key=key)
        return replace(state, slots=put_rows_into(state.slots, slots_C, new, layout))

    def step(state: SlotState) -> SlotState:
        slots = state.slots
        # A free slot has no position: it neither writes to the cache nor reads it.
        position = jnp.where(slots.done_B, -1, slots.prompt_lengths_B + slots.lengths_B - 1)
        hidden, cache = decode_step(params, slots.last_B, position, state.cache, cfg, layout)
        logits = logits_from_hidden(params, hidden, cfg)
        state, slots = append(replace(state, cache=cache), slots, logits, decoding, key=key)
        return replace(state, slots=slots)

    def decodes_on(state: SlotState) -> jax.Array:
        return ~fillable(state, queue, group, layout) & ~state.slots.done_B.all()

    def round_of(state: SlotState) -> SlotState:
        return lax.while_loop(decodes_on, step, fill(state))

    dtype = params.embed_VW.dtype
    state = lax.while_loop(
        lambda state: (state.taken_X < queue.count_X).any(),
        round_of,
        empty_slots(prompts, num_slots, dtype, decoding),
    )
    return finished(state, decoding.stop_ids)


def line_up(prompts: Any, layout: Layout) -> Queue:
    """The queue of a batch."""

    def local(valid: jax.Array) -> Queue:
        filler = valid <= 0
        return Queue(jnp.argsort(filler, stable=True), (~filler).sum(dtype=jnp.int32)[None])

    row: Any = ("batch",)
    run = local_shards(local, layout, in_axes=(row,), out_axes=Queue(row, row))
    return run(prompts.valid_B)


def empty_slots(prompts: Any, num_slots: int, dtype: Any, decoding: Decoding) -> SlotState:
    """All slots free, no prompt taken."""
    cfg, layout, limit = decoding.cfg, decoding.layout, decoding.sampling.max_new_tokens
    num_prompts, width = prompts.tokens_BP.shape
    check_length(width + limit, cfg)

    def full(shape: tuple[int, ...], value: Any, dtype: Any = jnp.int32) -> jax.Array:
        axes = ("batch",) + (None,) * (len(shape) - 1)
        return jnp.full(shape, value, dtype, out_sharding=layout.sharding(*axes))

    def layers() -> list[Any]:
        shape = (num_slots, cfg.num_kv_heads, width + limit, cfg.head_size)
        return [empty(shape, dtype, layout, decoding.kv_cache) for _ in range(cfg.num_layers)]

    none, free, seen = full((num_slots,), 0), full((num_slots,), True, bool), None
    if decoding.sampling.penalises:
        seen = full((num_slots, cfg.padded_vocab), False, bool)
    return SlotState(
        cache=KVCache(layers(), layers()),
        slots=Slots(none, none, none, none, none, none, free, seen),
        tokens_NR=full((num_prompts, limit), -1),
        logprobs_NR=full((num_prompts, limit), 0, jnp.float32),
        taken_X=full((layout.batch_size_divisor,), 0),
    )


def fillable(state: SlotState, queue: Queue, group: int, layout: Layout) -> jax.Array:
    """Whether as many prompts can be taken as a group holds, or all that are left."""
    size = group // layout.batch_size_divisor

    def local(done: jax.Array, taken: jax.Array, count: jax.Array) -> jax.Array:
        free, waiting = done.sum(dtype=jnp.int32), (count - taken)[0]
        return jnp.stack([jnp.minimum(free, waiting) - jnp.minimum(size, waiting), waiting])[None]

    rows = ("batch",)
    run = local_shards(local, layout, in_axes=(rows, rows, rows), out_axes=("batch", None))
    spare, waiting = run(state.slots.done_B, state.taken_X, queue.count_X).sum(0)
    return (waiting > 0) & (spare >= 0)


def take_prompts(
    state: SlotState, queue: Queue, prompts: Any, group: int, decoding: Decoding
) -> tuple[jax.Array, jax.Array, Slots, jax.Array]:
    """The next prompts: the slots they get, how many have been taken then, what a slot holds of
    each, and their tokens. Places of the group that stay empty have a slot beyond the last, and
    are done.
    """
    layout, sampling = decoding.layout, decoding.sampling
    size = group // layout.batch_size_divisor

    def local(done: jax.Array, taken: jax.Array, queue: Queue, prompts: Any):
        places = jnp.arange(size)
        free = jnp.flatnonzero(done, size=size, fill_value=0)
        real = places < jnp.minimum(done.sum(), queue.count_X - taken)
        rows = queue.rows_N[jnp.minimum(taken + places, len(queue.rows_N) - 1)]
        mine = jax.tree.map(lambda array: array[rows], prompts)
        limits = jnp.full(size, sampling.max_new_tokens, jnp.int32)
        if mine.limits_B is not None:
            limits = jnp.minimum(limits, mine.limits_B)
        none = jnp.zeros(size, jnp.int32)
        new = Slots(
            rows, mine.sample_ids_B, mine.lengths_B, limits, none, none, ~real, seen_BV=None
        )
        slots = jnp.where(real, free, len(done) + places)
        return slots, taken + real.sum(dtype=jnp.int32), new, mine.tokens_BP

    row: Any = ("batch",)
    of_slots = Slots(row, row, row, row, row, row, row, None)
    operands = (state.slots.done_B, state.taken_X, queue, prompts)
    run = local_shards(
        local, layout, in_axes=batch_axes(operands), out_axes=(row, row, of_slots, ("batch", None))
    )
    slots_C, taken_X, new, tokens_CP = run(*operands)
    if sampling.penalises:
        vocab = decoding.cfg.padded_vocab
        seen = seen_tokens(tokens_CP, new.prompt_lengths_B, vocab, layout)
        new = replace(new, seen_BV=seen)
    return slots_C, taken_X, new, tokens_CP


def put_rows_into(slots: Slots, slots_C: jax.Array, new: Slots, layout: Layout) -> Slots:
    """The slots with some of them filled."""

    def local(slots: Slots, at: jax.Array, new: Slots) -> Slots:
        return jax.tree.map(
            lambda old, value: old.at[at].set(value, mode="drop", unique_indices=True), slots, new
        )

    operands = (slots, slots_C, new)
    run = local_shards(local, layout, in_axes=batch_axes(operands), out_axes=batch_axes(slots))
    return run(*operands)


def append(
    state: SlotState, slots: Slots, logits_BV: jax.Array, decoding: Decoding, *, key: jax.Array
) -> tuple[SlotState, Slots]:
    """Draws a token for every slot that is not done, and writes it where its answer stands."""
    token_B, logprob_B = sample(
        logits_BV, slots.sample_ids_B, slots.lengths_B, decoding.sampling, decoding.stop_ids,
        decoding.layout, slots.seen_BV, key=key,
    )  # fmt: skip

    def local(answers: Any, slots: Slots, new: Any) -> Any:
        tokens_NR = answers[0]
        nowhere = len(tokens_NR) + jnp.arange(len(slots.row_B))
        at = jnp.where(slots.done_B, nowhere, slots.row_B), slots.lengths_B
        return jax.tree.map(
            lambda array, value: array.at[at].set(value, mode="drop", unique_indices=True),
            answers,
            new,
        )

    answers = (state.tokens_NR, state.logprobs_NR)
    operands = (answers, replace(slots, seen_BV=None), (token_B, logprob_B))
    axes = batch_axes(operands)
    tokens_NR, logprobs_NR = local_shards(
        local, decoding.layout, in_axes=axes, out_axes=axes[0]
    )(*operands)  # fmt: skip
    lengths_B = slots.lengths_B + ~slots.done_B
    ended_B = is_stop(token_B, decoding.stop_ids) | (lengths_B >= slots.limits_B)
    slots = replace(
        slots,
        lengths_B=lengths_B,
        last_B=token_B,
        done_B=slots.done_B | ended_B,
        seen_BV=with_token(slots.seen_BV, token_B),
    )
    return replace(state, tokens_NR=tokens_NR, logprobs_NR=logprobs_NR), slots


def finished(state: SlotState, stop_ids: tuple[int, ...]) -> Rollout:
    """All answers, behind whose ends stands 0."""
    there = state.tokens_NR >= 0
    ended_N = is_stop(state.tokens_NR, stop_ids).any(1)
    tokens_NR = jnp.where(there, state.tokens_NR, 0)
    return Rollout(tokens_NR, state.logprobs_NR, there.sum(1, dtype=jnp.int32), ended_N)


def batch_axes(tree: Any) -> Any:
    """Logical axes of arrays whose first dimension is the batch."""
    return jax.tree.map(lambda array: ("batch",) + (None,) * (array.ndim - 1), tree)
