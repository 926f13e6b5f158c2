"""Gradients over micro-batches, and the train step of one or of several models."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import lax

from rlhf_jax.engine.state import AnyOptimizer, TrainState, apply_gradients
from rlhf_jax.models.adapted import with_dropout
from rlhf_jax.models.lora import combine
from rlhf_jax.objectives.losses import Metrics

LossFn = Callable[[Any, Any], tuple[jax.Array, Metrics]]
WeightFn = Callable[[Any], jax.Array]


def split_rows(batch: Any, num_parts: int) -> Any:
    """A batch `[B, ...]` as `[num_parts, B / num_parts, ...]`.

    Rows are dealt out in turn: a split into blocks would move rows between devices.
    """

    def split(leaf: jax.Array) -> jax.Array:
        dealt = leaf.reshape(leaf.shape[0] // num_parts, num_parts, *leaf.shape[1:])
        return dealt.swapaxes(0, 1)

    return jax.tree.map(split, batch)


def gradients(
    loss_fn: LossFn,
    params: Any,
    batch: Any,
    weight_fn: WeightFn,
    num_parts: int,
    *,
    frozen: Any = None,
    key: jax.Array | None = None,
) -> tuple[Any, jax.Array, Metrics]:
    """Float32 gradients of `params`, loss and metrics of a batch, in `num_parts` micro-batches.

    `loss_fn` reads the whole model, `params` with what is `frozen`, and gives a mean over what
    `weight_fn` counts (tokens, pairs), so that parts weighted by their share equal one large
    batch. With a `key` adapters drop out.
    """
    total = jnp.maximum(weight_fn(batch), 1e-8)

    def part_loss(params: Any, part: Any, number: jax.Array) -> tuple[jax.Array, Metrics]:
        model = combine(params, frozen)
        if key is not None:
            model = with_dropout(model, key=jax.random.fold_in(key, number))
        loss, metrics = loss_fn(model, part)
        share = weight_fn(part) / total
        return loss * share, {name: lax.stop_gradient(v) * share for name, v in metrics.items()}

    def part(params: Any, part: Any, number: jax.Array) -> tuple[Any, jax.Array, Metrics]:
        (loss, metrics), grads = jax.value_and_grad(part_loss, has_aux=True)(params, part, number)
        return jax.tree.map(lambda grad: grad.astype(jnp.float32), grads), loss, metrics

    if num_parts == 1:
        return part(params, batch, jnp.int32(0))
    parts = split_rows(batch, num_parts)
    # The sum starts from zeros, not from the first part: its body is compiled once, not twice.
    first = jax.tree.map(lambda x: x[0], parts)
    total_of, _ = lax.scan(
        lambda carry, micro: (jax.tree.map(jnp.add, carry, part(params, *micro)), None),
        zeros(jax.eval_shape(part, params, first, jnp.int32(0))),
        (parts, jnp.arange(num_parts)),
    )
    return total_of


def zeros[Tree](shapes: Tree) -> Tree:
    """Zeros of these shapes, each in its sharding."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding), shapes)


def all_finite(*norms: jax.Array) -> jax.Array:
    """Whether every gradient norm (or loss) is finite."""
    return jnp.stack([jnp.isfinite(norm) for norm in norms]).all()


def fold_step(key: jax.Array, state: TrainState) -> jax.Array:
    """The key of the next step of a state: the same after a resume."""
    return jax.random.fold_in(key, state.step + state.skipped)


def train_step(
    state: TrainState, *args: Any, optimizer: AnyOptimizer, **kwargs: Any
) -> tuple[TrainState, Metrics]:
    """One optimizer step of one model on `loss_gradients`; skipped where not finite."""
    found = loss_gradients(state, *args, **kwargs)
    return apply_gradients(state, found.grads, optimizer, found.finite), found.metrics


@flax.struct.dataclass
class Gradients:
    """Float32 gradients of one model, their norm, and whether all is finite."""

    grads: Any
    norm: jax.Array
    finite: jax.Array
    metrics: Metrics


def loss_gradients(
    state: TrainState,
    batch: Any,
    frozen: Any = None,
    key: jax.Array | None = None,
    *,
    loss_fn: LossFn,
    weight_fn: WeightFn,
    num_parts: int,
) -> Gradients:
    """The gradients of a train step, and its metrics."""
    grads, loss, metrics = gradients(
        loss_fn, state.params, batch, weight_fn, num_parts,
        frozen=frozen, key=None if key is None else fold_step(key, state),
    )  # fmt: skip
    norm = optax.tree.norm(grads)
    finite = all_finite(norm, loss)
    metrics = {**metrics, "loss": loss, "grad_norm": norm, "skipped": 1.0 - finite}
    return Gradients(grads, norm, finite, metrics)
