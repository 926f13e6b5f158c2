"""Any rule: all tokens get noise, and whole rows are read until a candidate is kept.

The noise is arithmetic enough for every multiprocessor, so its kernel spreads a row over programs
and finds the first candidate on the way. The second one has a program for each row, and reads it as
often as it takes. (To spread the first passes over programs too gained nothing: docs/log.md.)
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.truncated_sampling import search
from kernels_pallas.truncated_sampling.noise import gumbel
from kernels_pallas.truncated_sampling.rows import (
    SEARCH,
    Block,
    Out,
    Row,
    Tiling,
    launch,
    quantile,
    winner,
)
from kernels_pallas.truncated_sampling.search import Rule
from kernels_pallas.truncated_sampling.survey import load_all, log_sum, sum_of, survey

DRAW = Tiling(block=2048, loads=1, num_warps=8)


def sample(
    logits_BV: jax.Array,
    keys_B2: jax.Array,
    *,
    rule: Rule,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As api.truncated_sampling."""
    noise_BV, *drawn = _draw(logits_BV, keys_B2, interpret)
    guess = [survey(logits_BV, interpret=interpret).lanes] if rule.counts else []
    return _search(logits_BV, noise_BV, drawn, guess, rule, interpret)


def _draw(logits_BV: jax.Array, keys_B2: jax.Array, interpret: bool) -> list[jax.Array]:
    """Noise `[B, V]`; for each part of a row the best score and its token, the largest logit and
    the sum of e^(z - largest).
    """
    V = logits_BV.shape[1]
    tiling = DRAW.fitted(V)
    found = [Out(jnp.float32), Out(jnp.int32), Out(jnp.float32), Out(jnp.float32)]
    return launch(
        functools.partial(_draw_kernel, vocab=V, tiling=tiling), [logits_BV, keys_B2],
        [Out(jnp.float32, V, whole=True), *found], name="draw", num_parts=tiling.num_parts(V),
        num_warps=tiling.num_warps, interpret=interpret,
    )  # fmt: skip


def _draw_kernel(
    logits_ref, keys_ref, noise_ref, score_ref, token_ref, largest_ref, total_ref,
    *, vocab: int, tiling: Tiling,
):  # fmt: skip
    blocks = Row(logits_ref, vocab, tiling).part(pl.program_id(1))
    score = jnp.full((tiling.block,), -jnp.inf, jnp.float32)
    token, largest = jnp.zeros((tiling.block,), jnp.int32), score
    for block in blocks:
        noise = gumbel(keys_ref[0], keys_ref[1], block.token)
        plt.store(noise_ref.at[block.here], noise, mask=block.real)
        new = block.logit + noise
        better = new > score
        score, token = jnp.where(better, new, score), jnp.where(better, block.token, token)
        largest = jnp.maximum(largest, block.logit)
    score_ref[()] = jnp.max(score)
    token_ref[()] = winner(score, token, vocab)
    largest_ref[()], total_ref[()] = sum_of([block.logit for block in blocks], jnp.max(largest))


def _noise_at(noise_ref):
    def noise_at(block: Block, mask: jax.Array) -> jax.Array:
        return plt.load(noise_ref.at[block.here], mask=mask, other=0.0)

    return noise_at


def _search(
    logits_BV: jax.Array,
    noise_BV: jax.Array,
    drawn: list[jax.Array],
    lanes: list[jax.Array],
    rule: Rule,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    V = logits_BV.shape[1]
    token_B, logprob_B = launch(
        functools.partial(_search_kernel, vocab=V, rule=rule, tiling=SEARCH.fitted(V)),
        [logits_BV, noise_BV, *lanes, *drawn], [Out(jnp.int32), Out(jnp.float32)],
        name="search", num_warps=SEARCH.num_warps, interpret=interpret,
    )  # fmt: skip
    return token_B, logprob_B


def _search_kernel(logits_ref, noise_ref, *refs, vocab: int, rule: Rule, tiling: Tiling):
    *known, token_ref, logprob_ref = refs
    row, guess = Row(logits_ref, vocab, tiling), jnp.float32(-jnp.inf)
    if rule.counts:
        lanes_ref, *known = known
        count = _lanes_above(rule.top_k, vocab, lanes_ref.shape[0])
        guess = quantile(load_all(lanes_ref, -jnp.inf), count, search.WIDTH)
    score_ref, drawn_ref, largest_ref, total_ref = known
    token = winner(load_all(score_ref, -jnp.inf), load_all(drawn_ref, vocab), vocab)
    largest, log_total = log_sum(load_all(largest_ref, -jnp.inf), load_all(total_ref, 0.0))
    floor = search.floor_of(largest, rule)
    logit = plt.load(logits_ref.at[token])
    state = search.begin(token, logit, guess, largest, rule, floor)
    state = row.search(_noise_at(noise_ref), state, log_total, floor, rule)
    token_ref[()] = state.token
    logprob_ref[()] = state.logit - log_total


def _lanes_above(top_k: int, vocab: int, num_lanes: int) -> int:
    """How many lanes have one of the `top_k` largest of a row in any order, and some for chance."""
    share = 1 - (1 - top_k / vocab) ** max(1, vocab / num_lanes)
    mean = share * num_lanes
    return math.ceil(mean + 3 * math.sqrt(mean * (1 - share)))
