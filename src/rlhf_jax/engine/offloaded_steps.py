"""The update programs of a supervised step and of PPO, where optimizers live in host memory.

One program computes the gradients and leaves them on the devices; `engine.offloaded` applies them.
Called as the programs of `engine.step` and `engine.ppo_step` are, but not inside jit.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from rlhf_jax.engine.offloaded import apply_offloaded
from rlhf_jax.engine.optimizer import Optimizer
from rlhf_jax.engine.ppo_step import BothGradients, ppo_gradients
from rlhf_jax.engine.state import TrainState
from rlhf_jax.engine.step import Gradients, loss_gradients


def offloaded_train_step(*, optimizer: Optimizer, num_parts: int, **static: Any) -> Callable:
    """`engine.step.train_step`."""

    def compute(state: TrainState, *args: Any) -> Gradients:
        found = loss_gradients(state, *args, num_parts=num_parts, **static)
        return replace(found, grads=as_computed(found.grads, state.params, num_parts))

    program = jax.jit(compute)

    def step(state: TrainState, *args: Any) -> tuple[TrainState, Any]:
        found = program(bare(state), *args)
        state = apply_offloaded(state, found.grads, optimizer, found.norm, found.finite)
        return state, found.metrics

    return step


def offloaded_ppo_update(
    *, optimizers: tuple[Optimizer, Optimizer], settings: Any, **static: Any
) -> Callable:
    """`engine.ppo_step.ppo_update`."""

    def compute(actor: TrainState, critic: TrainState, *args: Any, **kwargs: Any) -> BothGradients:
        found = ppo_gradients(actor, critic, *args, settings=settings, **static, **kwargs)
        # The sum with the gradient of pretraining text is rounded nowhere: it stays as it is.
        parts = settings.num_parts + bool(settings.ptx_coef)
        return replace(
            found,
            actor=as_computed(found.actor, actor.params, parts),
            critic=as_computed(found.critic, critic.params, settings.num_parts),
        )

    program = jax.jit(compute)

    def update(actor: TrainState, critic: TrainState, *args: Any, **kwargs: Any) -> Any:
        found = program(bare(actor), bare(critic), *args, **kwargs)
        apply = partial(apply_offloaded, finite=found.finite, allowed=~found.stopped)
        actor = apply(actor, found.actor, optimizers[0], found.norms[0])
        critic = apply(critic, found.critic, optimizers[1], found.norms[1])
        return actor, critic, found.stopped, found.metrics

    return update


def bare(state: TrainState) -> TrainState:
    """What a gradient is computed of."""
    return replace(state, master=None, opt_state=None)


def as_computed(grads: Any, params: Any, num_parts: int) -> Any:
    """Float32 gradients in the dtype that one backward pass wrote them in; sums stay float32."""
    if num_parts > 1:
        return grads
    return jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, params)
