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
    """One optimizer step on float32 gradients, unless they are not `finite` (counted), or the
    step is not `allowed`: then nothing changes.
    """
    take = finite & allowed
    master = state.params if state.master is None else state.master
    updates, opt_state = optimizer.update(grads, state.opt_state, master)
    new_master = optax.apply_updates(master, updates)

    def keep(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(take, new, old)

    new_master = jax.tree.map(keep, new_master, master)
    opt_state = jax.tree.map(keep, opt_state, state.opt_state)
    params = jax.tree.map(lambda new, old: new.astype(old.dtype), new_master, state.params)
    return TrainState(
        params=params,
        master=None if state.master is None else new_master,
        opt_state=opt_state,
        step=state.step + take,
        skipped=state.skipped + ~finite,
    )
