"""One optimizer step: micro-batches, float32 masters, skipped steps, donated buffers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.layout import Layout, make_mesh, parse_mesh
from meshes.reshard import put_batch
from rlhf_jax.engine.optimizer import OptimizerConfig, make_optimizer
from rlhf_jax.engine.state import TrainState, apply_gradients, create_state, schedule_step
from rlhf_jax.engine.step import gradients, split_rows, train_step
from tests.engine import toy


def optimizer(**settings):
    defaults = {"learning_rate": 0.1, "schedule": "constant"}
    return make_optimizer(OptimizerConfig(**defaults | settings), toy.SPECS, 10)


def stepper(**settings):
    """A compiled train step that donates its state."""
    step = partial(
        train_step, loss_fn=toy.loss_fn, weight_fn=toy.num_tokens, optimizer=optimizer(**settings),
        num_parts=1,
    )  # fmt: skip
    return jax.jit(step, donate_argnums=0)


def assert_trees(check: Any, one: Any, other: Any, **tolerance: float) -> None:
    jax.tree.map(partial(check, **tolerance), one, other)


@pytest.mark.parametrize("num_parts", [2, 4])
def test_micro_batches_of_uneven_token_counts_equal_one_large_batch(num_parts, tolerance):
    """On a mesh: rows are dealt out in turn, so none moves between devices."""
    layout = Layout.create(make_mesh(parse_mesh("4x2"), 2), "compute", {"mlp": 4})
    with jax.set_mesh(layout.mesh):
        batch = put_batch(toy.rows(16), layout)
        run = jax.jit(
            lambda p, b, parts: gradients(toy.loss_fn, p, b, toy.num_tokens, parts),
            static_argnums=2,
        )
        whole, parts = (run(toy.parameters(), batch, n) for n in (1, num_parts))
    assert_trees(np.testing.assert_allclose, parts, whole, **tolerance(np.float32))
    counts = toy.rows(16)["count"].reshape(-1, num_parts).sum(0)
    assert len(set(counts)) == num_parts


def test_gradients_are_those_of_numpy(tolerance):
    batch, params = toy.rows(8), toy.parameters()
    grads, loss, metrics = gradients(toy.loss_fn, params, batch, toy.num_tokens, 2)
    error = batch["x"] @ np.asarray(params["weight"]) + np.asarray(params["bias"]) - batch["y"]
    share = batch["count"][:, None] / batch["count"].sum()
    np.testing.assert_allclose(loss, (share * error**2).sum(), **tolerance(np.float32))
    np.testing.assert_allclose(metrics["error"], 2 * loss, rtol=1e-6)
    weight = batch["x"].T @ (2 * share * error)
    np.testing.assert_allclose(grads["weight"], weight, **tolerance(np.float32))
    np.testing.assert_allclose(grads["bias"], (2 * share * error).sum(0), **tolerance(np.float32))


def test_a_batch_without_tokens_has_zero_gradients():
    batch = toy.rows(4) | {"count": np.zeros(4, np.float32)}
    grads, loss, _ = gradients(toy.loss_fn, toy.parameters(), batch, toy.num_tokens, 2)
    assert loss == 0
    assert all((grad == 0).all() for grad in grads.values())


def test_rows_are_dealt_out_in_turn():
    parts = split_rows({"x": jnp.arange(6)}, 2)["x"]
    assert parts.tolist() == [[0, 2, 4], [1, 3, 5]]


def test_gradients_of_bfloat16_parameters_are_summed_in_float32():
    """512 equal parts of 1/512 each: a bfloat16 sum stops growing on the way."""

    def loss(params, batch):
        return (params["weight"].astype(jnp.float32).sum() * batch["x"].mean()), {}

    batch = {"x": jnp.full((512,), 1 + 1 / 128)}
    run = jax.jit(lambda p: gradients(loss, p, batch, lambda b: jnp.float32(b["x"].shape[0]), 512))
    grads, _, _ = run({"weight": jnp.ones(4, jnp.bfloat16)})
    assert grads["weight"].dtype == jnp.float32
    np.testing.assert_allclose(grads["weight"], 1 + 1 / 128, rtol=3e-3)


def test_float32_parameters_are_their_own_master():
    assert create_state(toy.parameters(), optimizer()).master is None


def test_working_parameters_are_their_rounded_masters_and_small_updates_add_up():
    """Steps of 1e-4 near 1 are below bfloat16's spacing of 0.004 there: only masters keep them."""
    params = jax.tree.map(lambda p: jnp.ones_like(p, jnp.bfloat16), toy.parameters())
    state = create_state(params, optimizer(learning_rate=1e-4))
    apply = jax.jit(
        lambda s, g: apply_gradients(s, g, optimizer(learning_rate=1e-4), jnp.bool_(True))
    )
    constant = jax.tree.map(lambda p: jnp.ones(p.shape), params)
    after_one = state = apply(state, constant)
    assert all((p == 1).all() for p in state.params.values())
    for _ in range(79):
        state = apply(state, constant)
    for name, master in state.master.items():
        assert master.dtype == jnp.float32
        np.testing.assert_allclose(after_one.master[name], 1 - 1e-4, rtol=1e-6)
        np.testing.assert_allclose(master, 1 - 80e-4, rtol=1e-5)
        np.testing.assert_array_equal(state.params[name], master.astype(jnp.bfloat16))
        assert (state.params[name] < 1).all()


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(bad):
    step, batch = stepper(weight_decay=0.1), toy.rows(8)
    state = create_state(toy.parameters(), optimizer(weight_decay=0.1))
    state, metrics = step(state, batch)
    before = jax.tree.map(np.asarray, state)
    poisoned = batch | {"x": np.where(np.arange(8)[:, None] == 3, bad, batch["x"])}
    state, metrics = step(state, poisoned)
    assert metrics["skipped"] == 1
    assert_trees(np.testing.assert_array_equal, state.params, before.params)
    assert_trees(np.testing.assert_array_equal, state.opt_state, before.opt_state)
    assert (state.step, state.skipped) == (1, 1)
    state, metrics = step(state, batch)
    assert (state.step, state.skipped, metrics["skipped"]) == (2, 1, 0)
    assert np.isfinite(metrics["loss"])


