"""What a trained model consists of: working parameters, float32 masters, optimizer moments."""

from collections.abc import Callable
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import optax


class AnyOptimizer(Protocol):
    """optax's, or `engine.optimizer.Optimizer`."""

    @property
    def init(self) -> Callable[[Any], Any]: ...

    @property
    def update(self) -> Callable[..., tuple[Any, Any]]: ...


@flax.struct.dataclass
class TrainState:
    """A model in training; every leaf lives in STORE.

    `params` are the working copy, None for what does not train: with LoRA that lives beside the
    state, is neither donated nor saved with it, and `models.lora.combine` makes the whole model of
    both. `master` is the float32 original of the working copy, None where that is float32 itself.
    `step` counts optimizer steps taken, `skipped` those left out because a gradient was not finite.
    """

    params: Any
    master: Any
    opt_state: Any
    step: jax.Array
    skipped: jax.Array


def create_state(params: Any, optimizer: AnyOptimizer) -> TrainState:
    """A fresh state around working parameters, which it does not copy."""
    mixed = any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(params))

    def rest(params: Any) -> tuple[Any, Any, jax.Array]:
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        return wide if mixed else None, optimizer.init(wide), jnp.int32(0)

    master, opt_state, zero = jax.jit(rest)(params)
    return TrainState(params, master, opt_state, zero, jnp.int32(0))


def apply_gradients(
    state: TrainState,
    grads: Any,
    optimizer: AnyOptimizer,
    finite: jax.Array,
    *,
    allowed: jax.Array | bool = True,
) -> TrainState:
    """One optimizer step on float32 gradients, unless they are not `finite` (counted): then nothing
    changes. Of a step that is not `allowed` the learning rate's schedule alone takes note.
    """
    take = finite & allowed
    master = state.params if state.master is None else state.master
    updates, opt_state = optimizer.update(grads, state.opt_state, master)
    new_master = optax.apply_updates(master, updates)

    def keep(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(take, new, old)

    new_master = jax.tree.map(keep, new_master, master)
    opt_state = kept_state(opt_state, state.opt_state, take, finite)
    params = jax.tree.map(lambda new, old: new.astype(old.dtype), new_master, state.params)
    return TrainState(
        params=params,
        master=None if state.master is None else new_master,
        opt_state=opt_state,
        step=state.step + take,
        skipped=state.skipped + ~finite,
    )


def kept_state(new: Any, old: Any, take: jax.Array, finite: jax.Array) -> Any:
    """An optimizer's state behind a step, or before one that was not taken; the learning rate falls
    as planned where `finite` steps were not allowed.
    """

    def keep(new: Any, old: Any) -> Any:
        made = finite if is_schedule(new) else take
        return jax.tree.map(lambda n, o: jnp.where(made, n, o), new, old)

    return jax.tree.map(keep, new, old, is_leaf=is_schedule)


def is_schedule(node: Any) -> bool:
    """Whether a part of an optimizer's state says how far its learning rate is."""
    return isinstance(node, optax.ScaleByScheduleState)


def schedule_step(state: TrainState) -> jax.Array:
    """How many steps the learning rate has come."""
    parts = jax.tree.leaves(state.opt_state, is_leaf=is_schedule)
    return next(part.count for part in parts if is_schedule(part))
