"""Top-k of a few thousand at most: the likely tokens are listed, and they alone get noise.

Four kernels. The lanes of a survey give a cut that k tokens or more are above, the tokens above it
are listed (part by part, so that every multiprocessor takes part), and a program for each row
chooses among them in registers. A row in which a part's list is too short (many equal logits, or
all of the largest in one part) is searched as a whole.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.triton import next_power_of_2
from kernels_pallas.truncated_sampling import search
from kernels_pallas.truncated_sampling.noise import gumbel
from kernels_pallas.truncated_sampling.rows import SEARCH, Block, Out, Row, Tiling, launch, quantile
from kernels_pallas.truncated_sampling.search import Rule
from kernels_pallas.truncated_sampling.survey import TILING, Survey, load_all, log_sum, survey

LONGEST = 2048  # the largest k
HOPELESS = 21.0
"""Noise lies between -4.5 and 16. So a token this far below the likeliest is never drawn; and the
mass of a few thousand of them is less than what rounding does to a sum."""
CUT_WARPS = 8
CHOOSE_WIDTH = 256  # slots of a warp


class Lists(NamedTuple):
    """Tokens and logits, a list for each part of a row, and how many each should have had."""

    token: jax.Array
    logit: jax.Array
    num: jax.Array


def room_for(top_k: int, num_parts: int) -> int:
    """What a part's list holds (a power of two): thrice what it has of the top k on average."""
    return max(64, next_power_of_2(3 * top_k // num_parts))


def sample(
    logits_BV: jax.Array,
    keys_B2: jax.Array,
    *,
    rule: Rule,
    room: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As api.truncated_sampling, for `rule.top_k` from 1 to LONGEST; a list holds `room`."""
    V = logits_BV.shape[1]
    tiling = TILING.fitted(V)
    if room is None:
        room = min(room_for(rule.top_k, tiling.num_parts(V)), tiling.block * tiling.loads)
    seen = survey(logits_BV, interpret=interpret)
    bounds_B4 = _bounds(seen, rule, interpret)
    lists = _list(logits_BV, bounds_B4, room, interpret)
    return _choose(logits_BV, keys_B2, bounds_B4, lists, rule, interpret)


def _bounds(seen: Survey, rule: Rule, interpret: bool) -> jax.Array:
    """For each row the cut, the largest logit and log sum e^z."""
    kernel = functools.partial(_bounds_kernel, rule=rule)
    (bounds_B4,) = launch(
        kernel, seen, [Out(jnp.float32, 4)], name="cut", num_warps=CUT_WARPS, interpret=interpret
    )
    return bounds_B4


def _bounds_kernel(largest_ref, total_ref, lanes_ref, bounds_ref, *, rule: Rule):
    largest, sum_row = log_sum(load_all(largest_ref, -jnp.inf), load_all(total_ref, 0.0))
    bounds_ref[0] = quantile(load_all(lanes_ref, -jnp.inf), rule.top_k, HOPELESS)
    bounds_ref[1] = largest
    bounds_ref[2] = sum_row


def _list(logits_BV: jax.Array, bounds_B4: jax.Array, room: int, interpret: bool) -> Lists:
    """The tokens of each part that are above the cut and not hopeless."""
    V = logits_BV.shape[1]
    tiling = TILING.fitted(V)
    outputs = [Out(jnp.int32, room), Out(jnp.float32, room), Out(jnp.int32)]
    return Lists(
        *launch(
            functools.partial(_list_kernel, vocab=V, tiling=tiling), [logits_BV, bounds_B4],
            outputs, name="list", num_parts=tiling.num_parts(V), num_warps=tiling.num_warps,
            interpret=interpret,
        )
    )  # fmt: skip


def _list_kernel(
    logits_ref, bounds_ref, token_ref, logit_ref, count_ref, *, vocab: int, tiling: Tiling
):
    room = token_ref.shape[0]
    cut, nearest = bounds_ref[0], bounds_ref[1] - HOPELESS
    blocks = Row(logits_ref, vocab, tiling).part(pl.program_id(1))
    chosen = [(logit > cut) & (logit >= nearest) for *_, logit in blocks]
    num_lane = sum(mask.astype(jnp.int32) for mask in chosen)
    slot = jnp.cumsum(num_lane) - num_lane
    for block, mask in zip(blocks, chosen, strict=True):
        fits = mask & (slot < room)
        plt.store(token_ref.at[slot], block.token, mask=fits)
        plt.store(logit_ref.at[slot], block.logit, mask=fits)
        slot = slot + mask.astype(jnp.int32)
    count_ref[()] = jnp.sum(num_lane)


def _choose(
    logits_BV: jax.Array,
    keys_B2: jax.Array,
    bounds_B4: jax.Array,
    lists: Lists,
    rule: Rule,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    V, slots = logits_BV.shape[1], next_power_of_2(lists.token.shape[1])
    token_B, logprob_B = launch(
        functools.partial(_choose_kernel, vocab=V, rule=rule, tiling=SEARCH.fitted(V)),
        [logits_BV, keys_B2, bounds_B4, *lists], [Out(jnp.int32), Out(jnp.float32)],
        name="choose", num_warps=min(16, max(4, slots // CHOOSE_WIDTH)), interpret=interpret,
    )  # fmt: skip
    return token_B, logprob_B


def _choose_kernel(
    logits_ref, keys_ref, bounds_ref, token_ref, logit_ref, count_ref, drawn_ref, logprob_ref,
    *, vocab: int, rule: Rule, tiling: Tiling,
):  # fmt: skip
    cut, largest, sum_row = bounds_ref[0], bounds_ref[1], bounds_ref[2]
    floor, key = search.floor_of(largest, rule), (keys_ref[0], keys_ref[1])
    num_parts, room = count_ref.shape[0], token_ref.shape[0] // count_ref.shape[0]
    listed = jnp.max(load_all(count_ref, 0)) <= room
    slot = jnp.arange(next_power_of_2(num_parts * room), dtype=jnp.int32)
    part = slot // room
    num = plt.load(count_ref.at[part], mask=part < num_parts, other=0)
    here, real = pl.ds(0, slot.shape[0]), slot % room < num
    token = plt.load(token_ref.at[here], mask=real, other=vocab)
    logit = plt.load(logit_ref.at[here], mask=real, other=-jnp.inf)
    short = _likeliest(logit, token, gumbel(*key, token), sum_row, floor, rule, vocab)

    def noise_at(block: Block, mask: jax.Array) -> jax.Array:
        del mask
        return gumbel(*key, block.token)

    state = search.begin(jnp.int32(0), jnp.float32(-jnp.inf), cut, largest, rule, floor)
    state = state._replace(done=listed)
    row = Row(logits_ref, vocab, tiling)
    state = row.search(noise_at, state, sum_row, floor, rule)
    drawn_ref[()] = jnp.where(listed, short[0], state.token)
    logprob_ref[()] = jnp.where(listed, short[1], state.logit) - sum_row


def _likeliest(
    logit: jax.Array, token: jax.Array, noise: jax.Array, log_sum, floor, rule: Rule, vocab: int
) -> tuple[jax.Array, jax.Array]:
    """The token of a list and its logit; free slots have a logit of -inf."""
    weight, mass = jnp.exp(logit - log_sum), jnp.float32(1.0)
    if rule.bounds:
        inside = logit >= _largest(logit, rule.top_k)
        logit, weight = jnp.where(inside, logit, -jnp.inf), jnp.where(inside, weight, 0.0)
        mass = jnp.sum(weight)
    score = logit + noise

    def step(state):
        _, pivot, _ = state
        allowed = (logit > pivot) & (logit >= floor)
        best = jnp.max(jnp.where(allowed, score, -jnp.inf))
        new = jnp.min(jnp.where(allowed & (score == best), token, vocab - 1))
        at = jnp.max(jnp.where(token == new, logit, -jnp.inf))
        above = logit > at
        gone = at != at
        if rule.counts and not rule.bounds:
            gone |= jnp.sum(above.astype(jnp.int32)) >= rule.top_k
        if rule.weighs:
            over = jnp.sum(jnp.where(above, weight, 0.0))
            gone |= (over > 0) & (over >= rule.top_p * mass)
        return new, at, ~(gone & (best > -jnp.inf))  # where a list is too short nothing may be left

    start = jnp.int32(0), jnp.float32(-jnp.inf), jnp.bool_(False)
    return lax.while_loop(lambda state: ~state[2], step, start)[:2]


def _largest(logit: jax.Array, k: int) -> jax.Array:
    """The k-th largest, or the smallest above -inf where there are fewer."""
    ordered = search.ordered(logit)

    def halve(bracket):
        low, high = bracket
        middle = search.middle(low, high)
        enough = jnp.sum((ordered >= middle).astype(jnp.int32)) >= k
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    high = jnp.max(ordered) + 1
    low = jnp.minimum(jnp.min(jnp.where(logit > -jnp.inf, ordered, search.HIGHEST)), high - 1)
    bracket = lax.while_loop(lambda b: search.middle(*b) > b[0], halve, (low, high))
    return search.logit_of(bracket[0])