def test_a_step_that_is_not_allowed_changes_nothing_but_the_plan_of_the_rate():
    params, settings = toy.parameters(jnp.bfloat16), {"schedule": "linear", "weight_decay": 0.1}
    start = create_state(params, optimizer(**settings))
    grads = jax.tree.map(lambda p: jnp.ones(p.shape), params)

    def step(state: TrainState, *, finite: bool = True, allowed: bool = True) -> TrainState:
        return apply_gradients(
            state, grads, optimizer(**settings), jnp.bool_(finite), allowed=jnp.bool_(allowed)
        )

    after = step(step(start, allowed=False), allowed=False)
    assert_trees(np.testing.assert_array_equal, after.params, start.params)
    assert_trees(np.testing.assert_array_equal, after.master, start.master)
    assert (after.step, after.skipped) == (0, 0)
    assert (schedule_step(start), schedule_step(after)) == (0, 2)
    assert schedule_step(step(after, finite=False, allowed=False)) == 2
    late = jax.tree.map(lambda new, old: new - old, step(after).master, start.master)
    first = jax.tree.map(lambda new, old: new - old, step(start).master, start.master)
    assert_trees(  # Adam's first step, at the third step's rate
        np.testing.assert_allclose, late, jax.tree.map(lambda x: 0.8 * x, first), rtol=1e-4
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_old_state_is_given_to_the_new_one(dtype):
    """Warnings are errors here: every donated buffer is used."""
    state: TrainState = create_state(toy.parameters(dtype), optimizer())
    stepper()(state, toy.rows(8))
    leaves = jax.tree.leaves(state)
    assert all(leaf.is_deleted() for leaf in leaves)


def test_metrics_are_the_loss_and_the_norm_before_clipping(tolerance):
    batch, params = toy.rows(8), toy.parameters()
    grads, loss, _ = gradients(toy.loss_fn, params, batch, toy.num_tokens, 1)
    _, metrics = stepper(clip_norm=1e-3)(create_state(params, optimizer()), batch)
    norm = np.sqrt(sum(np.square(g).sum() for g in grads.values()))
    np.testing.assert_allclose(metrics["grad_norm"], norm, **tolerance(np.float32))
    np.testing.assert_allclose(metrics["loss"], loss, **tolerance(np.float32))
