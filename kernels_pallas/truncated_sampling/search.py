"""The search for the likeliest token of the kept set, without a sort.

Tokens are kept by their logit alone, from the largest down to some value. So where the token with
the largest logit + noise is not kept, neither is any of its logit or below, and the largest logit +
noise above it is the next candidate; the first candidate that is kept is the answer. Whether it is
kept follows from how many tokens have a larger logit, and their probability together: one pass over
the row. A candidate is a sample of what lies above the one before, so few are needed.

Where top-p counts the mass of the top k, that mass is known between bounds first; they are narrowed
by more passes only for a candidate that could be on either side.

Written for scalars and for arrays `[B]`: the kernel has a row in each program, the plain form all
rows in one loop.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

GUESS, TEST, BOUND = 0, 1, 2  # what a pivot is: a first guess, the candidate's logit, a bisection's
HIGHEST = 0x7F800000  # ordered(inf)
WIDTH = 40.0  # logits this far below the largest have no mass: e^-40 is 4e-18


@dataclass(frozen=True)
class Rule:
    """What is kept. `top_k` 0, `top_p` 1 and `min_p` 0 keep everything."""

    top_k: int
    top_p: float
    min_p: float

    @property
    def counts(self) -> bool:
        """Whether passes count tokens."""
        return self.top_k > 0

    @property
    def weighs(self) -> bool:
        """Whether passes sum probabilities."""
        return self.top_p < 1

    @property
    def bounds(self) -> bool:
        """Whether the mass that top-p is a share of has to be found."""
        return self.counts and self.weighs


class Pass(NamedTuple):
    """What a pass over a row finds: tokens with a logit above the pivot and from the pivot on, the
    sum of their probabilities, the probability of the pivot's own logit, and the largest
    logit + noise above the pivot that min-p keeps.
    """

    num_above: jax.Array
    mass_above: jax.Array
    num_from: jax.Array
    mass_from: jax.Array
    weight: jax.Array
    token: jax.Array
    logit: jax.Array


class State(NamedTuple):
    """A row's search. `low` and `high` (`ordered` logits) have the k-th largest logit between them:
    above `low`, as far as it has mass, and not above `high`. `num_low` tokens are above `low` (-1:
    no pass was there yet), `num_high` are not below `high`. `most` and `least` are bounds of the
    mass of the top k.
    """

    token: jax.Array
    logit: jax.Array
    pivot: jax.Array
    kind: jax.Array
    done: jax.Array
    before: jax.Array
    next_token: jax.Array
    next_logit: jax.Array
    hint: jax.Array
    low: jax.Array
    high: jax.Array
    num_low: jax.Array
    num_high: jax.Array
    most: jax.Array
    least: jax.Array


def floor_of(largest: jax.Array, rule: Rule) -> jax.Array:
    """The smallest logit that min-p keeps, -inf for any."""
    if rule.min_p > 0:
        return largest + math.log(rule.min_p)
    return jnp.full_like(largest, -jnp.inf)


def begin(
    token: jax.Array,
    logit: jax.Array,
    guess: jax.Array,
    largest: jax.Array,
    rule: Rule,
    floor: jax.Array,
) -> State:
    """`token` has the largest logit + noise of all, or a `logit` of -inf if that is not known.
    `guess` is a logit that is probably not kept, just below those of the top k; -inf for none.
    `largest` is the row's largest logit, `floor` the smallest that min-p keeps.
    """
    far = (logit <= guess) | (logit < floor)
    zero, one = jnp.zeros_like(logit), jnp.ones_like(logit)
    none = jnp.zeros_like(token)
    lowest = largest - WIDTH
    return State(
        token=token,
        logit=logit,
        pivot=jnp.where(far, guess, logit),
        kind=jnp.where(far, none + GUESS, none + TEST),
        done=logit != logit,  # NaN: there is nothing to find
        before=zero,
        next_token=none,
        next_logit=zero,
        hint=ordered(jnp.maximum(guess, lowest)),
        low=ordered(lowest),
        high=ordered(largest),
        num_low=none - 1,
        num_high=none,
        most=one,
        least=zero if rule.bounds else one,
    )


def advance(state: State, found: Pass, rule: Rule, floor: jax.Array) -> State:
    """The state after the pass at `state.pivot`."""
    beyond = found.num_above >= rule.top_k if rule.counts else jnp.zeros_like(state.done)
    if rule.bounds:
        state = _narrow(state, found, rule)
    fresh = state.kind != BOUND
    before = jnp.where(fresh, found.mass_above, state.before)
    next_token = jnp.where(fresh, found.token, state.next_token)
    next_logit = jnp.where(fresh, found.logit, state.next_logit)
    # The likeliest is kept, and so is a candidate whose masses are NaN: every search ends.
    others = next_logit > state.logit
    gone = before >= rule.top_p * state.most if rule.weighs else jnp.zeros_like(beyond)
    # A pivot of -inf: there is no candidate yet.
    low = (state.pivot < floor) | (state.pivot == -jnp.inf)
    gone = others & (gone | (fresh & (beyond | low)))
    kept = (state.kind != GUESS) & ~gone
    if rule.bounds:
        kept &= ~(others & (before >= rule.top_p * state.least))
    logit = jnp.where(gone, next_logit, state.logit)
    tests = gone | (state.kind == GUESS)
    between = _between(state) if rule.bounds else logit
    return state._replace(
        token=jnp.where(gone, next_token, state.token),
        logit=logit,
        pivot=jnp.where(tests, logit, between),
        kind=jnp.where(tests, jnp.int32(TEST), jnp.int32(BOUND)),
        done=state.done | kept,
        before=before,
        next_token=next_token,
        next_logit=next_logit,
    )


def _narrow(state: State, found: Pass, rule: Rule) -> State:
    """Bounds of the k-th largest logit and of the mass down to it, after one more pass."""
    pivot, beyond = ordered(state.pivot), found.num_above >= rule.top_k
    lower, higher = beyond & (pivot >= state.low), ~beyond & (pivot < state.high)
    # Of n tokens above a pivot the k largest have k / n of their mass or more, and each of the
    # others has more than the pivot's own.
    num_out = found.num_above - rule.top_k
    share = found.mass_above * (rule.top_k / jnp.maximum(found.num_above, 1).astype(jnp.float32))
    most = found.mass_above - num_out.astype(jnp.float32) * found.weight
    higher_least = jnp.where(higher, found.mass_from, state.least)
    state = state._replace(
        low=jnp.where(lower, pivot, state.low),
        num_low=jnp.where(lower, found.num_above, state.num_low),
        most=jnp.where(lower, most, state.most),
        high=jnp.where(higher, pivot, state.high),
        num_high=jnp.where(higher, found.num_from, state.num_high),
        least=jnp.maximum(higher_least, jnp.where(lower, share, 0)),
    )
    # Nothing lies between: the top k is what is not below `high`.
    met = (state.num_low == state.num_high) | (middle(state.low, state.high) == state.low)
    return state._replace(most=jnp.where(met, state.least, state.most))


def ordered(logit: jax.Array) -> jax.Array:
    """int32 in the order of the floats, neighbours one apart."""
    bits = lax.bitcast_convert_type(logit, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def logit_of(ordered: jax.Array) -> jax.Array:
    """The inverse of `ordered`."""
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _between(state: State) -> jax.Array:
    """The next logit to ask about: the hint if nothing is known below, then the middle."""
    low, high = logit_of(state.low), logit_of(state.high)
    mean = 0.5 * (low + high)
    inside = (mean > low) & (mean < high)
    mean = jnp.where(inside, mean, logit_of(middle(state.low, state.high)))
    hinted = (state.num_low < 0) & (state.hint < state.high)
    return jnp.where(hinted, logit_of(state.hint), mean)


def middle(low: jax.Array, high: jax.Array) -> jax.Array:
    """The mean, rounded down, without overflow."""
    return (low >> 1) + (high >> 1) + (low & high & 1)
