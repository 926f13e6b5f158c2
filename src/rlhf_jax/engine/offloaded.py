"""An optimizer whose masters and moments live in host memory.

An update visits the devices piece by piece, a decoder layer at a time: masters and moments of one
piece come up, are updated, and go back before the next follows. Every piece is a call of its own,
and like pieces share a program: so no more than one piece is ever there, whatever a scheduler would
do in one large program. The numbers are those of `engine.state.apply_gradients`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshes.offload import check_host_memory, to_device, to_host
from rlhf_jax.engine.moments import join_state, split_state
from rlhf_jax.engine.optimizer import Common, Optimizer, Rule, clip
from rlhf_jax.engine.state import TrainState, kept_state

LAYER = re.compile(r".*?\blayers\.\d+\b")


@dataclass(frozen=True)
class Piece:
    """Parameters that are updated together, by their numbers, and how."""

    numbers: tuple[int, ...]
    rules: tuple[Rule, ...]

    def of(self, leaves: list[Any]) -> list[Any]:
        """Its own of one leaf for every parameter."""
        return [leaves[number] for number in self.numbers]

    def put(self, leaves: list[Any], own: list[Any]) -> None:
        """Its own in their places."""
        for number, leaf in zip(self.numbers, own, strict=True):
            leaves[number] = leaf


def pieces(params: Any, rules: tuple[Rule, ...]) -> Iterator[Piece]:
    """A piece for every decoder layer, and one for every other parameter."""
    groups: dict[str, list[int]] = {}
    for number, (key_path, _) in enumerate(jax.tree.leaves_with_path(params)):
        groups.setdefault(piece_name(key_path), []).append(number)
    for numbers in groups.values():
        yield Piece(tuple(numbers), tuple(rules[number] for number in numbers))


def piece_name(key_path: Any) -> str:
    """The piece that a parameter belongs to: its layer, or its own."""
    path = jax.tree_util.keystr(key_path, simple=True, separator=".")
    layer = LAYER.match(path)
    return layer[0] if layer else path


def create_offloaded(params: Any, optimizer: Optimizer) -> TrainState:
    """`engine.state.create_state` with masters and moments born in host memory.

    Raises:
        ValueError: the devices have no host memory.
    """
    check_host_memory(jax.devices()[0])
    leaves, tree = jax.tree.flatten(params)
    mixed = any(leaf.dtype != jnp.float32 for leaf in leaves)
    first, rule = jax.eval_shape(optimizer.init, params)
    parts, outer = split_state(rule, params)
    masters: list[Any] = [None] * len(leaves)
    for piece in pieces(params, optimizer.rules):
        wide, new = _start(
            piece.of(leaves), common=optimizer.common, rules=piece.rules, mixed=mixed
        )
        put_state(parts, piece, new)
        if mixed:
            piece.put(masters, wide)
    master = jax.tree.unflatten(tree, masters) if mixed else None
    opt_state = first, join_state(parts, outer, params)
    return TrainState(params, master, opt_state, jnp.int32(0), jnp.int32(0))


def apply_offloaded(
    state: TrainState,
    grads: Any,
    optimizer: Optimizer,
    norm: jax.Array,
    finite: jax.Array,
    *,
    allowed: jax.Array | bool = True,
) -> TrainState:
    """`engine.state.apply_gradients` in several programs, so not inside jit; it donates the state.

    `norm` is the global one of the gradients, which are float32 or of the parameters' dtype.
    """
    first, rule = state.opt_state
    params, tree = jax.tree.flatten(state.params)
    masters = None if state.master is None else jax.tree.leaves(state.master)
    (parts, outer), gradients = split_state(rule, state.params), jax.tree.leaves(grads)
    before, take = list(parts), finite & allowed
    for piece in pieces(state.params, optimizer.rules):
        moments = [piece.of(part) if isinstance(part, list) else None for part in before]
        counters = [None if isinstance(part, list) else part for part in before]
        owned = piece.of(params), masters and piece.of(masters), moments
        step = _compiled_step(optimizer.common, piece.rules, outer, places_of(*owned, counters))
        new_params, new_masters, new_parts = step(
            *owned, counters, piece.of(gradients), jax.device_put(np.asarray(piece.numbers)),
            norm, take, finite,
        )  # fmt: skip
        put_state(parts, piece, new_parts)
        piece.put(params, new_params)
        if masters is not None:
            piece.put(masters, new_masters)
    return TrainState(
        params=jax.tree.unflatten(tree, params),
        master=None if masters is None else jax.tree.unflatten(tree, masters),
        opt_state=(first, join_state(parts, outer, state.params)),
        step=state.step + take,
        skipped=state.skipped + ~finite,
    )


@partial(jax.jit, static_argnames=("common", "rules", "mixed"))
def _start(
    params: list[jax.Array], *, common: Common, rules: tuple[Rule, ...], mixed: bool
) -> tuple[list[jax.Array], list[Any]]:
    """Masters and state of a piece before the first step."""
    wide = [leaf.astype(jnp.float32) for leaf in params]
    parts, _ = split_state(common.of(rules, None).init(wide), wide)
    return to_host(wide) if mixed else [], moments_to_host(parts)


def places_of(params: Any, masters: Any, moments: Any, counters: Any) -> Any:
    """Where the results of a step lie: where its arguments did."""
    where = partial(jax.tree.map, lambda leaf: leaf.sharding)
    parts = zip(moments, counters, strict=True)
    own = tuple(where(c) if m is None else tuple(where(m)) for m, c in parts)
    return tuple(where(params)), masters and tuple(where(masters)), own


@lru_cache(maxsize=256)
def _compiled_step(common: Common, rules: tuple[Rule, ...], outer: Any, places: Any) -> Any:
    """`_step`, which like pieces share. Without `places` XLA would let results in one memory take
    over arguments in the other.
    """
    working, masters, parts = places
    lists = [list(part) if isinstance(part, tuple) else part for part in parts]
    return jax.jit(
        partial(_step, common=common, rules=rules, outer=outer),
        out_shardings=(list(working), masters and list(masters), lists),
        donate_argnums=(0, 1, 2),
        keep_unused=True,  # old parameters are not read, the new ones take over their buffers
    )


def _step(
    params: list[jax.Array],
    masters: list[jax.Array] | None,
    moments: list[list[jax.Array] | None],
    counters: list[jax.Array | None],
    grads: list[jax.Array],
    numbers: jax.Array,
    norm: jax.Array,
    take: jax.Array,
    finite: jax.Array,
    *,
    common: Common,
    rules: tuple[Rule, ...],
    outer: Any,
) -> tuple[list[jax.Array], list[jax.Array] | None, list[Any]]:
    """A piece after one step; as it was where the step is not taken (see `kept_state`)."""
    old = params if masters is None else to_device(masters)
    pairs = zip(to_device(moments), counters, strict=True)
    parts = [counter if own is None else own for own, counter in pairs]
    limit, rule = common.cfg.clip_norm, common.of(rules, numbers)
    grads = [clip(grad.astype(jnp.float32), norm, limit) for grad in grads]
    state = join_state(parts, outer, old)
    updates, after = rule.update(grads, state, old)
    new = optax.apply_updates(old, updates)

    def keep(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(take, new, old)

    new, after = jax.tree.map(keep, new, old), kept_state(after, state, take, finite)
    parts, _ = split_state(after, old)
    working = [leaf.astype(param.dtype) for leaf, param in zip(new, params, strict=True)]
    return working, None if masters is None else to_host(new), moments_to_host(parts)


def put_state(parts: list[Any], piece: Piece, own: list[Any]) -> None:
    """A piece's part of the state in its places; counters are the same in every piece."""
    for which, new in enumerate(own):
        if isinstance(new, list):
            piece.put(parts[which], new)
        else:
            parts[which] = new


def moments_to_host(parts: list[Any]) -> list[Any]:
    """Inside jit: what there is for each parameter goes to host memory, counters stay."""
    return [to_host(part) if isinstance(part, list) else part for part in parts]
