"""The state of an optimizer leaf by leaf, and moments in bfloat16 with stochastic rounding."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

SEED = 20
"""Rounding draws from a seed of its own: it has nothing to do with what is trained."""


def split_state(opt_state: Any, params: Any) -> tuple[list[Any], Any]:
    """What the state consists of: for every tree like `params` a list of its leaves, and single
    leaves (counters); and the function's inverse as a structure, for `join_state`.
    """
    like = jax.tree.structure(params)
    trees, outer = jax.tree.flatten(opt_state, is_leaf=lambda n: jax.tree.structure(n) == like)
    return [jax.tree.leaves(t) if jax.tree.structure(t) == like else t for t in trees], outer


def join_state(parts: list[Any], outer: Any, params: Any) -> Any:
    """The state again, for parameters in a structure like `params`."""
    like = jax.tree.structure(params)
    trees = [jax.tree.unflatten(like, p) if isinstance(p, list) else p for p in parts]
    return jax.tree.unflatten(outer, trees)


class RoundedState(NamedTuple):
    """How often moments were rounded, and the state with moments in bfloat16."""

    rounds: jax.Array
    inner: Any


def with_bfloat16_moments(
    inner: optax.GradientTransformation, numbers: Any = None
) -> optax.GradientTransformation:
    """`inner`, computed in float32, with what it keeps for each parameter rounded to bfloat16.

    Rounding to the nearest would lose what is added to a moment where that is below half of its
    spacing, as (1 - beta2) g² is for a steady g. `numbers` are those of the parameters, None: 0, 1,
    …; each draws bits of its own, the same on every mesh.
    """

    def init(params: Any) -> RoundedState:
        parts, outer = split_state(inner.init(params), params)
        narrow = [_map(lambda leaf, _: leaf.astype(jnp.bfloat16), part) for part in parts]
        return RoundedState(jnp.int32(0), join_state(narrow, outer, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, RoundedState]:
        parts, outer = split_state(state.inner, updates)
        wide = [_map(lambda leaf, _: leaf.astype(jnp.float32), part) for part in parts]
        changes, after = inner.update(updates, join_state(wide, outer, updates), params)
        seed = mixed(state.rounds.astype(jnp.uint32) + SEED)

        def narrow(which: int, part: Any) -> Any:
            def one(leaf: jax.Array, number: Any) -> jax.Array:
                return round_stochastically(leaf, nth_seed(seed, len(parts) * number + which))

            return _map(one, part, numbers)

        parts, outer = split_state(after, updates)
        parts = [narrow(which, part) for which, part in enumerate(parts)]
        return changes, RoundedState(state.rounds + 1, join_state(parts, outer, updates))

    return optax.GradientTransformation(init, update)


def _map(function: Callable[[jax.Array, Any], jax.Array], part: Any, numbers: Any = None) -> Any:
    """A function of every leaf of a list and its number; a counter stays as it is."""
    if not isinstance(part, list):
        return part
    return [function(leaf, n if numbers is None else numbers[n]) for n, leaf in enumerate(part)]


def round_stochastically(x: jax.Array, seed: jax.Array) -> jax.Array:
    """Float32 to one of the two nearest bfloat16, with probabilities whose mean is x.

    The 16 bits that bfloat16 lacks are the distance to the lower neighbour in 65536ths of the
    spacing: 16 random bits are added and then cut off.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32) + (random_bits(x, seed) >> 16)
    rounded = lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def nth_seed(seed: jax.Array, number: jax.typing.ArrayLike) -> jax.Array:
    """One of the seeds that follow from one, uint32: an addition, since there is one for each leaf
    and every operation of a leaf is compiled.
    """
    return seed + jnp.asarray(number, jnp.uint32) * jnp.uint32(0x9E3779B9)


def random_bits(x: jax.Array, seed: jax.Array) -> jax.Array:
    """32 bits for each number of `x`, from its place alone.

    A few integer operations that are part of the loop over the numbers. JAX's generators compile
    to a hundred a number, in every loop that reads them: minutes for a large model.
    """
    place = jax.typeof(x).sharding
    place = None if place.mesh.empty else place
    index, stride = jnp.uint32(0), 1
    for axis in reversed(range(x.ndim)):
        along = lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=place)
        index, stride = index + along * jnp.uint32(stride), stride * x.shape[axis]
    return mixed(mixed(index) + seed)


def mixed(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every bit depends on every other.

    The constants are "lowbias32" of C. Wellons, Prospecting for Hash Functions, 2018.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
