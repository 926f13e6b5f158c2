"""A moving average of the actor's weights, in float32."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp

from meshes.offload import check_host_memory, is_on_host, to_device, to_host
from rlhf_jax.engine.state import TrainState


@dataclass(frozen=True)
class EMAConfig:
    """A moving average of the actor, saved as `actor_ema/` and evaluated beside the last weights.

    It is taken of the float32 masters, as is the average itself: at a decay near 1 the updates of
    16-bit weights are lost.
    """

    enable: bool = False
    decay: float = 0.992
    """The share of the old average in the new one."""
    start: int = 0
    """So many updates long the average follows the weights."""
    interval: int = 1
    """Averages every this many updates."""
    per: Literal["minibatch", "iteration"] = "minibatch"
    """What counts as an update: an optimizer step, as in DeepSpeed-Chat, or a whole iteration."""
    offload: bool = False
    """Keep the average in host memory; it visits the devices for every update."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"ema.decay must lie in [0, 1), got {self.decay}")
        if self.start < 0 or self.interval < 1:
            raise ValueError(
                f"ema.start must be at least 0 and ema.interval at least 1, got {self.start} and "
                f"{self.interval}"
            )


@flax.struct.dataclass
class EMA:
    """The average, float32 in STORE or beside it on the host, and how many updates it has seen."""

    weights: Any
    count: jax.Array


def start_ema(state: TrainState, *, offload: bool = False) -> EMA:
    """The average before the first update: a copy of the weights.

    Raises:
        ValueError: `offload` where the devices have no host memory.
    """
    if offload:
        check_host_memory(jax.devices()[0])

    def copy(weights: Any, step: jax.Array) -> EMA:
        wide = to_float32(to_device(weights))
        return EMA(to_host(wide) if offload else wide, step * 0)

    return jax.jit(copy)(master_of(state), state.step)


def update_ema(ema: EMA, weights: Any, taken: jax.Array | bool, *, cfg: EMAConfig) -> EMA:
    """The average after one more update, if it was `taken`; else as it is.

        ema ← w                             n <= start
        ema ← decay·ema + (1 - decay)·w     n > start, and interval divides n

    where n counts updates from 1; in between the average stays as it is.
    """
    count = ema.count + taken
    share = jnp.where(taken & (count % cfg.interval == 0), 1.0 - cfg.decay, 0.0)
    follows = taken & (count <= cfg.start)

    def average(kept: jax.Array, new: jax.Array) -> jax.Array:
        old, new = to_device(kept), to_device(new).astype(jnp.float32)
        mixed = jnp.where(follows, new, old + share * (new - old))
        return to_host(mixed) if is_on_host(kept) else mixed

    return EMA(jax.tree.map(average, ema.weights, weights), count)


def ema_program(cfg: EMAConfig) -> Any:
    """`update_ema`, compiled; called with the actor's state, and whether that took a step. The old
    average is donated.
    """
    update = jax.jit(partial(update_ema, cfg=cfg), donate_argnums=0)
    return lambda ema, state, taken=True: update(ema, master_of(state), taken)


def average_params(ema: EMA, state: TrainState) -> Any:
    """The average as working parameters: the tree, dtypes and layout of `state.params`."""
    if all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params)):
        return to_device(ema.weights)
    return cast_like(ema.weights, state.params)


@jax.jit
def cast_like(tree: Any, like: Any) -> Any:
    """The tree on the devices, in the dtypes of another one."""
    return jax.tree.map(lambda leaf, other: to_device(leaf).astype(other.dtype), tree, like)


def master_of(state: TrainState) -> Any:
    """The float32 weights of what trains."""
    return state.params if state.master is None else state.master


def to_float32(tree: Any) -> Any:
    """The tree with float32 leaves."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
