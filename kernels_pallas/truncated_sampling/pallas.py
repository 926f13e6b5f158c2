"""The sampling kernel: a program serves a row and reads it until a candidate is kept.

Pallas, Triton backend. A row is too long for registers: each pass streams it in blocks, from the
card's cache after the first. Every lane keeps its own best, count and sum; they are combined at the
end of a pass. The first pass leaves the largest logit of every lane: a sample of the row's largest
ones, from which a first pivot below or near the last kept logit is guessed without reading the row.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas import dispatch
from kernels_pallas.triton import next_power_of_2, silence_backend_deprecation
from kernels_pallas.truncated_sampling import search
from kernels_pallas.truncated_sampling.search import Pass, Rule

LEAST = float(jnp.finfo(jnp.float32).min)  # in the place of -inf, where a difference is taken
GUESS_STEPS = 12
GUESS_RANGE = 20.0  # logits further below the largest have no mass to speak of


@dataclass(frozen=True)
class Tiling:
    """block: logits read at a time (power of two); num_warps: of a program (power of two)."""

    block: int = 4096
    num_warps: int = 16


class Lanes(NamedTuple):
    """The first pass, by lane: best score and its token, largest logit, sum of e^(z - largest)."""

    score: jax.Array
    token: jax.Array
    largest: jax.Array
    total: jax.Array


def why_not(logits_BV: jax.Array, noise_BV: jax.Array, *, rule: Rule) -> str | None:
    """Reason why the compiled kernel does not take these arguments, or None."""
    return dispatch.why_not_gpu() or why_not_interpret(logits_BV, noise_BV, rule=rule)


def why_not_interpret(logits_BV: jax.Array, noise_BV: jax.Array, *, rule: Rule) -> str | None:
    """The limits that do not depend on the platform."""
    del noise_BV, rule
    if logits_BV.size >= 2**31:
        return f"offsets are 32 bits wide and the logits {logits_BV.shape} have 2^31 or more"
    return None


def truncated_sampling(
    logits_BV: jax.Array,
    noise_BV: jax.Array,
    *,
    rule: Rule,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See api.truncated_sampling."""
    silence_backend_deprecation()
    B, V = logits_BV.shape
    tiling = Tiling() if tiling is None else tiling
    block = min(tiling.block, max(16, next_power_of_2(V)))
    row = pl.BlockSpec((None, V), lambda b: (b, 0))
    one = pl.BlockSpec((None,), lambda b: (b,))
    return pl.pallas_call(
        functools.partial(_kernel, vocab=V, rule=rule, block=block),
        grid=(B,),
        in_specs=[row, row],
        out_specs=[one, one],
        out_shape=[
            jax.ShapeDtypeStruct((B,), jnp.int32),
            jax.ShapeDtypeStruct((B,), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=tiling.num_warps, num_stages=2),
        interpret=interpret,
        name="truncated_sampling",
    )(logits_BV, noise_BV)


def _kernel(logits_ref, noise_ref, token_ref, logprob_ref, *, vocab: int, rule: Rule, block: int):
    refs = logits_ref, noise_ref
    lanes = _first_pass(refs, vocab, block)
    token = _winner(lanes.score, lanes.token, vocab)
    largest = jnp.max(lanes.largest)
    log_sum = largest + jnp.log(jnp.sum(lanes.total * jnp.exp(lanes.largest - largest)))
    floor = largest + (math.log(rule.min_p) if rule.min_p > 0 else -jnp.inf)
    state = search.begin(
        token,
        plt.load(logits_ref.at[token]),
        _guess(lanes.largest, largest, log_sum, rule),
        rule,
        floor,
    )

    def step(state: search.State) -> search.State:
        found = _look(refs, state.pivot, log_sum, floor, vocab, rule, block)
        return search.advance(state, found, rule, floor)

    state = lax.while_loop(lambda state: ~state.done, step, state)
    token_ref[()] = state.token
    logprob_ref[()] = state.logit - log_sum


def _first_pass(refs, vocab: int, block: int) -> Lanes:
    """Reads all logits and all noise."""
    logits_ref, noise_ref = refs

    def step(i: jax.Array, lanes: Lanes) -> Lanes:
        token = i * block + jnp.arange(block, dtype=jnp.int32)
        here, real = pl.ds(i * block, block), token < vocab
        logit = plt.load(logits_ref.at[here], mask=real, other=-jnp.inf)
        score = logit + plt.load(noise_ref.at[here], mask=real, other=0.0)
        better, larger = score > lanes.score, logit > lanes.largest
        scale = jnp.exp(-jnp.abs(logit - lanes.largest))
        return Lanes(
            jnp.where(better, score, lanes.score),
            jnp.where(better, token, lanes.token),
            jnp.where(larger, logit, lanes.largest),
            jnp.where(larger, lanes.total * scale + 1, lanes.total + scale),
        )

    empty = Lanes(
        jnp.full((block,), -jnp.inf, jnp.float32),
        jnp.zeros((block,), jnp.int32),
        jnp.full((block,), LEAST, jnp.float32),
        jnp.zeros((block,), jnp.float32),
    )
    return lax.fori_loop(0, -(-vocab // block), step, empty)


def _winner(score: jax.Array, token: jax.Array, vocab: int) -> jax.Array:
    """The token of the largest score; the first of them where they are equal."""
    return jnp.min(jnp.where(score == jnp.max(score), token, vocab - 1))


def _guess(largest_lane: jax.Array, largest: jax.Array, log_sum: jax.Array, rule: Rule):
    """A logit that is not kept, as far as the largest logits of the lanes show; -inf for none."""
    if not (rule.counts or rule.weighs):
        return jnp.float32(-jnp.inf)
    weight = jnp.exp(largest_lane - log_sum)
    lowest = jnp.min(jnp.where(largest_lane > LEAST, largest_lane, largest))

    def left_out(logit: jax.Array) -> jax.Array:
        above = largest_lane > logit
        out = jnp.sum(above.astype(jnp.int32)) >= rule.top_k if rule.counts else logit != logit
        if rule.weighs and not rule.counts:
            out |= jnp.sum(jnp.where(above, weight, 0.0)) >= rule.top_p
        return out

    def halve(_, bracket):
        low, high, best = bracket
        middle = 0.5 * (low + high)
        out = left_out(middle)
        return (
            jnp.where(out, middle, low),
            jnp.where(out, high, middle),
            jnp.where(out, middle, best),
        )

    low = jnp.maximum(lowest, largest - GUESS_RANGE)
    best = jnp.where(left_out(low), low, -jnp.inf)
    return lax.fori_loop(0, GUESS_STEPS, halve, (low, largest, best))[2]


def _look(refs, pivot, log_sum, floor, vocab: int, rule: Rule, block: int) -> Pass:
    """A pass at `pivot`: reads all logits, and the noise of those that can still win."""
    logits_ref, noise_ref = refs

    def step(i: jax.Array, lanes):
        score, token, count_above, above, count_from, from_pivot = lanes
        index = i * block + jnp.arange(block, dtype=jnp.int32)
        here = pl.ds(i * block, block)
        logit = plt.load(logits_ref.at[here], mask=index < vocab, other=-jnp.inf)
        larger = logit > pivot
        wanted = larger & (logit >= floor) if rule.min_p > 0 else larger
        new = logit + plt.load(noise_ref.at[here], mask=wanted, other=0.0)
        better = wanted & (new > score)
        score, token = jnp.where(better, new, score), jnp.where(better, index, token)
        if rule.counts:
            count_above = count_above + larger.astype(jnp.int32)
        if not rule.weighs:
            return score, token, count_above, above, count_from, from_pivot
        weight = jnp.exp(logit - log_sum)
        above = above + jnp.where(larger, weight, 0.0)
        if rule.bounds:
            at_least = logit >= pivot
            count_from = count_from + at_least.astype(jnp.int32)
            from_pivot = from_pivot + jnp.where(at_least, weight, 0.0)
        return score, token, count_above, above, count_from, from_pivot

    none = jnp.full((block,), -jnp.inf, jnp.float32)
    count, mass = jnp.zeros((block,), jnp.int32), jnp.zeros((block,), jnp.float32)
    lanes = lax.fori_loop(0, -(-vocab // block), step, (none, count, count, mass, count, mass))
    score, token, *sums = lanes
    num_above, mass_above, num_from, mass_from = (jnp.sum(part) for part in sums)
    token = _winner(score, token, vocab)
    logit = plt.load(logits_ref.at[token])
    return Pass(num_above, mass_above, num_from, mass_from, token, logit)
